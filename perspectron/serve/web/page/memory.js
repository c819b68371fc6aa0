// Bytes of the state over the text, beside the keys and values that a transformer of this width and depth would keep.

import { at, count, here, make, size } from "./parts.js";

const SVG = "http://www.w3.org/2000/svg", WIDTH = 320, BOTTOM = 128, TOP = 12, LEFT = 2;

const own = (tokens) => here.model.first_token_bytes + (tokens - 1) * here.model.next_token_bytes;
const twin = (tokens) => (tokens + here.model.prefix_tokens) * here.model.twin_cache_bytes;

// The first token after which this memory is the smaller one, if it ever is.
function crossing() {
  const faster = here.model.twin_cache_bytes - here.model.next_token_bytes;
  return faster > 0 ? Math.max(1, Math.floor((own(1) - twin(1)) / faster) + 2) : null;
}

function sentence(tokens) {
  const ours = own(tokens), theirs = twin(tokens), from = crossing(), ratio = theirs / ours;
  const beside = ratio >= 1.5 ? `, ${ratio < 10 ? ratio.toFixed(1) : count(Math.round(ratio))} times as much` : "";
  const later = ours >= theirs && from !== null ? ` This memory is the smaller one from token ${count(from)} on.` : "";
  return `${count(tokens)} ${tokens === 1 ? "token" : "tokens"}: ${size(ours)}. ` +
    `A transformer of this width and depth would keep ${size(theirs)}${beside}.${later}`;
}

function draw(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function chart(tokens) {
  const from = crossing(), room = here.model.context ?? Infinity;
  const last = Math.min(room, Math.ceil(Math.max(64, 1.4 * tokens, from === null ? 0 : 1.5 * from)));
  const most = Math.max(own(last), twin(last)), x = (t) => LEFT + ((WIDTH - 2 * LEFT) * t) / last;
  const y = (bytes) => BOTTOM - ((BOTTOM - TOP) * bytes) / most, parts = [];
  const line = (value, at) => at.map((t) => `${x(t).toFixed(1)},${y(value(t)).toFixed(1)}`).join(" ");
  const less = own(last) < twin(last), low = y(own(0.75 * last)) + 16 < BOTTOM; // labels stand where no line runs
  const [ours, theirs] = less
    ? [{ x: WIDTH, y: low ? y(own(0.75 * last)) + 15 : y(own(last)) - 6, "text-anchor": "end" }, { x: x(0.7 * last) - 8, y: y(twin(0.7 * last)) - 4, "text-anchor": "end" }]
    : [{ x: LEFT + 56, y: y(own(1)) + 14 }, { x: WIDTH, y: Math.min(BOTTOM - 5, y(twin(last)) + 14), "text-anchor": "end" }];
  parts.push(draw("line", { x1: 0, y1: BOTTOM, x2: WIDTH, y2: BOTTOM, class: "axis" }));
  parts.push(draw("line", { x1: x(tokens), y1: TOP - 8, x2: x(tokens), y2: BOTTOM, class: "now" }));
  for (const [name, value, words, where] of [["twin", twin, "a transformer", theirs], ["own", own, "this memory", ours]]) {
    parts.push(draw("polyline", { points: line(value, [1, last]), class: name }));
    parts.push(draw("circle", { cx: x(tokens), cy: y(value(tokens)), r: 3.5, class: name }));
    parts.push(draw("text", { ...where, class: name }, words));
  }
  parts.push(draw("text", { x: 0, y: 145 }, "0"), draw("text", { x: WIDTH, y: 145, "text-anchor": "end" }, `${count(last)} tokens`));
  parts.push(draw("text", { x: 0, y: TOP }, size(most)));
  at("chart").replaceChildren(...parts);
}

function table(tokens) {
  const rows = [...new Set([1, 16, 256, 4096, tokens, here.model.state_tokens])].sort((a, b) => a - b);
  at("bytes").tBodies[0].replaceChildren(...rows.filter((t) => t <= Math.max(tokens, here.model.state_tokens)).map((t) =>
    make("tr", {}, make("th", { scope: "row", textContent: count(t) }), make("td", { textContent: size(own(t)) }), make("td", { textContent: size(twin(t)) }))));
}

// Show what a text of so many tokens takes; before there is one, what its first token will.
export function remember(tokens) {
  const least = Math.max(1, tokens);
  at("memory").textContent = sentence(least);
  chart(least);
  table(least);
}
