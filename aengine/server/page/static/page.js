// The page: fields, buttons and keys.

import { hasKey, setKey, streamChat } from "./api.js";
import { startGraphs } from "./graphs.js";
import { Answer, isAtEnd, showUser, toEnd } from "./messages.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const prompt = $("prompt");
let messages = []; // of the chat, without the system prompt
let answers = []; // as shown, since the last message that is no answer
let running = null; // the AbortController of the answer under way
let model = null; // its name, once the server has told it
let isKnown = false; // whether the server has told more of it
let listed = ""; // the models that are shown, of a server that has several
let needsKey = false; // until the server accepts one
const [welcome, examples] = [$("welcome"), $("examples")]; // in the page while a chat has no messages

// -- fields

const FIELDS = ["system", "temperature", "max_tokens", "top_p", "top_k", "seed", "stop-string", "schema", "tools"];
for (const id of FIELDS) {
  $(id).value = sessionStorage.getItem(`aengine.${id}`) ?? "";
  $(id).addEventListener("input", () => {
    sessionStorage.setItem(`aengine.${id}`, $(id).value);
    if (id === "schema" || id === "tools") readJSON(id);
  });
}

// The JSON in a field; null: nothing is in it, or something that is no JSON, which is then said below it.
function readJSON(id) {
  const text = $(id).value.trim();
  $(`${id}-error`).textContent = "";
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    $(`${id}-error`).textContent = `This is not JSON: ${error.message}`;
    return null;
  }
}

function hasError(id) {
  readJSON(id);
  return $(`${id}-error`).textContent !== "";
}

function body() {
  const asked = { model, messages: [...messages] };
  const system = $("system").value.trim();
  if (system) asked.messages.unshift({ role: "system", content: system });
  for (const id of ["temperature", "max_tokens", "top_p", "top_k", "seed"]) {
    if ($(id).value !== "") asked[id] = Number($(id).value);
  }
  if ($("stop-string").value) asked.stop = $("stop-string").value;
  const schema = readJSON("schema");
  if (schema !== null) asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = readJSON("tools");
  if (tools !== null) {
    const list = Array.isArray(tools) ? tools : [tools];
    asked.tools = list.map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
  }
  return asked;
}

// -- the chat

function showButtons() {
  $("send").hidden = running !== null;
  $("send").disabled = model === null || needsKey;
  $("stop").hidden = running === null;
  examples.hidden = $("send").disabled;
}

async function answer() {
  const controller = new AbortController();
  running = controller;
  showButtons();
  const asked = body();
  const shown = new Answer(log, { isJSON: asked.response_format !== undefined && asked.tools === undefined });
  answers.at(-1)?.box.querySelector(".again")?.remove();
  answers.push(shown);
  toEnd(log);
  let failure = null;
  try {
    for await (const chunks of streamChat(asked, controller.signal)) {
      for (const chunk of chunks) shown.add(chunk);
    }
  } catch (error) {
    if (!controller.signal.aborted) failure = error;
  }
  if (running !== controller) return; // a new chat has begun
  running = null;
  const follows = isAtEnd(log);
  if (failure) shown.fail(failure);
  if (failure?.needsKey) askForKey();
  shown.end({
    wasStopped: controller.signal.aborted,
    hasFailed: failure !== null,
    onResults: (results) => {
      messages.push(...results);
      answers = [];
      answer();
    },
    onAgain: again,
  });
  // Calls that were cut off have no results, and can't be gone on from.
  const { message } = shown;
  if (shown.reason !== "tool_calls") delete message.tool_calls;
  if (message.content || message.tool_calls) messages.push(message);
  showButtons();
  if (follows) toEnd(log);
}

function send() {
  if (needsKey) $("key").focus();
  const text = prompt.value.trim();
  if (!text || running || $("send").disabled) return;
  const wrong = ["schema", "tools"].find(hasError);
  if (wrong) {
    $(wrong).closest("details").open = true;
    showSide(true);
    $(wrong).focus();
    return;
  }
  welcome.remove();
  for (const old of log.querySelectorAll(".again")) old.remove(); // the last message alone is answered again
  prompt.value = "";
  showUser(log, text);
  messages.push({ role: "user", content: text });
  answers = [];
  answer();
}

function again() {
  if (running || needsKey) return;
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  if (!messages.length) return;
  for (const shown of answers) shown.box.remove();
  answers = [];
  answer();
}

function newChat() {
  running?.abort();
  running = null;
  messages = [];
  answers = [];
  log.replaceChildren(welcome);
  showButtons();
  prompt.focus();
}

