// Messages as they are shown. Whatever a model or a server says is put in as text, never as HTML.

function made(parent, name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

export function showUser(log, text) {
  const box = made(log, "article", "message user");
  made(box, "div", "text", text);
}

// An answer under way.
export class Answer {
  constructor(log) {
    this.log = log;
    this.box = made(log, "article", "message assistant busy");
    this.reasoning = "";
    this.content = "";
    this.calls = [];
    this.sayings = {}; // text nodes under way, by kind
    this.began = performance.now();
    this.firstToken = null;
    this.usage = null;
    this.reason = null;
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { delta } = choice;
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (delta.reasoning_content || delta.content || delta.tool_calls) this.firstToken ??= performance.now();
    if (delta.reasoning_content) this.addReasoning(delta.reasoning_content);
    if (delta.content) this.addContent(delta.content);
    for (const call of delta.tool_calls ?? []) this.addCall(call);
  }

  addReasoning(text) {
    this.reasoning += text;
    if (!this.sayings.reasoning) {
      const details = made(this.box, "details", "reasoning");
      made(details, "summary", "", "Reasoning");
      this.sayings.reasoning = made(details, "div", "text").appendChild(document.createTextNode(""));
    }
    this.sayings.reasoning.appendData(text);
  }

  addContent(text) {
    this.content += text;
    if (!this.content.trim()) return;
    if (!this.sayings.content) {
      this.textBox = made(this.box, "div", "text last");
      this.sayings.content = this.textBox.appendChild(document.createTextNode(""));
      text = this.content.trimStart();
    }
    this.sayings.content.appendData(text);
  }

  addCall(delta) {
    let call = this.calls[delta.index];
    if (!call) {
      const box = made(this.box, "section", "call");
      made(box, "h3", "", `calls ${delta.function.name}`);
      const text = made(box, "div", "text").appendChild(document.createTextNode(""));
      call = this.calls[delta.index] = { id: delta.id, name: delta.function.name, arguments: "", box, text };
    }
    call.arguments += delta.function.arguments ?? "";
    call.text.appendData(delta.function.arguments ?? "");
  }

  fail(message) {
    const text = made(this.box, "p", "error", message);
    text.setAttribute("role", "alert");
  }

  // `isJSON`: the answer was asked for as JSON. `onResults` is given the messages of the tools, when there are calls.
  end({ isJSON, wasStopped, onResults }) {
    this.box.classList.remove("busy");
    if (isJSON && this.textBox) {
      this.textBox.classList.add("json");
      try {
        this.textBox.textContent = JSON.stringify(JSON.parse(this.content), null, 2);
      } catch {
        // cut off: it stays as it came
      }
    }
    const facts = [];
    if (this.usage) {
      const seconds = (performance.now() - (this.firstToken ?? this.began)) / 1000;
      const tokens = this.usage.completion_tokens;
      facts.push(`${tokens} tokens`);
      if (tokens > 1 && seconds > 0) facts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
      facts.push(`prompt ${this.usage.prompt_tokens}`);
    }
    if (this.firstToken) facts.push(`first token after ${Math.round(this.firstToken - this.began)} ms`);
    if (wasStopped) facts.push("stopped");
    else if (this.reason === "length") facts.push("cut off by its limit of tokens");
    if (facts.length) made(this.box, "p", "facts", facts.join(" · "));
    if (this.calls.length && this.reason === "tool_calls") this.askForResults(onResults);
  }

  askForResults(onResults) {
    const form = made(this.box, "form", "results");
    const fields = this.calls.map((call, i) => {
      const label = made(call.box, "label", "", `Result of ${call.name}`);
      const field = made(call.box, "textarea", "code");
      field.rows = 2;
      field.id = label.htmlFor = `result-${call.id}-${i}`;
      return field;
    });
    const button = made(form, "button", "primary", "Give the results");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      button.disabled = true;
      for (const field of fields) field.readOnly = true;
      onResults(this.calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: fields[i].value })));
    });
    fields[0].focus();
  }

  // What is sent back to the model as its own message.
  get message() {
    const message = { role: "assistant", content: this.content || null };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) {
      message.tool_calls = this.calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
    }
    return message;
  }
}
