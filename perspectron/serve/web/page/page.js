"use strict";
// The text that is shown is a state of the server. Going on makes a child of it; forking copies it at a token.

const at = (id) => document.getElementById(id);
const shown = { state: null, text: [], ends: [], marks: new Map(), bytes: 0, chosen: -1 };
const kept = new Map(); // of each state: the probabilities of the tokens that were drawn here
let models = [];
let listening = null;

function size(bytes) {
  if (bytes < 1e6) return `${(bytes / 1e3).toFixed(1)} kB`;
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;
}

function say(words, bad = false) {
  at("said").textContent = words;
  at("said").classList.toggle("bad", bad);
}

async function ask(path, options = {}) {
  const answer = await fetch(path, options);
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Error(body && body.error ? body.error.message : `the server answers ${answer.status}`);
  }
  return answer;
}

function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify({ model: at("model").value, ...body }), signal });
}

const inModel = () => `?model=${encodeURIComponent(at("model").value)}`;
const ofState = (id, what = "") => `/v1/states/${encodeURIComponent(id)}${what}`;

function newName() {
  const typed = at("name").value.trim();
  at("name").value = "";
  return typed || `text-${Date.now().toString(36)}`;
}

// The text

function render() {
  const box = at("text"), spans = document.createDocumentFragment();
  let start = 0;
  shown.ends.forEach((end, index) => {
    const span = document.createElement("span"), mark = shown.marks.get(index);
    span.textContent = shown.text.slice(start, end).join("");
    span.dataset.index = index;
    if (mark) {
      span.className = "drawn";
      span.style.setProperty("--p", Math.exp(mark.logprob));
    }
    spans.append(span);
    start = end;
  });
  box.replaceChildren(spans);
  box.scrollTop = box.scrollHeight;
  choose(-1);
  remember();
}

function suggest() {
  const { temperature } = models.find((one) => one.id === at("model").value).sampling;
  if (temperature !== 1) at("temperature").value = temperature;
}

function remember() {
  const model = models.find((one) => one.id === at("model").value);
  if (!model) return;
  const [tokens, bytes] = shown.bytes ? [shown.ends.length, shown.bytes] : [model.state_tokens, model.state_bytes];
  at("memory").textContent =
    `Memory of ${shown.bytes ? "" : "a text of "}${tokens.toLocaleString("en")} tokens: ${size(bytes)}; ` +
    `a transformer of this width and depth keeps ${size((tokens + 1) * model.twin_cache_bytes)} for them`;
}

function choose(index) {
  const spans = at("text").children;
  if (shown.chosen >= 0 && spans[shown.chosen]) spans[shown.chosen].classList.remove("chosen");
  shown.chosen = index;
  at("token").hidden = index < 0;
  if (index < 0) return;
  spans[index].classList.add("chosen");
  spans[index].scrollIntoView({ block: "nearest" });
  const mark = shown.marks.get(index), likely = at("likely");
  at("chosen").textContent = `Token ${index + 1} of ${shown.ends.length}: ${JSON.stringify(spans[index].textContent)}` +
    (mark ? `, drawn with probability ${Math.exp(mark.logprob).toPrecision(2)}` : ", read");
  likely.replaceChildren(...Object.entries(mark ? mark.likely : {})
    .sort((one, other) => other[1] - one[1])
    .map(([text, logprob]) => {
      const item = document.createElement("li");
      item.textContent = `${JSON.stringify(text)} ${Math.exp(logprob).toPrecision(2)}`;
      return item;
    }));
}

async function show(id) {
  const about = await (await post(ofState(id, "/restore"), {})).json();
  Object.assign(shown, {
    state: id, text: Array.from(about.text), ends: about.ends, marks: kept.get(id) || new Map(), bytes: about.state_bytes,
  });
  render();
  await list();
  return about;
}

// The tree

async function list() {
  const { data } = await (await ask(`/v1/states${inModel()}`)).json();
  const known = new Set(data.map((state) => state.id)), children = new Map();
  for (const state of data) {
    const parent = known.has(state.parent) && state.parent !== state.id ? state.parent : "";
    children.set(parent, [...(children.get(parent) || []), state]);
  }
  const placed = new Set();
  const branch = (parent) => (children.get(parent) || []).filter((state) => !placed.has(state.id)).map((state) => {
    placed.add(state.id);
    const item = document.createElement("li"), below = branch(state.id);
    item.append(entry(state));
    if (below.length) {
      const inner = document.createElement("ul");
      inner.append(...below);
      item.append(inner);
    }
    return item;
  });
  at("tree").replaceChildren(...branch(""));
}

