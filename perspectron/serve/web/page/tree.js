// The tree of states: return to one, compare, take a file out, put one in.

import { act, ask, at, count, inModel, make, ofState, say, size } from "./parts.js";
import { busy, clear, free, show, shown } from "./shown.js";

const words = new Map(); // first words of each state, by `key`, which changes when it is saved anew
let turn = 0;

export async function list() {
  const mine = ++turn, { data } = await (await ask(`/v1/states${inModel()}`)).json();
  if (mine !== turn) return [];
  const known = new Set(data.map((state) => state.id)), children = new Map();
  for (const state of data) {
    const parent = known.has(state.parent) && state.parent !== state.id ? state.parent : "";
    children.set(parent, [...(children.get(parent) || []), state]);
  }
  const placed = new Set();
  const branch = (states) => states.filter((state) => !placed.has(state.id)).map((state) => {
    placed.add(state.id);
    const item = make("li", {}, entry(state)), below = branch(children.get(state.id) || []);
    if (below.length) item.append(make("ul", {}, ...below));
    return item;
  });
  const rows = branch(children.get("") || []);
  for (const state of data) rows.push(...branch([state])); // parents of names that were used again may form a ring without a root
  at("tree").replaceChildren(...rows);
  document.dispatchEvent(new CustomEvent("listed", { detail: data }));
  read(data, mine);
  return data;
}

const key = (state) => [inModel(), state.id, state.created, state.tokens].join(" ");

// Fetch the first words of each state, one after the other, until another list is asked for.
async function read(states, mine) {
  for (const state of states) {
    if (!words.has(key(state))) {
      const log = await ask(ofState(state.id, "/log") + inModel()).then((answer) => answer.json()).catch(() => null);
      words.set(key(state), log ? log.words : "");
    }
    if (mine !== turn) return;
    const place = [...at("tree").querySelectorAll(".words")].find((one) => one.dataset.of === state.id);
    if (place) place.textContent = words.get(key(state));
  }
}

function entry(state) {
  const current = state.id === shown.state, path = ofState(state.id) + inModel();
  const name = make("button", { type: "button", className: "name", textContent: state.id, title: `Return to ${state.id}` });
  const said = make("p", { className: "words", textContent: words.get(key(state)) ?? "" });
  const beside = make("button", { type: "button", textContent: "⇄", title: "Compare with the text that is shown", disabled: current || shown.state === null });
  const load = make("a", { href: path, download: `${state.id}.state`, textContent: "↓", title: "Download, or drag out" });
  const drop = make("button", { type: "button", className: "drop", textContent: "×", title: "Delete" });
  for (const [control, what] of [[beside, "Compare with"], [load, "Download"], [drop, "Delete"]]) {
    control.setAttribute("aria-label", `${what} ${state.id}`);
  }
  name.setAttribute("aria-current", String(current));
  said.dataset.of = state.id;
  name.addEventListener("click", () => act(async () => {
    const restored = await show(state.id);
    say(`Returned to ${state.id} in ${restored.ms.toFixed(1)} ms.`);
  }));
  beside.addEventListener("click", () => document.dispatchEvent(new CustomEvent("compare", { detail: [shown.state, state.id] })));
  drop.addEventListener("click", () => act(async () => {
    if (!confirm(`Delete ${state.id}? Its file is gone then.`)) return;
    await ask(path, { method: "DELETE" });
    if (state.id === shown.state) clear();
    else await list();
  }));
  const row = make("div", { className: "state", draggable: true }, name, beside, load, drop, said);
  row.append(make("small", { textContent: `${count(state.tokens)} tokens, ${size(state.bytes)}` }));
  row.addEventListener("dragstart", (event) => {
    event.dataTransfer.setData("DownloadURL", `application/octet-stream:${state.id}.state:${load.href}`);
    event.dataTransfer.setData("text/uri-list", load.href);
  });
  return row;
}

async function put(file) {
  if (busy()) return;
  const name = await free(file.name.replace(/\.state$/, ""));
  await ask(ofState(name) + inModel(), { method: "PUT", body: file });
  await show(name);
  say(`Restored ${name}.`);
}

export function listen() {
  const zone = at("states"), files = (event) => event.dataTransfer && event.dataTransfer.types.includes("Files");
  document.addEventListener("shown", () => act(list));
  at("file").addEventListener("change", () => act(async () => {
    const [file] = at("file").files;
    if (file) await put(file);
    at("file").value = "";
  }));
  document.addEventListener("dragover", (event) => { // anywhere: a browser would leave the page for the file
    if (!files(event)) return;
    event.preventDefault();
    zone.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => { if (event.relatedTarget === null) zone.classList.remove("over"); });
  document.addEventListener("drop", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    zone.classList.remove("over");
    act(async () => { for (const file of event.dataTransfer.files) await put(file); });
  });
}
