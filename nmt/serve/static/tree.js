// The beam as a tree: a column for each step, a node for each hypothesis that was a candidate there.

import { element, figure, fitted, isolated, label, probability, svg, visible } from "./dom.js";
import { pieceTexts } from "./words.js";

// Pixels: size of a node, gap between columns, gap between the nodes of a column, height of the headings.
const [WIDTH, HEIGHT, ACROSS, BETWEEN, TOP] = [108, 38, 42, 8, 34];
const ROOT = 30; // pixels on the left of the first column, where the root is drawn
const MANY = 600; // in a tree with more nodes, the pruned ones are hidden at first
const FATES = { kept: "kept", ended: "ended", pruned: "pruned" };
const BEAT = 900; // milliseconds that each step is shown while playing

// Makes the nodes of a tree in an answer of the service, and adds what the answer only implies: column, parent node, children,
// tokens of the hypothesis so far, `share`, the probability of the node's token, and `text`, which stands for this token beside
// the tokens of the source.
export function nodesOf(steps, source) {
  const columns = [];
  steps.forEach((step, column) => {
    columns.push(
      step.map((given, index) => {
        const parent = given.parent === null ? null : columns[column - 1][given.parent];
        const share = Math.exp(given.log_prob - (parent?.log_prob ?? 0));
        return { ...given, column, index, parent, share, children: [], tokens: [...(parent?.tokens ?? []), given.token] };
      }),
    );
    for (const node of columns[column]) node.parent?.children.push(node);
  });
  const nodes = columns.flat();
  const texts = pieceTexts(nodes.map((node) => node.token), source);
  nodes.forEach((node, index) => (node.text = texts[index]));
  return columns;
}

const plural = (count, one, many) => `${count} ${count === 1 ? one : many}`;
const chain = (node) => (node ? [...chain(node.parent), node] : []);
const rank = (a, b) => (a.fate === "pruned") - (b.fate === "pruned") || b.score - a.score || b.log_prob - a.log_prob;

export class Tree {
  #parts;
  #columns = [];
  #shown = []; // visible nodes of each column, from top to bottom
  #upTo = 0;
  #selected = [];
  #active = null;
  #timer = 0;
  #svg = null;

