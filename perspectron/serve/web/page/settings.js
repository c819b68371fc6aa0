// Sampling settings. Those left out are the model's own, except a temperature of 1: its authors suggest nothing then.

import { at, here } from "./parts.js";

const RULES = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"];
const OFF = { top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1 };
const TEMPERATURE = 0.8; // for a model whose authors suggest none
const TOKENS = 80; // most tokens to draw, outside of chats

export function suggest() {
  const suggested = here.model.sampling;
  for (const name of RULES) {
    const value = name === "temperature" && suggested[name] === 1 ? TEMPERATURE : suggested[name];
    at(name).placeholder = value === OFF[name] ? "off" : value;
  }
}

export function tokens(chat) {
  at("count").placeholder = chat ? "1,024 at most" : TOKENS;
}

export function settings(chat) {
  const asked = {};
  for (const name of RULES) if (at(name).value !== "") asked[name] = Number(at(name).value);
  if (asked.temperature === undefined && here.model.sampling.temperature === 1) asked.temperature = TEMPERATURE;
  const drawn = at("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(at("seed").value);
  asked.seed = Math.trunc(drawn);
  if (at("count").value !== "" || !chat) asked.max_tokens = Number(at("count").value || TOKENS);
  return asked;
}
