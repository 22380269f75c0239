// Draws weights as lines between the source words, on the left, and the target words, on the right.

import { element, figure, fitted, label, rove, svg, textWidth, visible } from "./dom.js";

const PITCH = 28; // distance between two words of the longer side, in pixels
const TIGHTEST = 18; // smallest distance between two source words beside a heatmap, in pixels
const LABEL = 130; // width of the longest word, in pixels
const FAINTEST = 0.03; // weights below this share of the largest weight have no line
const FIGURES = 32; // width of the space for a weight, in pixels

export class Links {
  #root;
  #light;
  #view = null;
  #lines = [];
  #sides = [];
  #drawn = null;

  // Calls `light(row, column)` when the user points at another target word (row) or source word (column); null means none.
  constructor(root, { light }) {
    this.#root = root;
    this.#light = light;
  }

  // Draws a view, as `Heatmap.show` describes it. If there is a heatmap on the left, `rows` are its rows: the target words are
  // then at the same heights.
  show(view, rows = { top: 0, pitch: PITCH }) {
    const focused = this.#focused();
    this.#view = view;
    const [target, source] = [view.rows.map(visible), view.columns.map(visible)];
    const [least, { top }] = [Math.min(TIGHTEST, rows.pitch), rows];
    const height = Math.max(target.length * rows.pitch, source.length * (top ? least : rows.pitch));
    const widest = (texts) => Math.min(LABEL, Math.ceil(Math.max(...texts.map((text) => textWidth(text, 14, 600)))));
    const ends = widest(source) + widest(target) + 2 * FIGURES + 16;
    const width = Math.max(260, Math.min(560, this.#root.clientWidth || 420), ends + 60);
    const [from, to] = [widest(source) + FIGURES + 8, width - widest(target) - FIGURES - 8];
    const at = (count) => (index) => top + ((index + 0.5) * height) / count;
    const [targetY, sourceY] = [at(target.length), at(source.length)];
    this.#lines = [];
    const curves = svg("g", { class: "curves" });
    view.weights.forEach((row, step) =>
      row.forEach((weight, position) => {
        const share = Math.abs(weight) / view.scale.max;
        if (share < FAINTEST) return;
        const [y, z, middle] = [sourceY(position), targetY(step), (from + to) / 2];
        const d = `M${from} ${y}C${middle} ${y} ${middle} ${z} ${to} ${z}`;
        const line = svg("path", { class: weight < 0 ? "curve below" : "curve", d });
        line.setAttribute("stroke-width", (0.75 + 5 * share).toFixed(2));
        line.setAttribute("stroke-opacity", Math.max(0.06, 0.9 * share ** 0.8).toFixed(2));
        this.#lines.push({ line, step, position });
        curves.append(line);
      }),
    );
    const words = [
      this.#words(target, 0, to + FIGURES + 4, targetY, "left", to + 4),
      this.#words(source, 1, from - FIGURES - 4, sourceY, "right", from - 4),
    ];
    this.#sides = words.map((side) => [...side.children]);
    const name = { role: "group", "aria-label": `${view.name} as lines` };
    this.#drawn = svg("svg", { class: "links", width, height: top + height + 4, ...name }, curves, words[1], words[0]);
    const { scrollTop } = this.#root;
    this.#root.replaceChildren(this.#drawn);
    this.#root.scrollTop = scrollTop;
    if (focused) this.#sides[focused[0]][Math.min(focused[1], this.#sides[focused[0]].length - 1)]?.focus();
  }

  clear() {
    this.#view = null;
    this.#root.replaceChildren();
  }

  light(row, column) {
    if (!this.#view) return;
    const lit = [row, column];
    this.#drawn.classList.toggle("dim", row !== null || column !== null);
    for (const { line, step, position } of this.#lines) {
      const on = (row === null || row === step) && (column === null || column === position);
      line.classList.toggle("lit", on && (row !== null || column !== null));
    }
    this.#sides.forEach((side, axis) =>
      side.forEach((word, index) => {
        word.classList.toggle("lit", lit[axis] === index);
        const weight = this.#shownWeight(axis, index, row, column);
        word.lastChild.textContent = Math.abs(weight) >= FAINTEST * this.#view.scale.max ? figure(weight) : "";
      }),
    );
  }

  // Returns the weight to write beside a word (axis 0: target, 1: source), or 0 for none. When the user points at a target word,
  // its weights are written beside the source words, and the other way round.
  #shownWeight(axis, index, row, column) {
    const { weights } = this.#view;
    if (axis && row !== null && (column === null || column === index)) return weights[row][index];
    return !axis && row === null && column !== null ? weights[index][column] : 0;
  }

  placed() {
    const [width, height] = ["width", "height"].map((name) => Number(this.#drawn.getAttribute(name)));
    return [[{ node: this.#drawn, x: 0, y: 0 }], width, height];
  }

  #words(texts, axis, x, y, edge, figureX) {
    const side = svg("g", { class: "side", role: "listbox", "aria-label": axis ? "source words" : "target words" });
    texts.forEach((text, index) => {
      const point = (on) => () => this.#light(...(axis ? [null, on ? index : null] : [on ? index : null, null]));
      const word = svg("g", {
        class: "word",
        role: "option",
        tabindex: index ? "-1" : "0",
        "aria-selected": "false",
        "aria-label": this.#described(axis, index, text),
        on: {
          pointerenter: point(true),
          pointerleave: point(false),
          focus: point(true),
          blur: point(false),
          keydown: (event) => this.#key(event, axis, index),
        },
      });
      const width = Math.min(LABEL, textWidth(text, 14, 600)) + 12;
      const box = { class: "hit", x: edge === "left" ? x - 6 : x - width + 6, y: y(index) - 12, width, height: 24, rx: 4 };
      word.append(svg("rect", box), label(fitted(text, LABEL, 14), x, y(index) + 5, edge));
      word.append(label("", figureX, y(index) + 4, edge, { class: "weight" }));
      side.append(word);
    });
    return side;
  }

  #described(axis, index, text) {
    const weights = axis ? this.#view.weights.map((row) => row[index]) : this.#view.weights[index];
    const others = axis ? this.#view.rows : this.#view.columns;
    const strongest = weights.map((weight, other) => ({ weight, other })).sort((a, b) => b.weight - a.weight).slice(0, 3);
    const named = strongest.map(({ weight, other }) => `${visible(others[other])} ${figure(weight)}`);
    return `${text}: ${named.join(", ")}`;
  }

  #key(event, axis, index) {
    const side = this.#sides[axis];
    const across = event.key === (axis ? "ArrowRight" : "ArrowLeft");
    const other = this.#sides[1 - axis];
    const next = {
      ArrowDown: side[index + 1],
      ArrowUp: side[index - 1],
      Home: side[0],
      End: side.at(-1),
    }[event.key];
    const word = across ? other[Math.round((index * (other.length - 1)) / Math.max(1, side.length - 1))] : next;
    if (!word) return;
    event.preventDefault();
    rove(across ? other : side, word);
    word.focus();
  }

  #focused() {
    const word = document.activeElement?.closest?.(".links .word");
    const axis = this.#sides.findIndex((side) => side.includes(word));
    return axis < 0 ? null : [axis, this.#sides[axis].indexOf(word)];
  }
}

// Makes the legend of a scale.
export function legend(scale, levels, colour) {
  const steps = levels.map((level, index) =>
    svg("rect", { x: index * 4, y: 0, width: 4.5, height: 10, fill: colour(level) }),
  );
  const bar = svg("svg", { width: levels.length * 4, height: 10, "aria-hidden": "true" }, steps);
  const low = scale.signed ? figure(-scale.max, 1) : "0";
  return element("span", { className: "legend" }, element("span", {}, low), bar, figure(scale.max, 1));
}