  // parts: elements of the page, { box, detail, story, slider, pruned (a checkbox), play }.
  constructor(parts) {
    this.#parts = parts;
    parts.slider.addEventListener("input", () => this.#step(Number(parts.slider.value)));
    parts.pruned.addEventListener("change", () => this.#draw());
    parts.play.addEventListener("click", () => this.#play());
    parts.box.addEventListener("pointerleave", () => this.#light(null));
  }

  // Shows a tree, and highlights the path of the selected translation, which has these tokens.
  show(steps, source, tokens) {
    const same = this.#columns.steps === steps;
    if (!same) {
      this.#stop();
      this.#columns = Object.assign(nodesOf(steps, source), { steps });
      this.#parts.pruned.checked = this.#columns.flat().length <= MANY;
      this.#upTo = steps.length;
      this.#active = null;
      Object.assign(this.#parts.slider, { min: 1, max: steps.length, value: steps.length });
    }
    const selected = this.#path(tokens);
    if (same && selected.at(-1) === this.#selected.at(-1)) return;
    this.#selected = selected;
    this.#draw();
  }

  clear() {
    this.#stop();
    [this.#columns, this.#selected] = [[], []];
    this.#svg = null;
    for (const part of [this.#parts.box, this.#parts.detail, this.#parts.story]) part.replaceChildren();
  }

  placed() {
    const [width, height] = ["width", "height"].map((name) => Number(this.#svg.getAttribute(name)));
    return [[{ node: this.#svg, x: 0, y: 0 }], width, height];
  }

  get empty() {
    return !this.#svg;
  }

  #path(tokens) {
    const last = this.#columns[tokens.length - 1] ?? [];
    const same = (node) => node.tokens.every((token, index) => token === tokens[index]);
    return chain(last.find((node) => node.fate !== "pruned" && same(node)) ?? null);
  }

  #draw() {
    const hadFocus = this.#parts.box.contains(document.activeElement);
    const withPruned = this.#parts.pruned.checked;
    const visibleColumns = this.#columns.slice(0, this.#upTo);
    this.#shown = visibleColumns.map((nodes) =>
      nodes.filter((node) => withPruned || node.fate !== "pruned" || this.#selected.includes(node)).sort(rank),
    );
    const tallest = Math.max(1, ...this.#columns.map((nodes) => nodes.filter((node) => withPruned || node.fate !== "pruned").length));
    const height = TOP + tallest * (HEIGHT + BETWEEN);
    const width = ROOT + this.#columns.length * (WIDTH + ACROSS);
    const role = { role: "tree", "aria-label": "the beam, a level for each step" };
    this.#svg = svg("svg", { class: "tree", width, height, ...role });
    const edges = svg("g", { class: "edges", "aria-hidden": "true" });
    const nodes = svg("g", { role: "presentation" });
    this.#svg.append(svg("circle", { class: "root", cx: ROOT / 2 - 4, cy: TOP + HEIGHT / 2, r: 4 }));
    this.#shown.forEach((column, step) => {
      const x = ROOT + step * (WIDTH + ACROSS);
      this.#svg.append(label(`step ${step + 1}`, x + WIDTH / 2, 16, "middle", { class: "heading", "aria-hidden": "true" }));
      column.forEach((node, place) => {
        [node.x, node.y] = [x, TOP + place * (HEIGHT + BETWEEN)];
        node.edge = this.#edge(node);
        node.shape = this.#node(node);
        edges.append(node.edge);
        nodes.append(node.shape);
      });
    });
    // The edges of the selected path go to the end of the group, so that they are drawn over the others.
    for (const node of this.#selected) if (node.edge?.parentNode === edges) edges.append(node.edge);
    this.#svg.append(edges, nodes);
    this.#parts.box.replaceChildren(this.#svg);
    const all = this.#shown.flat();
    if (!all.includes(this.#active)) this.#active = this.#selected.find((node) => all.includes(node)) ?? all[0] ?? null;
    this.#active?.shape.setAttribute("tabindex", "0");
    if (hadFocus) this.#active?.shape.focus();
    this.#parts.slider.setAttribute("aria-valuetext", `step ${this.#upTo} of ${this.#columns.length}`);
    this.#tell();
  }

  #edge(node) {
    const [x, y] = [node.x, node.y + HEIGHT / 2];
    const from = node.parent ? [node.parent.x + WIDTH, node.parent.y + HEIGHT / 2] : [ROOT / 2, TOP + HEIGHT / 2];
    const middle = (from[0] + x) / 2;
    const d = `M${from[0]} ${from[1]}C${middle} ${from[1]} ${middle} ${y} ${x} ${y}`;
    const edge = svg("path", { class: `edge ${FATES[node.fate]}`, d, "stroke-width": (0.75 + 4 * node.share).toFixed(2) });
    edge.classList.toggle("chosen", this.#selected.includes(node));
    return edge;
  }

  #node(node) {
    const { x, y } = node;
    const token = visible(node.text);
    const figures = `probability ${probability(node.share)}, log-probability ${figure(node.log_prob)}, score ${figure(node.score)}`;
    const name = `${token}, step ${node.column + 1}, ${node.fate}, ${figures}`;
    const shape = svg("g", {
      class: `node ${FATES[node.fate]}`,
      role: "treeitem",
      tabindex: "-1",
      "aria-level": node.column + 1,
      "aria-label": name,
      on: {
        pointerenter: () => this.#light(node),
        focus: () => this.#light(node),
        blur: () => this.#light(null),
        click: () => this.#go(node),
        keydown: (event) => this.#key(event, node),
      },
    });
    shape.classList.toggle("chosen", this.#selected.includes(node));
    shape.setAttribute("aria-selected", String(this.#selected.includes(node)));
    shape.append(svg("rect", { x: x + 0.5, y: y + 0.5, width: WIDTH - 1, height: HEIGHT - 1, rx: 5 }));
    if (node.fate === "ended") shape.append(svg("path", { class: "bar", d: `M${x + WIDTH - 5} ${y + 5}v${HEIGHT - 10}` }));
    shape.append(label(fitted(token, WIDTH - 18), x + 8, y + 16, "left", { class: "token" }));
    shape.append(label(figure(node.score), x + 8, y + 31, "left", { class: "score" }));
    shape.append(label(probability(node.share), x + WIDTH - 10, y + 31, "right", { class: "score" }));
    return shape;
  }

  #go(node) {
    this.#active?.shape.setAttribute("tabindex", "-1");
    this.#active = node;
    node.shape.setAttribute("tabindex", "0");
    node.shape.focus();
  }

  #key(event, node) {
    const column = this.#shown[node.column];
    const place = column.indexOf(node);
    const children = node.children.filter((child) => this.#shown[child.column]?.includes(child)).sort(rank);
    const next = {
      ArrowLeft: node.parent,
      ArrowRight: children[0],
      ArrowUp: column[place - 1],
      ArrowDown: column[place + 1],
      Home: this.#shown[0][0],
      End: this.#shown.at(-1)[0],
    }[event.key];
    if (!next) return;
    event.preventDefault();
    this.#go(next);
  }

  // Highlights the path to a node and describes its hypothesis; null ends both.
  #light(node) {
    for (const lit of this.#svg?.querySelectorAll(".lit") ?? []) lit.classList.remove("lit");
    this.#svg?.classList.toggle("dim", node !== null);
    for (const each of chain(node)) for (const shape of [each.edge, each.shape]) shape?.classList.add("lit");
    if (!node) {
      this.#parts.detail.replaceChildren("Point at a hypothesis, or walk through them with the arrow keys.");
      return;
    }
    const fates = {
      kept: node.column < this.#columns.length - 1 ? "kept: extended at the next step" : "kept: in the beam when the search ended",
      ended: "ended: a finished translation",
      pruned: "pruned: not among the best of the beam",
    };
    const fact = (name, value) => element("span", {}, element("span", { className: "name" }, `${name} `), value);
    this.#parts.detail.replaceChildren(
      isolated(chain(node).map((each) => visible(each.text)).join(" "), "hypothesis"),
      fact("token", probability(node.share)),
      fact("log-prob", figure(node.log_prob, 3)),
      fact("score", figure(node.score, 3)),
      element("span", { className: node.fate }, fates[node.fate]),
    );
  }

  #tell() {
    const nodes = this.#columns[this.#upTo - 1] ?? [];
    const counts = Object.keys(FATES).map((fate) => [nodes.filter((node) => node.fate === fate).length, fate]);
    const said = counts.filter(([count]) => count).map(([count, fate]) => `${count} ${fate}`).join(", ");
    const alive = (this.#columns[this.#upTo - 2] ?? []).filter((node) => node.fate === "kept").length;
    const from = alive ? plural(alive, "hypothesis in the beam gave", "hypotheses in the beam gave") : "the start gave";
    const candidates = plural(nodes.length, "candidate", "candidates");
    this.#parts.story.textContent = `Step ${this.#upTo} of ${this.#columns.length}: ${from} ${candidates}: ${said}.`;
    this.#light(null);
  }

  #step(upTo) {
    this.#upTo = upTo;
    this.#parts.slider.value = upTo;
    this.#draw();
    this.#parts.box.scrollLeft = ROOT + upTo * (WIDTH + ACROSS) - this.#parts.box.clientWidth;
  }

  #play() {
    if (this.#timer) {
      this.#stop();
      return;
    }
    this.#parts.play.textContent = "Stop";
    const from = this.#upTo === this.#columns.length ? 1 : this.#upTo + 1;
    this.#step(from);
    this.#timer = setInterval(() => {
      if (this.#upTo < this.#columns.length) this.#step(this.#upTo + 1);
      else this.#stop();
    }, BEAT);
  }

  #stop() {
    clearInterval(this.#timer);
    this.#timer = 0;
    this.#parts.play.textContent = "Play step by step";
  }
}
