// The state that is shown. Whoever shows it listens for "shown".

import { act, at, here, ofState, post, say } from "./parts.js";

export const shown = { state: null, text: [], ends: [], drawn: [], messages: [], marks: new Map() };
export const kept = new Map(); // of each state: the probabilities of the tokens that were drawn here
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
  const about = await restored(id), { text, ends, drawn, messages } = about;
  Object.assign(shown, { state: id, text, ends, drawn, messages, marks: kept.get(id) || new Map() });
  tell();
  return about;
}

export function clear() {
  Object.assign(shown, { state: null, text: [], ends: [], drawn: [], messages: [], marks: new Map() });
  tell();
}

export function newName(kind) {
  const typed = at("name").value.trim();
  at("name").value = "";
  return typed || `${kind}-${Date.now().toString(36)}`;
}

// One answer at a time: a second is not begun, and Stop gives up the first.
export async function answering(what) {
  if (listening !== null) return;
  listening = new AbortController();
  at("go").disabled = true;
  at("stop").disabled = false;
  say("Under way.");
  await act(() => what(listening.signal));
  listening = null;
  at("go").disabled = false;
  at("stop").disabled = true;
}

export function stop() {
  if (listening !== null) listening.abort();
}
