// What all parts of the page use: elements, words to the reader, and the server. What the server says is text, never markup.

export const at = (id) => document.getElementById(id);
export const here = { models: [], model: null }; // the models that are served, and the one that is chosen

export function make(tag, properties = {}, ...children) {
  const { attributes = {}, ...own } = properties, made = Object.assign(document.createElement(tag), own);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function size(bytes) {
  if (bytes < 1e3) return `${bytes} B`;
  if (bytes < 1e6) return `${(bytes / 1e3).toFixed(1)} kB`;
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;
}

export const count = (number) => number.toLocaleString("en");

export function say(words, bad = false) {
  at("said").textContent = words;
  at("said").classList.toggle("bad", bad);
}

export async function act(what) {
  try {
    await what();
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  }
}

export async function ask(path, options = {}) {
  const answer = await fetch(path, options);
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Error(body && body.error ? body.error.message : `the server answers ${answer.status}`);
  }
  return answer;
}

export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify({ model: here.model.id, ...body }), signal });
}

export const inModel = () => `?model=${encodeURIComponent(here.model.id)}`;
export const ofState = (id, what = "") => `/v1/states/${encodeURIComponent(id)}${what}`;

const due = new Map();

// Before the page is drawn next, call the last function that was given under a name, once.
export function soon(name, what) {
  if (!due.has(name)) requestAnimationFrame(() => { const last = due.get(name); due.delete(name); last(); });
  due.set(name, what);
}

// The events of an answer. Where a server is faster than the page, clicks come between them all the same.
export async function* frames(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rested = performance.now();
  for (let open = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (open + value).split("\n");
    open = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const frame = JSON.parse(line.slice(6));
      if (performance.now() - rested > 30) {
        await new Promise((done) => setTimeout(done));
        rested = performance.now();
      }
      if (frame.error || frame.state_error) throw new Error(frame.error ? frame.error.message : frame.state_error);
      yield frame;
    }
  }
}
