// Graphs of the engine: /stats is asked once a second, and each answer with one some seconds before it makes a point.

import { getJSON } from "./api.js";

const NUM_POINTS = 120;
// Rates are means of so many seconds: the numbers of an engine in another process may be a second old.
const MEAN_OF = 3;
const WIDTH = 300;
const HEIGHT = 46;
const SVG = "http://www.w3.org/2000/svg";

const whole = (number) => String(Math.round(number));
const rounded = (number) => (number >= 100 ? whole(number) : String(Number(number.toFixed(1))));

// `value` is given two answers of /stats, the later one first, and returns a number for each series; null: none now.
const GRAPHS = [
  {
    title: "tokens/s",
    show: rounded,
    least: 10,
    value: (now, before) => [(now.generated_tokens - before.generated_tokens) / (now.time - before.time)],
  },
  {
    title: "requests",
    names: ["running", "waiting"],
    show: whole,
    least: 4,
    value: (now) => [now.num_running, now.num_waiting],
  },
  {
    title: "KV memory in use",
    show: (number) => `${rounded(number)} %`,
    most: 100,
    value: (now) => [(100 * (now.num_blocks - now.num_free_blocks)) / now.num_blocks],
  },
  {
    title: "time of a step",
    show: (number) => `${rounded(number)} ms`,
    least: 1,
    value: (now, before) => {
      const count = now.inter_token_latency.count - before.inter_token_latency.count;
      return [count > 0 ? (1000 * (now.inter_token_latency.sum - before.inter_token_latency.sum)) / count : null];
    },
  },
];

function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

class Graph {
  constructor(graph, parent) {
    this.graph = graph;
    const names = graph.names ?? [graph.title];
    this.series = names.map(() => []);
    const box = document.createElement("section");
    box.className = "graph";
    const head = box.appendChild(document.createElement("h3"));
    const title = head.appendChild(document.createElement("span"));
    title.textContent = `${graph.title} `;
    this.most = title.appendChild(document.createElement("small")); // of the time that is shown
    const values = head.appendChild(document.createElement("span"));
    values.className = "names";
    this.outputs = names.map((name, i) => {
      const label = values.appendChild(document.createElement("span"));
      if (graph.names) {
        label.className = i ? "name second" : "name";
        label.append(`${name} `);
      }
      return label.appendChild(document.createElement("output"));
    });
    const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    svg.append(element("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }));
    this.area = svg.appendChild(element("path", { class: "area" }));
    this.lines = names.map((_, i) => svg.appendChild(element("path", { class: i ? "line second" : "line" })));
    box.append(svg);
    parent.append(box);
  }

  // `values`: a number for each series, or null.
  add(values) {
    this.series.forEach((points, i) => {
      points.push(values ? values[i] : null);
      if (points.length > NUM_POINTS) points.shift();
      const last = points.at(-1);
      this.outputs[i].textContent = last === null ? "–" : this.graph.show(last);
    });
    const known = this.series.flat().filter((point) => point !== null);
    const most = Math.max(0, ...known);
    const top = this.graph.most ?? Math.max(this.graph.least, most);
    this.most.textContent = known.length ? `max ${this.graph.show(most)}` : "";
    this.series.forEach((points, i) => {
      const { line, area } = paths(points, top);
      this.lines[i].setAttribute("d", line);
      if (i === 0) this.area.setAttribute("d", area);
    });
  }
}

// The line through the points, with gaps where there is none, and the area below it.
function paths(points, top) {
  const step = WIDTH / (NUM_POINTS - 1);
  let line = "";
  let area = "";
  let begin = null;
  const x = (i) => ((i + NUM_POINTS - points.length) * step).toFixed(1);
  const y = (point) => (HEIGHT - 1 - (point / top) * (HEIGHT - 4)).toFixed(1);
  points.forEach((point, i) => {
    if (point === null) return;
    if (begin === null) {
      begin = i;
      line += `M${x(i)},${y(point)}`;
      area += `M${x(i)},${HEIGHT}L${x(i)},${y(point)}`;
    } else {
      line += `L${x(i)},${y(point)}`;
      area += `L${x(i)},${y(point)}`;
    }
    if (i + 1 === points.length || points[i + 1] === null) {
      if (begin === i) line += "h0.1"; // a point by itself
      area += `L${x(i)},${HEIGHT}Z`;
      begin = null;
    }
  });
  return { line, area };
}

// Asks `path` once a second for as long as the page can be seen and `mayAsk()`. `onAnswer` is given each answer; `onError` the
// error if there is none. Returns what asks at once.
export function startGraphs(parent, { path, mayAsk, onAnswer, onError }) {
  const graphs = GRAPHS.map((graph) => new Graph(graph, parent));
  let answers = []; // the last few
  const ask = async () => {
    try {
      const now = await getJSON(path);
      const [before] = answers;
      if (before && now.num_steps < before.num_steps) answers = []; // another engine
      else if (before && now.time > before.time) {
        for (const graph of graphs) graph.add(graph.graph.value(now, before));
      }
      answers = [...answers.slice(1 - MEAN_OF), now];
      onAnswer(now);
    } catch (error) {
      answers = [];
      for (const graph of graphs) graph.add(null);
      onError(error);
    }
  };
  const loop = async () => {
    if (!document.hidden && mayAsk()) await ask();
    setTimeout(loop, 1000);
  };
  loop();
  return ask;
}
