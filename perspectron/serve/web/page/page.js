// The page: its views, and what one does in them. What is shown is a state of the server.

import * as chat from "./chat.js";
import * as compare from "./compare.js";
import { act, ask, at, here } from "./parts.js";
import { suggest, tokens } from "./settings.js";
import { answering, clear, show, shown, stop } from "./shown.js";
import * as text from "./text.js";
import * as tree from "./tree.js";

const VIEWS = ["text", "chat", "compare"];
let view = "text";

function turn(to) {
  view = to;
  for (const name of VIEWS) {
    const tab = at(`tab-${name}`);
    at(`${name}-view`).hidden = name !== view;
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
  }
  const talking = view === "chat";
  at("ask").hidden = view === "compare" || (talking && !here.model.chat);
  at("more-label").textContent = talking ? "Message" : "Continue with";
  at("go").textContent = talking ? "Send" : "Continue";
  at("fresh").textContent = talking ? "New chat" : "New text";
  at("more").placeholder = talking ? "" : "Some text, or nothing";
  tokens(talking);
  if (talking) chat.render();
  else text.choose(-1);
}

async function start(model, state) {
  here.model = here.models.find((one) => one.id === model) || here.models[0];
  at("model").value = here.model.id;
  suggest();
  if (state === undefined) clear();
  else await show(state).catch((error) => { clear(); throw error; });
  turn(shown.messages.length ? "chat" : view);
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch { // a stray % in an address that somebody typed
    return part;
  }
}

for (const part of [text, chat, tree, compare]) part.listen();
for (const name of VIEWS) {
  at(`tab-${name}`).addEventListener("click", () => { turn(name); if (name === "compare") compare.open(); });
  at(`tab-${name}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -VIEWS.indexOf(name), End: VIEWS.length - 1 - VIEWS.indexOf(name) }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = at(`tab-${VIEWS[(VIEWS.indexOf(name) + step + VIEWS.length) % VIEWS.length]}`);
    next.focus();
    next.click();
  });
}
document.addEventListener("compare", ({ detail }) => { turn("compare"); compare.choose(detail); });
at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  answering(view === "chat" ? chat.send : text.goOn);
});
at("more").addEventListener("keydown", (event) => {
  const plain = view === "chat" && !event.shiftKey && !event.isComposing;
  if (event.key !== "Enter" || !(plain || event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
at("settings").addEventListener("invalid", () => { at("settings").open = true; }, true); // to show what is wrong
at("stop").addEventListener("click", stop);
at("fresh").addEventListener("click", () => { clear(); at("more").focus(); });
at("model").addEventListener("change", () => act(() => start(at("model").value)));

act(async () => {
  here.models = (await (await ask("/v1/models")).json()).data;
  at("model").replaceChildren(...here.models.map((model) => new Option(model.id, model.id)));
  await start(...location.hash.slice(1).split("/").filter(Boolean).map(decoded));
  at("more").focus();
});
