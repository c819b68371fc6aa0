// The chat that is shown. Its messages are kept in the state, so it can be continued wherever the state is.

import { at, count, frames, here, make, post, say, soon } from "./parts.js";
import { settings } from "./settings.js";
import { left, newName, show, shown } from "./shown.js";

const NAMES = { user: "You", assistant: "Model", system: "System" };
let until = null; // how many messages the chat is continued after; null: after all of them

function bubble({ role, content }, index) {
  const who = make("p", { className: "who", textContent: NAMES[role] || role });
  const made = make("article", { className: `bubble ${role === "user" ? "user" : "model"}` }, who, make("p", { className: "content", textContent: content }));
  if (role === "assistant" && index !== undefined && index < shown.messages.length - 1) {
    const back = make("button", { type: "button", textContent: "Go on from here" });
    back.addEventListener("click", () => {
      until = until === index + 1 ? null : index + 1;
      mark();
      at("more").focus();
    });
    made.append(back);
  }
  return made;
}

function mark() {
  [...at("talk").querySelectorAll(".bubble")].forEach((one, index) => {
    one.classList.toggle("after", until !== null && index >= until);
  });
  const chat = at("talk").closest("section").hidden === false;
  if (chat) at("hint").textContent = until === null ? "Enter sends, Shift+Enter is a new line" : `after message ${until}, as a branch`;
}

export function render() {
  const box = at("talk"), { messages } = shown;
  until = null;
  const notes = [];
  if (!here.model.chat) notes.push("This model has no chat template. perspectron serve RUN --template plain gives it one.");
  else if (!messages.length && shown.state !== null) notes.push(`A talk goes on after the text of ${shown.state}, ${count(shown.ends.length)} tokens.`);
  else if (!messages.length) notes.push("Nothing has been said yet.");
  box.replaceChildren(...notes.map((textContent) => make("p", { className: "note", textContent })), ...messages.map(bubble));
  box.scrollTop = box.scrollHeight;
  mark();
}

export async function send(signal) {
  const said = at("more").value.trim(), box = at("talk");
  if (!said) return say("Nothing to send.");
  const save = await newName("chat"), asked = settings(true), before = shown.messages.slice(0, until ?? shown.messages.length);
  const messages = [...before, { role: "user", content: said }];
  const { tools = [], ...others } = shown.given; // what the template was given beside the messages
  const body = { messages, save, stream: true, tools, chat_template_kwargs: others, ...asked };
  if (shown.state !== null) body.state = shown.state;
  const answer = bubble({ role: "assistant", content: "" }), content = answer.querySelector(".content");
  box.replaceChildren(...before.map(bubble), bubble(messages.at(-1)), answer);
  box.setAttribute("aria-busy", "true");
  at("more").value = "";
  try {
    for await (const frame of frames(await post("/v1/chat/completions", body, signal))) {
      content.append(frame.choices[0].delta.content || "");
      soon("answer", () => { box.scrollTop = box.scrollHeight; });
    }
    await show(save);
    say(`Kept as ${save}; seed ${asked.seed}.`);
  } catch (error) {
    at("more").value = said;
    if (error.name !== "AbortError") {
      render();
      throw error;
    }
    answer.classList.add("after");
    say(`Stopped; ${await left(save)}, and your message is back in its box.`);
  } finally {
    box.removeAttribute("aria-busy");
  }
}

export const listen = () => document.addEventListener("shown", render);
