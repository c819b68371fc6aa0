// The text that is shown, token by token. Going on makes a child of its state; before its end, a copy at the token first.

import { act, at, count, frames, make, ofState, post, say, soon } from "./parts.js";
import { remember } from "./memory.js";
import { settings } from "./settings.js";
import { busy, free, left, mark, newName, show, shown } from "./shown.js";

const probability = (logprob) => Math.exp(logprob).toPrecision(2);
let chosen = -1;

export function spans(text, ends, of = () => {}) {
  let start = 0;
  return ends.map((end, index) => {
    const span = make("span", { textContent: text.slice(start, end).join("") });
    span.dataset.index = index;
    of(span, index);
    start = end;
    return span;
  });
}

function shade(span, mark) {
  span.classList.add("drawn");
  if (mark) span.style.setProperty("--p", Math.exp(mark.logprob));
}

export function render() {
  const box = at("text");
  box.replaceChildren(...spans(shown.text, shown.ends));
  for (const [start, stop] of shown.drawn) {
    for (let index = start; index < stop; index++) shade(box.children[index], shown.marks.get(index));
  }
  box.scrollTop = box.scrollHeight;
  choose(-1);
}

export function choose(index) {
  const all = at("text").children;
  if (chosen >= 0 && all[chosen]) all[chosen].classList.remove("chosen");
  chosen = index;
  for (let each = 0; each < all.length; each++) all[each].classList.toggle("after", index >= 0 && each > index);
  at("token").classList.toggle("none", index < 0);
  const inside = index >= 0 && index < shown.ends.length - 1;
  at("hint").textContent = inside ? `from token ${count(index + 1)}, on a fork` : "Ctrl+Enter";
  at("place").value = index < 0 ? "" : index + 1;
  at("place").max = shown.ends.length;
  at("chosen").textContent = "";
  at("likely").replaceChildren();
  if (index < 0) return;
  all[index].classList.add("chosen");
  all[index].scrollIntoView({ block: "nearest" });
  const mark = shown.marks.get(index), drawn = shown.drawn.some(([start, stop]) => start <= index && index < stop);
  at("chosen").textContent = `Token ${count(index + 1)} of ${count(shown.ends.length)}: ` +
    JSON.stringify(all[index].textContent) + (mark ? `, drawn with probability ${probability(mark.logprob)}` : drawn ? ", drawn" : ", read");
  at("likely").replaceChildren(...Object.entries(mark ? mark.likely : {})
    .sort((one, other) => other[1] - one[1])
    .map(([text, logprob]) => make("li", {}, make("code", { textContent: JSON.stringify(text) }), ` ${probability(logprob)}`)));
}

export async function goOn(signal) {
  const save = await newName("text"), asked = settings(false), prompt = at("more").value, box = at("text"), marks = [];
  if (chosen >= 0 && chosen < shown.ends.length - 1) await fork(await free(`${shown.state}-at-${chosen + 1}`));
  const before = shown.marks, read = shown.ends.length + (await tokensOf(prompt));
  const body = { prompt, save, stream: true, logprobs: 5, ...asked };
  if (shown.state !== null) body.state = shown.state;
  choose(-1);
  let over = false;
  box.append(make("span", { textContent: prompt }));
  try {
    for await (const frame of frames(await post("/v1/completions", body, signal))) {
      const { text, logprobs } = frame.choices[0], span = make("span", { textContent: text });
      logprobs.tokens.forEach((_, i) => marks.push({ logprob: logprobs.token_logprobs[i], likely: logprobs.top_logprobs[i] }));
      shade(span, marks.at(-1));
      box.append(span);
      soon("answer", () => {
        if (over) return;
        remember(read + marks.length);
        at("hint").textContent = `${marks.length} tokens`;
        box.scrollTop = box.scrollHeight;
      });
    }
  } catch (error) {
    render();
    remember(shown.ends.length);
    if (error.name === "AbortError") say(`Stopped; ${await left(save)}.`);
    else throw error;
    return;
  } finally {
    over = true;
  }
  at("more").value = "";
  await show(save);
  const first = shown.ends.length - marks.length;
  mark(new Map([...before, ...marks.map((one, i) => [first + i, one])]));
  render();
  say(`${marks.length} tokens, kept as ${save}; seed ${asked.seed}.`);
}

async function tokensOf(content) {
  return content === "" ? 0 : (await (await post("/tokenize", { content })).json()).tokens.length;
}

async function fork(id) {
  const token = chosen + 1, marks = shown.marks;
  await post(ofState(shown.state, "/fork"), { id, token });
  await show(id);
  mark(new Map([...marks].filter(([index]) => index < token)));
  render();
  return token;
}

export async function forkHere() {
  if (shown.state === null || chosen < 0 || busy()) return;
  const id = await newName("fork"), token = await fork(id);
  say(`Forked after token ${count(token)} as ${id}.`);
  at("more").focus();
}

export function listen() {
  document.addEventListener("shown", () => { render(); remember(shown.ends.length); });
  at("fork").addEventListener("click", () => act(forkHere));
  at("place").addEventListener("change", () => {
    const index = Math.min(shown.ends.length, Math.trunc(Number(at("place").value))) - 1;
    choose(Math.max(-1, index));
  });
  at("text").addEventListener("click", (event) => {
    const index = Number(event.target.dataset.index ?? -1);
    choose(index === chosen ? -1 : index);
  });
  at("text").addEventListener("dblclick", (event) => {
    if (event.target.dataset.index === undefined) return;
    choose(Number(event.target.dataset.index));
    act(forkHere);
  });
  at("text").addEventListener("keydown", (event) => {
    const all = shown.ends.length, step = { ArrowRight: 1, ArrowLeft: -1, Home: -all, End: all }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "f" || event.key === "F") act(forkHere);
    else if (event.key === "Enter") at("more").focus();
    else if (event.key === "Escape") choose(-1);
    else if (step !== undefined && all) choose(Math.min(all - 1, Math.max(0, (chosen < 0 ? all : chosen) + step)));
    else return;
    event.preventDefault();
  });
}
