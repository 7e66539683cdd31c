// Messages as they are shown. Whatever a model or a server says is put in as text, never as HTML.

import { CodeBlock, copyText, MarkdownText } from "./markdown.js";

// Of the time that the page has, an answer under way takes a fifth at most, however long it is.
const SHARE = 5;

function made(parent, name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

function button(parent, className, text, onClick) {
  const element = made(parent, "button", className, text);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}

export function isAtEnd(log) {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

export function toEnd(log) {
  log.scrollTop = log.scrollHeight;
}

export function showUser(log, text) {
  const box = made(log, "article", "message user");
  made(box, "div", "text", text);
}

// An answer under way. `isJSON`: it was asked for as JSON, and is shown as code.
export class Answer {
  constructor(log, { isJSON = false } = {}) {
    this.log = log;
    this.isJSON = isJSON;
    this.box = made(log, "article", "message assistant busy");
    this.reasoning = "";
    this.content = "";
    this.calls = [];
    this.shownContent = null; // a MarkdownText or a CodeBlock
    this.numShown = 0; // characters of the content that it has been given
    this.reasoningNode = null;
    this.frame = 0; // of the animation frame that is asked for
    this.notBefore = 0;
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
    this.reasoning += delta.reasoning_content ?? "";
    this.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) this.addCall(call);
    this.frame ||= requestAnimationFrame(() => this.onFrame());
  }

  // What has come since the last frame is shown at once. A page that can't be seen has no frames, and shows nothing.
  onFrame() {
    this.frame = 0;
    const now = performance.now();
    if (now < this.notBefore) {
      this.frame = requestAnimationFrame(() => this.onFrame());
      return;
    }
    this.show();
    this.notBefore = now + SHARE * (performance.now() - now);
  }

  show(isComplete = false) {
    const follows = isAtEnd(this.log);
    this.showReasoning();
    this.showContent(isComplete);
    for (const call of this.calls) {
      call.text.appendData(call.arguments.slice(call.text.length));
    }
    if (follows) toEnd(this.log);
  }

  showReasoning() {
    if (!this.reasoning) return;
    if (!this.reasoningNode) {
      const details = made(this.box, "details", "reasoning");
      made(details, "summary", "", "Reasoning");
      this.reasoningNode = made(details, "div", "text").appendChild(document.createTextNode(""));
    }
    this.reasoningNode.appendData(this.reasoning.slice(this.reasoningNode.length));
  }

  showContent(isComplete) {
    if (!this.content.trim()) return;
    if (!this.shownContent) {
      const box = made(this.box, "div", "text last");
      this.shownContent = this.isJSON ? new CodeBlock("json", "") : new MarkdownText(box);
      if (this.isJSON) box.append(this.shownContent.box);
    }
    this.shownContent.append(this.content.slice(this.numShown));
    this.numShown = this.content.length;
    if (!this.isJSON) this.shownContent.show(isComplete);
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
  }

  // `details`: what the server said, in its own words.
  fail({ message, details = "" }) {
    this.show(true);
    const box = made(this.box, "div", "failed");
    made(box, "p", "error", message).setAttribute("role", "alert");
    if (!details || details === message) return;
    const more = made(box, "details");
    made(more, "summary", "", "What the server said");
    made(more, "p", "", details);
  }

  // `onResults` is given the messages of the tools, when there are calls; `onAgain`: answer the same message anew.
  end({ wasStopped, hasFailed, onResults, onAgain }) {
    cancelAnimationFrame(this.frame);
    this.show(true);
    this.box.classList.remove("busy");
    if (this.isJSON && this.shownContent) {
      try {
        this.shownContent.replace(JSON.stringify(JSON.parse(this.content), null, 2));
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
    const line = made(this.box, "footer", "facts");
    made(line, "span", "", facts.join(" · "));
    if (this.content.trim()) {
      const copy = button(line, "small", "Copy", async () => {
        copy.textContent = (await copyText(this.content, this.box)) ? "Copied" : "Not allowed";
      });
    }
    button(line, "small again", hasFailed ? "Try again" : "Again", onAgain);
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
    const give = made(form, "button", "primary", "Give the results");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      give.disabled = true;
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
