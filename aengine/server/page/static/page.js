// The page: fields, buttons and keys.

import { getJSON, setKey, streamChat, whenKeyIsNeeded } from "./api.js";
import { startGraphs } from "./graphs.js";
import { Answer, showUser } from "./messages.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const prompt = $("prompt");
let messages = []; // of the chat, without the system prompt
let answers = []; // as shown, since the last message that is no answer
let running = null; // the AbortController of the answer under way
let model = null;

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

function isAtEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function toEnd() {
  log.scrollTop = log.scrollHeight;
}

function showBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("again").hidden = isBusy || !messages.length;
}

async function answer() {
  const controller = new AbortController();
  running = controller;
  showBusy(true);
  const shown = new Answer(log);
  answers.push(shown);
  toEnd();
  let asked = null;
  try {
    asked = body();
    for await (const chunks of streamChat(asked, controller.signal)) {
      const follows = isAtEnd();
      for (const chunk of chunks) shown.add(chunk);
      if (follows) toEnd();
    }
  } catch (error) {
    if (!controller.signal.aborted) shown.fail(error.message);
  }
  if (running !== controller) return; // a new chat has begun
  running = null;
  const follows = isAtEnd();
  shown.end({
    isJSON: asked?.response_format !== undefined && shown.calls.length === 0,
    wasStopped: controller.signal.aborted,
    onResults: (results) => {
      messages.push(...results);
      answers = [];
      answer();
    },
  });
  // Calls that were cut off have no results, and can't be gone on from.
  const { message } = shown;
  if (shown.reason !== "tool_calls") delete message.tool_calls;
  if (message.content || message.tool_calls) messages.push(message);
  showBusy(false);
  if (follows) toEnd();
}

function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  const wrong = ["schema", "tools"].find(hasError);
  if (wrong) {
    $(wrong).closest("details").open = true;
    showSide(true);
    $(wrong).focus();
    return;
  }
  $("welcome")?.remove();
  prompt.value = "";
  showUser(log, text);
  messages.push({ role: "user", content: text });
  answers = [];
  answer();
}

function again() {
  if (running) return;
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
  log.replaceChildren();
  showBusy(false);
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
$("again").addEventListener("click", again);
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

async function loadModel() {
  try {
    const { data } = await getJSON("v1/models");
    model = data[0].id;
    $("model").textContent = model;
    document.title = `${model} · aengine`;
    $("key-box").hidden = !$("key").value;
  } catch (error) {
    $("state").textContent = error.message; // the graphs' next answer says it again
  }
}

whenKeyIsNeeded(() => {
  if (!$("key-box").hidden) return;
  $("key-box").hidden = false;
  showSide(true);
  $("key").focus();
});
$("key").value = sessionStorage.getItem("aengine.key") ?? "";
$("key").addEventListener("change", () => {
  setKey($("key").value);
  loadModel();
});
await loadModel();
startGraphs($("graphs"), (state, isGood) => {
  $("state").textContent = state;
  $("state").className = isGood ? "state good" : "state bad";
  if (isGood && model === null) loadModel();
});
if (!matchMedia("(max-width: 52rem)").matches && $("key-box").hidden) prompt.focus();