function showSide(isOpen) {
  $("side").classList.toggle("open", isOpen);
  $("panel").setAttribute("aria-expanded", String(isOpen));
  $("panel").textContent = isOpen ? "Chat" : "Options";
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (running) running.abort();
    else showSide(false);
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    newChat();
  }
});
$("stop").addEventListener("click", () => running?.abort());
for (const example of examples.children) {
  example.addEventListener("click", () => {
    prompt.value = example.textContent;
    send();
  });
}
$("new").addEventListener("click", newChat);
$("panel").addEventListener("click", () => showSide(!$("side").classList.contains("open")));

// -- colours

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
function showTheme() {
  const chosen = localStorage.getItem("aengine.theme");
  document.documentElement.dataset.theme = chosen ?? (prefersDark.matches ? "dark" : "light");
}
prefersDark.addEventListener("change", showTheme);
$("theme").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme === "dark";
  localStorage.setItem("aengine.theme", isDark ? "light" : "dark");
  showTheme();
});
showTheme();

// -- the server

// Of several models the page's address says which one it talks to.
const chosen = new URLSearchParams(location.search).get("model");
const STATES = { running: "ready", asleep: "asleep", new: "not loaded yet", draining: "shutting down", failed: "stopped by an error", closed: "shut down" };

function showState(text, kind, title = "") {
  $("state").textContent = text;
  $("state").title = title;
  $("state").className = `state ${kind}`;
}

function askForKey() {
  needsKey = true;
  $("key-error").textContent = hasKey() ? "The server does not accept this key." : "";
  $("key-box").hidden = false;
  showState("waits for a key", "");
  showButtons();
  showSide(false);
  $("key").select();
}

function showModel(now) {
  model = now.model;
  isKnown = Boolean(now.max_model_len);
  $("model").textContent = $("model").title = model;
  document.title = `${model} · aengine`;
  const facts = [];
  if (now.num_parameters) facts.push(`${inWords(now.num_parameters)} parameters`);
  if (isKnown) facts.push(`context of ${now.max_model_len.toLocaleString("en")} tokens`);
  if (isKnown && now.device !== "none") facts.push(now.device === "cpu" ? "on the CPU" : `on ${now.device}`); // a fake has none
  welcome.querySelector("h2").textContent = model;
  welcome.querySelector("p").textContent = facts.join(" · ");
  // A model that brings no sampling parameters of its own would be sampled at 1, which is noise from a small one.
  const isNew = sessionStorage.getItem("aengine.temperature") === null;
  if (isNew && isKnown && now.sampling_defaults.temperature === undefined) $("temperature").value = "0";
}

// A server of several models that was not asked for one tells which there are.
function showModels(models) {
  showState("choose a model", "");
  const said = JSON.stringify(models);
  if (said === listed) return;
  listed = said;
  welcome.querySelector("h2").textContent = "Models";
  const links = models.map((one) => {
    const link = document.createElement("a");
    link.href = `?model=${encodeURIComponent(one.id)}`;
    link.textContent = `${one.id} (${STATES[one.state] ?? one.state})`;
    return [link, document.createElement("br")];
  });
  welcome.querySelector("p").replaceChildren(...links.flat());
}

function inWords(count) {
  const [size, unit] = count >= 1e9 ? [1e9, "B"] : [1e6, "M"];
  return `${Number((count / size).toPrecision(3))}${unit}`;
}

$("key-box").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!$("key").value.trim()) return;
  setKey($("key").value);
  needsKey = false; // until the next answer of /stats
  $("key-error").textContent = "";
  askNow();
});

const askNow = startGraphs($("graphs"), {
  path: chosen === null ? "stats" : `stats?model=${encodeURIComponent(chosen)}`,
  mayAsk: () => !needsKey,
  onAnswer: (now) => {
    const wasAsked = !$("key-box").hidden;
    $("key-box").hidden = true;
    if (now.models) return showModels(now.models);
    const isWaiting = now.state === "asleep" || now.state === "new"; // a message wakes it, or loads it
    showState(STATES[now.state] ?? now.state, now.state === "running" ? "good" : isWaiting ? "" : "bad");
    if (model !== now.model || (!isKnown && now.max_model_len)) showModel(now);
    showButtons();
    if (wasAsked) prompt.focus();
  },
  onError: (error) => {
    if (error.needsKey) askForKey();
    else showState(error.isUnreachable ? "no connection" : "not available", "bad", error.message);
  },
});
if (!matchMedia("(max-width: 52rem)").matches) prompt.focus();
