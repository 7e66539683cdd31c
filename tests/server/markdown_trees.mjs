// Renders Markdown by the page's own module, without a browser: reads [{parts: [...]}] of stdin, where the text comes in
// parts, and writes [{tree, parsed}]: what is shown, and how many characters the parser was given in all.
//   node markdown_trees.mjs FOLDER_OF_THE_PAGE

import { readFileSync } from "node:fs";

class Text {
  constructor(data) {
    this.data = data;
  }
  appendData(text) {
    this.data += text;
  }
}

class Element {
  constructor(name) {
    Object.assign(this, { name, childNodes: [], own: {} });
  }
  append(...nodes) {
    for (const node of nodes) this.appendChild(typeof node === "string" ? new Text(node) : node);
  }
  appendChild(node) {
    node.remove = () => this.childNodes.splice(this.childNodes.indexOf(node), 1);
    this.childNodes.push(node);
    return node;
  }
  get lastChild() {
    return this.childNodes.at(-1);
  }
  addEventListener() {}
  tree() {
    const attributes = Object.entries(this.own).map(([key, value]) => ` ${key}=${JSON.stringify(value)}`);
    const inner = [];
    let text = "";
    for (const node of [...this.childNodes, null]) {
      if (node instanceof Text) {
        text += node.data;
        continue;
      }
      if (text) inner.push(JSON.stringify(text));
      text = "";
      if (node) inner.push(node.tree());
    }
    return `${this.name}${attributes.join("")}(${inner.join(" ")})`;
  }
}
for (const key of ["href", "title", "target", "rel", "className", "start", "type"]) {
  Object.defineProperty(Element.prototype, key, { set(value) { this.own[key] = value; } });
}
Object.defineProperty(Element.prototype, "textContent", { set(value) { this.childNodes = [new Text(value)]; } });
globalThis.document = { createElement: (name) => new Element(name), createTextNode: (text) => new Text(text) };

const { MarkdownText, parser } = await import(`${process.argv[2]}/markdown.js`);
let parsed = 0;
const { parse } = parser;
parser.parse = (text, env) => {
  parsed += text.length;
  return parse.call(parser, text, env);
};

const answers = JSON.parse(readFileSync(0)).map(({ parts }) => {
  const box = new Element("box");
  const shown = new MarkdownText(box);
  parsed = 0;
  parts.forEach((part, i) => {
    shown.append(part);
    shown.show(i + 1 === parts.length);
  });
  return { tree: box.tree(), parsed };
});
process.stdout.write(JSON.stringify(answers));
