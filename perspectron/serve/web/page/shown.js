// The state that is shown. Views of it listen for the event "shown".

import { act, ask, at, here, inModel, ofState, post, say } from "./parts.js";

export const shown = { state: null, text: [], ends: [], drawn: [], messages: [], given: {}, marks: new Map() };
const kept = new Map(); // for each state: its text, and the probabilities of the tokens that were drawn on this page
let listening = null;

function tell() {
  const { state } = shown, place = [here.model.id, ...(state === null ? [] : [state])];
  history.replaceState(null, "", `#${place.map(encodeURIComponent).join("/")}`);
  document.dispatchEvent(new Event("shown"));
}

export async function restored(id) {
  const about = await (await post(ofState(id, "/restore"), {})).json();
  return { ...about, text: Array.from(about.text) };
}

export async function show(id) {
  const about = await restored(id), { text, ends, drawn, messages, given } = about, known = kept.get(`${here.model.id}/${id}`);
  const marks = known && known.text === text.join("") ? known.marks : new Map(); // another text may have taken the name
  Object.assign(shown, { state: id, text, ends, drawn, messages, given, marks });
  tell();
  return about;
}

export function mark(marks) {
  shown.marks = marks;
  kept.set(`${here.model.id}/${shown.state}`, { text: shown.text.join(""), marks });
}

export function clear() {
  Object.assign(shown, { state: null, text: [], ends: [], drawn: [], messages: [], given: {}, marks: new Map() });
  tell();
}

async function names() {
  const { data } = await (await ask(`/v1/states${inModel()}`)).json();
  return new Set(data.map((state) => state.id));
}

export async function newName(kind) {
  const typed = at("name").value.trim();
  if (typed && (await names()).has(typed) && !confirm(`Replace ${typed}? What it holds is gone then.`)) {
    throw new Error(`${typed} stays as it is; give another name.`);
  }
  at("name").value = "";
  return typed || `${kind}-${Date.now().toString(36)}`;
}

// What became of an answer that was stopped: it may have ended before the server heard of that.
export async function left(id) {
  const there = await names();
  if (there.has(id)) document.dispatchEvent(new Event("shown"));
  return there.has(id) ? `it had ended already, and is kept as ${id}` : "nothing was added";
}

// A name like this one that no state has, so that none is replaced.
export async function free(like) {
  const taken = await names();
  const name = like.replace(/[^A-Za-z0-9._-]/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 60) || `file-${Date.now().toString(36)}`;
  let own = name;
  for (let number = 2; taken.has(own); number += 1) own = `${name}-${number}`;
  return own;
}

// One answer at a time: a second is not begun, and Stop gives up the first.
export async function answering(what) {
  if (listening !== null) return;
  listening = new AbortController();
  at("go").disabled = true;
  at("stop").disabled = false;
  for (const id of ["states", "fresh", "model"]) at(id).inert = true; // they would show another text
  say("Under way.");
  await act(() => what(listening.signal));
  listening = null;
  at("go").disabled = false;
  at("stop").disabled = true;
  for (const id of ["states", "fresh", "model"]) at(id).inert = false;
}

// While an answer is under way no other text is shown.
export const busy = () => {
  if (listening !== null) say("An answer is under way; stop it first.", true);
  return listening !== null;
};

export function stop() {
  if (listening !== null) listening.abort();
}
