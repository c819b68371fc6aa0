// Two states side by side: where their texts part, what each expects next, and how far the layers of their states are apart.

import { act, at, count, make, ofState, post, say } from "./parts.js";
import { restored, shown } from "./shown.js";
import { spans } from "./text.js";

const LEAD = 24; // tokens before the place where they part: few, so that it is seen, and at one height
let states = [], turn = 0;

function bar(share) {
  const made = make("span", { className: "bar", attributes: { "aria-hidden": "true" } });
  made.style.setProperty("--share", share);
  return made;
}

function column(about, other, shared, expected) {
  const whole = shared === null ? 0 : shared, first = Math.max(0, whole - LEAD), box = make("div", { className: "tokens", tabIndex: 0, attributes: { role: "group", "aria-label": `Text of ${about.id}` } });
  const drawn = (index) => about.drawn.some(([start, stop]) => start <= index && index < stop);
  const all = spans(about.text, about.ends, (span, index) => {
    if (index < whole) span.className = "same";
    else if (drawn(index)) span.className = "drawn";
  });
  if (first > 0) box.append(make("span", { className: "same", textContent: `… ${count(first)} tokens … ` }));
  box.append(...all.slice(first, whole));
  if (shared !== null) box.append(make("span", { className: "parting", textContent: whole < about.ends.length ? "parts here" : "ends here" }));
  box.append(...all.slice(whole));
  const next = make("ol", { className: "next", attributes: { "aria-label": `What ${about.id} expects next` } });
  next.append(...expected.map(([text, p]) => make("li", {}, bar(p), make("code", { textContent: JSON.stringify(text) }), ` ${p.toPrecision(2)}`)));
  return make("section", { attributes: { "aria-label": about.id } }, make("h2", { textContent: about.id }), box, make("h3", { textContent: "Expects next" }), next);
}

function distances(layers) {
  const rows = layers.map((apart, index) => make("li", {}, `Layer ${index + 1}`, bar(apart / Math.max(1, ...layers)), ` ${apart.toFixed(2)}`));
  return [make("h2", { textContent: "How far the states are apart, layer by layer" }), make("p", { className: "note", textContent: "0 is the same; 1 is as far as the larger of the two is from nothing." }), make("ol", { className: "layers" }, ...rows)];
}

async function compare() {
  const mine = ++turn, [left, right] = [at("left").value, at("right").value];
  at("branches").replaceChildren();
  at("layers").replaceChildren();
  if (!left || !right || left === right) {
    at("parting").textContent = states.length < 2 ? "There is nothing to compare yet: fork a text and go on with both." : "Choose two states.";
    return;
  }
  at("parting").textContent = "Comparing.";
  const asked = [restored(left), restored(right), post(ofState(left, "/diff"), { other: right }).then((answer) => answer.json())];
  const [one, other, diff] = await Promise.all(asked).catch((error) => {
    if (mine === turn) at("parting").textContent = "They could not be compared.";
    throw error;
  });
  if (mine !== turn) return;
  const { shared, next, spelled } = diff, expected = next.map((each, i) => each.map(([, p], j) => [spelled[i][j], p]));
  at("parting").textContent = shared === null ? "The beginning of one is not known, so neither is where they part."
    : `The first ${count(shared)} tokens are the same; then come ${count(one.ends.length - shared)} and ${count(other.ends.length - shared)} of their own.`;
  at("branches").replaceChildren(column(one, other, shared, expected[0]), column(other, one, shared, expected[1]));
  at("layers").replaceChildren(...distances(diff.layers));
}

function offer(listed) {
  states = listed.map((state) => state.id);
  for (const [id, otherwise] of [["left", shown.state], ["right", ""]]) {
    const chosen = at(id).value || otherwise;
    at(id).replaceChildren(new Option("—", ""), ...states.map((name) => new Option(name, name)));
    at(id).value = states.includes(chosen) ? chosen : "";
  }
}

export function choose([left, right]) {
  at("left").value = left;
  at("right").value = right;
  return open();
}

export const open = () => act(async () => {
  if (!at("left").value && shown.state !== null) at("left").value = shown.state;
  say("");
  await compare();
});

export function listen() {
  document.addEventListener("listed", ({ detail }) => offer(detail));
  for (const id of ["left", "right"]) at(id).addEventListener("change", () => act(compare));
}
