// Calls of the server that has served the page. All addresses are relative: the application may be mounted anywhere.

let key = sessionStorage.getItem("aengine.key") ?? "";
let onKeyNeeded = () => {};

export function setKey(value) {
  key = value.trim();
  sessionStorage.setItem("aengine.key", key);
}

export function whenKeyIsNeeded(callback) {
  onKeyNeeded = callback;
}

// Returns the response; throws an Error with the server's message if it is none of success.
async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) onKeyNeeded();
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON: the status has to do
  }
  throw new Error(message);
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
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    const chunks = [];
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      chunks.push(chunk);
    }
    if (chunks.length) yield chunks;
  }
}
