// Calls of the server that has served the page. All addresses are relative: the application may be mounted anywhere.

let key = sessionStorage.getItem("aengine.key") ?? "";

export function setKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem("aengine.key", key);
  else sessionStorage.removeItem("aengine.key");
}

export const hasKey = () => key !== "";

// What went wrong, for whoever reads the page; `details`: what the server said, in its own words, or "".
export class CallError extends Error {
  constructor(message, { details = "", needsKey = false } = {}) {
    super(message);
    this.isUnreachable = message === UNREACHABLE;
    this.details = details;
    this.needsKey = needsKey;
  }
}

const UNREACHABLE = "The server can't be reached. It may have been stopped, or the network is down.";
const LOST = "The connection was lost before the answer was complete.";
// By the code of an error, or else by its status.
const SAYINGS = {
  context_length_exceeded: "This chat is longer than the model can read. Begin a new chat, or ask for less at once.",
  engine_overloaded: "The server is busy: its queue is full. Try again in a moment.",
  engine_unavailable: "The model is not available: the server is shutting down, or starting again.",
  request_aborted: "The server stopped before the answer was complete. Send it again in a moment.",
  deadline_exceeded: "The answer took longer than the server allows.",
  internal_error: "Something went wrong in the server. Its log says what.",
  413: "This is more than the server takes at once. Begin a new chat, or ask for less.",
  429: "The server is busy. Try again in a moment.",
  502: UNREACHABLE,
  503: "The server is not ready. Try again in a moment.",
  504: "The server took too long to answer.",
};

function inPlainWords(error, status) {
  const details = error?.message ?? "";
  const said = SAYINGS[error?.code] ?? SAYINGS[status];
  if (said) return new CallError(said, { details });
  if (status >= 500) return new CallError(SAYINGS.internal_error, { details });
  return new CallError(details || `The server refused this (HTTP ${status}).`); // its texts name cause and cure
}

// Returns the response; throws a CallError if it is none of success.
async function call(path, options = {}) {
  const headers = { ...options.headers };
  // A header has bytes: those of UTF-8, which the server compares. `fetch` takes one character for each.
  if (key) headers.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError(UNREACHABLE);
  }
  if (response.ok) return response;
  if (response.status === 401) throw new CallError("The server asks for an API key.", { needsKey: true });
  let error = null;
  try {
    ({ error } = await response.json());
  } catch {
    // no JSON: the status has to do
  }
  throw inPlainWords(error, response.status);
}

export async function getJSON(path) {
  return (await call(path, { cache: "no-store" })).json();
}

// Yields the chunks of a chat completion as they come, several at once in a list.
export async function* streamChat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new CallError(LOST);
    }
    if (part.done) throw new CallError(LOST);
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    const chunks = [];
    let isEnd = false;
    for (const event of events) {
      const data = /^data: ?(.*)$/m.exec(event)?.[1];
      if (!data) continue; // a comment, which keeps the connection open
      if (data === "[DONE]") {
        isEnd = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) {
        if (chunks.length) yield chunks;
        throw inPlainWords(chunk.error, 500);
      }
      chunks.push(chunk);
    }
    if (chunks.length) yield chunks;
    if (isEnd) return;
  }
}
