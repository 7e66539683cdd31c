// Markdown as elements. The parser's tokens become elements here, one by one: no text is ever read as HTML, so what a
// model writes can't become an element that is not in this file, nor an attribute, a script or a load from elsewhere.

import MarkdownIt from "./markdown-it.esm.min.mjs";

export const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "main.py" is no address

// Elements by the tag that the parser names; a chat's headings are below the page's own.
const ELEMENTS = {
  p: "p", h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6", ul: "ul", ol: "ol", li: "li", hr: "hr",
  blockquote: "blockquote", table: "table", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td",
  strong: "strong", em: "em", s: "s",
};
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// Code as it is shown: characters that turn the direction of writing would show it in another order than it has.
function inOrder(code) {
  return code.replace(/[\u202a-\u202e\u2066-\u2069]/g, (one) => `\\u${one.charCodeAt(0).toString(16)}`);
}

// Code with its language and a button that copies it. `append(text)` makes the code longer.
export class CodeBlock {
  constructor(language, text) {
    this.language = language;
    this.text = text;
    this.box = element("div", "code-block");
    const head = this.box.appendChild(element("div", "code-head"));
    head.append(element("span", "", language));
    this.button = head.appendChild(element("button", "copy", "Copy"));
    this.button.type = "button";
    this.button.addEventListener("click", () => this.copy());
    this.code = this.box.appendChild(element("pre")).appendChild(element("code"));
    this.node = this.code.appendChild(document.createTextNode(inOrder(text)));
  }

  append(text) {
    this.text += text;
    this.node.appendData(inOrder(text));
  }

  replace(text) {
    this.text = text;
    this.node.data = inOrder(text);
  }

  async copy() {
    const isCopied = await copyText(this.text.replace(/\n$/, ""), this.code);
    this.button.textContent = isCopied ? "Copied" : "Not allowed";
    setTimeout(() => (this.button.textContent = "Copy"), 1500);
  }
}

// Browsers have a clipboard for https and localhost only. Elsewhere what `shown` shows is selected and copied.
export async function copyText(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(shown);
    return document.execCommand("copy");
  }
}

// A link, or a picture's address: a picture itself would tell somebody elsewhere that it was looked at.
function link(address) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // relative: it would lead into this server
  }
  if (url === null || !SCHEMES.has(url.protocol)) return element("span");
  const made = element("a");
  made.href = url.href;
  made.title = url.href; // where it really leads
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

function append(tokens, parent) {
  const open = [parent];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.nesting < 0) open.pop();
    else if (token.type === "inline") append(token.children, top);
    else if (token.type === "fence" || token.type === "code_block") {
      top.append(new CodeBlock(token.info.trim().split(/\s+/)[0], token.content).box);
    } else if (token.type === "code_inline") top.append(element("code", "", inOrder(token.content)));
    else if (token.type === "softbreak" || token.type === "hardbreak") top.append(element("br"));
    else if (token.type === "image") {
      const made = top.appendChild(link(token.attrGet("src")));
      made.textContent = token.content || token.attrGet("src");
    } else if (token.hidden) open.push(top); // the paragraph in an item of a tight list
    else if (token.type === "link_open") open.push(top.appendChild(link(token.attrGet("href"))));
    else if (token.tag in ELEMENTS) {
      const made = top.appendChild(element(ELEMENTS[token.tag]));
      const align = /^text-align:(\w+)$/.exec(token.attrGet("style") ?? "");
      if (align) made.className = align[1];
      if (token.tag === "ol" && token.attrGet("start")) made.start = Number(token.attrGet("start"));
      if (token.nesting > 0) open.push(made);
    } else {
      top.append(token.content);
      if (token.nesting > 0) open.push(top);
    }
  }
}

// A block, or its lines of the text if it is nested deeper than the parser reads, which leaves out what is in there.
function appendBlock(tokens, text, parent) {
  const isTooDeep = tokens.some(({ level, nesting }) => nesting > 0 && level >= parser.options.maxNesting - 1);
  if (!isTooDeep) append(tokens, parent);
  else parent.append(element("div", "source", text.split("\n").slice(...tokens[0].map).join("\n")));
}

// A text that grows, shown in `box`. Blocks that are finished are parsed once: each look at the text begins with its
// last block, since in Markdown no earlier one can change any more.
export class MarkdownText {
  constructor(box) {
    this.box = box;
    this.text = "";
    this.begin = 0; // of the last block, in the text
    this.numKept = 0; // child nodes of the blocks before it
    this.code = null; // the last block, if it is code
    this.env = {}; // the addresses of [links][1] that the text has defined
  }

  append(text) {
    this.text += text.replaceAll("\r", "");
  }

  // Shows what has come. `isComplete`: there will be no more.
  show(isComplete) {
    let tail = this.text.slice(this.begin);
    // A line of marks alone is not read before it ends: "-" below a paragraph would make that a heading for a moment.
    if (!isComplete) tail = tail.replace(/(^|\n)[ \t]*[-=*_#>+~`|:\d.)]{1,8}[ \t]*$/, "$1");
    const blocks = blocksOf(parser.parse(tail, this.env));
    if (!blocks.length) return;
    const last = blocks.at(-1);
    if (blocks.length === 1 && this.continues(last[0])) return;
    while (this.box.childNodes.length > this.numKept) this.box.lastChild.remove();
    for (const tokens of blocks.slice(0, -1)) appendBlock(tokens, tail, this.box);
    this.numKept = this.box.childNodes.length;
    this.begin += offsetOfLine(tail, last[0].map[0]);
    if (last[0].type === "fence") {
      this.code = new CodeBlock(last[0].info.trim().split(/\s+/)[0], last[0].content);
      this.box.append(this.code.box);
    } else {
      this.code = null;
      appendBlock(last, tail, this.box);
    }
  }

  // Whether the token is the code that is shown, made longer: then only what is new is put in.
  continues({ type, info, content }) {
    const { code } = this;
    const isSame = code && type === "fence" && info.trim().split(/\s+/)[0] === code.language;
    if (!isSame || !content.startsWith(code.text)) return false;
    code.append(content.slice(code.text.length));
    return true;
  }
}

// The tokens of each block that is in no other.
function blocksOf(tokens) {
  const blocks = [];
  let depth = 0;
  for (const token of tokens) {
    if (depth === 0) blocks.push([]);
    blocks.at(-1).push(token);
    depth += token.nesting;
  }
  return blocks;
}

function offsetOfLine(text, line) {
  let offset = 0;
  for (let i = 0; i < line; i++) offset = text.indexOf("\n", offset) + 1;
  return offset;
}