function entry(state) {
  const row = document.createElement("div"), name = document.createElement("button");
  const about = document.createElement("small"), load = document.createElement("a"), drop = document.createElement("button");
  row.className = "state";
  name.className = "name";
  name.type = "button";
  name.textContent = state.id;
  name.title = `Return to ${state.id}`;
  name.setAttribute("aria-current", String(state.id === shown.state));
  name.addEventListener("click", () => act(async () => {
    const restored = await show(state.id);
    say(`Returned to ${state.id} in ${restored.ms.toFixed(1)} ms.`);
  }));
  about.textContent = `${state.tokens} tokens, ${size(state.bytes)}`;
  load.href = ofState(state.id) + inModel();
  load.download = `${state.id}.state`;
  load.textContent = "↓";
  load.setAttribute("aria-label", `Download ${state.id}`);
  drop.className = "drop";
  drop.type = "button";
  drop.textContent = "×";
  drop.setAttribute("aria-label", `Delete ${state.id}`);
  drop.addEventListener("click", () => act(async () => {
    await ask(ofState(state.id) + inModel(), { method: "DELETE" });
    if (state.id === shown.state) clear();
    await list();
  }));
  row.append(name, about, load, drop);
  return row;
}

function clear() {
  Object.assign(shown, { state: null, text: [], ends: [], marks: new Map(), bytes: 0 });
  render();
}

// What one can do

async function act(what) {
  try {
    await what();
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  }
}

async function* frames(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let open = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (open + value).split("\n");
    open = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function goOn() {
  const save = newName(), prompt = at("more").value, marks = [];
  const body = {
    prompt, save, stream: true, logprobs: 5, max_tokens: Number(at("count").value) || 1,
    temperature: Number(at("temperature").value), seed: Math.trunc(Number(at("seed").value)),
  };
  if (shown.state !== null) body.state = shown.state;
  const before = shown.marks, typed = document.createElement("span");
  choose(-1);
  typed.textContent = prompt;
  at("text").append(typed);
  at("go").disabled = true;
  at("stop").disabled = false;
  listening = new AbortController();
  say("Reading.");
  try {
    for await (const frame of frames(await post("/v1/completions", body, listening.signal))) {
      if (frame.error || frame.state_error) throw new Error(frame.error ? frame.error.message : frame.state_error);
      const { text, logprobs } = frame.choices[0], span = document.createElement("span");
      logprobs.tokens.forEach((_, i) => marks.push({ logprob: logprobs.token_logprobs[i], likely: logprobs.top_logprobs[i] }));
      span.textContent = text;
      span.className = "drawn";
      at("text").append(span);
      at("text").scrollTop = at("text").scrollHeight;
      say(`${marks.length} tokens.`);
    }
    at("more").value = "";
    kept.set(save, new Map(before));
    await show(save);
    const first = shown.ends.length - marks.length;
    marks.forEach((mark, i) => shown.marks.set(first + i, mark));
    render();
    say(`${marks.length} tokens, kept as ${save}.`);
  } catch (error) {
    render();
    if (error.name === "AbortError") say("Stopped; the text is as it was.");
    else throw error;
  } finally {
    listening = null;
    at("go").disabled = false;
    at("stop").disabled = true;
  }
}

async function forkHere() {
  const token = shown.chosen + 1, id = newName();
  if (shown.state === null || token < 1) return;
  await post(ofState(shown.state, "/fork"), { id, token });
  kept.set(id, new Map([...shown.marks].filter(([index]) => index < token)));
  await show(id);
  say(`Forked after token ${token} as ${id}.`);
  at("more").focus();
}

async function restoreFile() {
  const [file] = at("file").files;
  if (!file) return;
  const id = file.name.replace(/\.state$/, "").replace(/[^A-Za-z0-9._-]/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 64) || newName();
  at("file").value = "";
  await ask(ofState(id) + inModel(), { method: "PUT", body: file });
  await show(id);
  say(`Restored ${id}.`);
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); if (listening === null) act(goOn); });
at("more").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
});
at("stop").addEventListener("click", () => listening && listening.abort());
at("fresh").addEventListener("click", () => act(async () => { clear(); await list(); at("more").focus(); }));
at("fork").addEventListener("click", () => act(forkHere));
at("file").addEventListener("change", () => act(restoreFile));
at("model").addEventListener("change", () => act(async () => { suggest(); clear(); await list(); }));
at("text").addEventListener("click", (event) => {
  if (event.target.dataset.index !== undefined) choose(Number(event.target.dataset.index));
});
at("text").addEventListener("keydown", (event) => {
  const count = shown.ends.length, step = { ArrowRight: 1, ArrowLeft: -1, Home: -count, End: count }[event.key];
  if (event.key === "f" || event.key === "F") act(forkHere);
  else if (event.key === "Escape") choose(-1);
  else if (step !== undefined && count) choose(Math.min(count - 1, Math.max(0, (shown.chosen < 0 ? count : shown.chosen) + step)));
  else return;
  event.preventDefault();
});

act(async () => {
  models = (await (await ask("/v1/models")).json()).data;
  at("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  suggest();
  clear();
  await list();
  at("more").focus();
});
