// Weights as a grid of colours: a row for each target token, a column for each source token.
//
// All cells of one colour are drawn as one SVG path, because 300 x 300 elements would be slow. Only the cells around the
// active cell are also elements of an ARIA grid, for the keyboard and for screen readers.

import { colourOf } from "./colours.js";
import { element, fitted, label, svg, textWidth, visible } from "./dom.js";
import { areLetters } from "./words.js";

const [SMALLEST, LARGEST] = [18, 36]; // smallest and largest side of a cell, in pixels
const LABEL = 130; // width of the longest label, in pixels
const SLANT = (55 * Math.PI) / 180; // angle between the labels of the columns and the horizontal, in radians; letters stand upright
const AROUND = 12; // number of cells in each direction from the active one that are elements

// Makes a path for each colour, of all cells that have it. Cells of level 0 are left out: they look like the ground.
export function cellPaths(weights, scale, size, gap = 1) {
  const outlines = new Map();
  weights.forEach((row, y) =>
    row.forEach((weight, x) => {
      const level = scale.level(weight);
      if (!level) return;
      const box = `M${x * size} ${y * size}h${size - gap}v${size - gap}h${gap - size}z`;
      outlines.set(level, (outlines.get(level) ?? "") + box);
    }),
  );
  return [...outlines].map(([level, d]) => svg("path", { d, fill: scale.colour(level) }));
}

export class Heatmap {
  #root;
  #events;
  #view = null;
  #size = LARGEST;
  #active = [0, 0];
  #lit = [null, null];
  #parts = {};

  // Calls `light(row, column)` when the user points at another cell, (null, null) at none, and `pick(row, column)` on a
  // click or Enter. `room()` returns the width in pixels that the picture should have; cells of the smallest size may
  // make it wider.
  constructor(root, { light, pick, room }) {
    this.#root = root;
    this.#events = { light, pick, room };
  }

  // Draws a view: { rows, columns, weights, scale, describe(row, column), marks, windows, stops, name }. `rows` and `columns`
  // are the texts of the labels, `describe` returns a cell's text for screen readers. marks: [[row, column]] of steered
  // cells. windows: [{ from, to, centre }] and stops: [column], one for each row; either may be null.
  show(view) {
    const hadFocus = this.#root.contains(document.activeElement);
    const { scrollLeft, scrollTop } = this.#root;
    this.#view = view;
    this.#active = [clamp(this.#active[0], view.rows.length), clamp(this.#active[1], view.columns.length)];
    const names = { rows: view.rows.map(visible), columns: view.columns.map(visible) };
    const widest = (texts) => Math.min(LABEL, Math.max(...texts.map((text) => textWidth(text, 13, 600))));
    const slant = areLetters(names.columns) ? 0 : SLANT;
    const [left, top] = [Math.ceil(widest(names.rows)) + 14, Math.ceil(widest(names.columns) * Math.sin(slant)) + 20];
    const overhang = Math.ceil(widest(names.columns) * Math.cos(SLANT));
    const room = this.#events.room() - left - overhang - 4;
    this.#size = Math.min(LARGEST, Math.max(SMALLEST, Math.floor(room / view.columns.length)));
    const [width, height] = [view.columns.length * this.#size, view.rows.length * this.#size];
    const columns = this.#columnLabels(names.columns, width + overhang, top, slant);
    const rows = this.#rowLabels(names.rows, left, height);
    const marks = svg("g", { class: "lit-cell" });
    const drawn = svg("svg", { class: "cells", width, height, "aria-hidden": "true" });
    drawn.append(svg("rect", { class: "ground", width, height, fill: colourOf(0) }));
    drawn.append(...cellPaths(view.weights, view.scale, this.#size), ...this.#overlays(), marks);
    const cells = element("div", { className: "gridcells" });
    const grid = element(
      "div",
      {
        className: "grid",
        role: "grid",
        "aria-label": view.name,
        "aria-rowcount": view.rows.length,
        "aria-colcount": view.columns.length,
        on: {
          pointermove: (event) => this.#events.light(...this.#cellAt(event)),
          pointerleave: () => this.#events.light(...this.#focused()),
          click: (event) => this.#click(event),
          keydown: (event) => this.#key(event),
          focusin: (event) => this.#focus(event.target),
          focusout: () => this.#events.light(null, null),
        },
      },
      drawn,
      cells,
    );
    this.#parts = { columns, rows, drawn, marks, cells, grid, left, top, width: width + overhang, height };
    const corner = element("div", { className: "corner" });
    this.#root.replaceChildren(element("div", { className: "sheet" }, corner, columns, rows, grid));
    this.#root.scrollTo(scrollLeft, scrollTop);
    this.#place(hadFocus);
  }

  clear() {
    this.#view = null;
    this.#root.replaceChildren();
  }

  // Highlights a row and a column; null leaves one of them out.
  light(row, column) {
    if (!this.#view) return;
    const { rows, columns, marks, drawn } = this.#parts;
    this.#lit.forEach((index, axis) => [rows, columns][axis].children[index]?.classList.remove("lit"));
    this.#lit = [row, column];
    rows.children[row ?? -1]?.classList.add("lit");
    columns.children[column ?? -1]?.classList.add("lit");
    const size = this.#size;
    const [width, height] = [drawn.getAttribute("width"), drawn.getAttribute("height")];
    const bands = [];
    if (row !== null) bands.push(svg("rect", { class: "band", x: 0, y: row * size, width, height: size - 1 }));
    if (column !== null) bands.push(svg("rect", { class: "band", x: column * size, y: 0, width: size - 1, height }));
    const box = { class: "cell", x: (column ?? 0) * size, y: (row ?? 0) * size, width: size - 1, height: size - 1 };
    if (row !== null && column !== null) bands.push(svg("rect", box));
    marks.replaceChildren(...bands);
  }

  // The upper edge of the first row and the height of a row, in pixels.
  get rows() {
    return { top: this.#parts.top, pitch: this.#size };
  }

  // Returns the arguments of `picture` in export.js.
  placed() {
    const { columns, rows, drawn, left, top, width, height } = this.#parts;
    const nodes = [{ node: columns, x: left, y: 0 }, { node: rows, x: 0, y: top }, { node: drawn, x: left, y: top }];
    return [nodes, left + width, top + height];
  }

  #columnLabels(texts, width, height, slant) {
    const [edge, right] = slant ? ["left", 3] : ["middle", 0];
    const labels = texts.map((text, index) => {
      const at = `translate(${(index + 0.5) * this.#size + right} ${height - 5}) rotate(${(-slant * 180) / Math.PI})`;
      return label(fitted(text, LABEL), 0, 0, edge, { transform: at });
    });
    return svg("svg", { class: "labels columns", width, height, "aria-hidden": "true" }, labels);
  }

  #rowLabels(texts, width, height) {
    const y = (index) => (index + 0.5) * this.#size + 4;
    const labels = texts.map((text, index) => label(fitted(text, LABEL), width - 8, y(index), "right"));
    return svg("svg", { class: "labels rows", width, height, "aria-hidden": "true" }, labels);
  }

  #overlays() {
    const { marks = [], windows, stops } = this.#view;
    const size = this.#size;
    const drawn = [];
    windows?.forEach(({ from, to, centre }, row) => {
      const [x, y] = [from * size + 1, row * size + 2];
      drawn.push(svg("rect", { class: "window", x, y, width: (to - from) * size - 3, height: size - 5, rx: 3 }));
      const middle = (centre + 0.5) * size;
      drawn.push(...haloed("path", "centre", { d: `M${middle} ${y}v${size - 5}` }));
    });
    stops?.forEach((column, row) => {
      if (column === null) return;
      const [x, y] = [(column + 0.5) * size - 0.5, (row + 0.5) * size - 0.5];
      drawn.push(...haloed("circle", "stop", { cx: x, cy: y, r: size / 2 - 5 }));
    });
    for (const [row, column] of marks) {
      const [x, y] = [column * size + 1, row * size + 1];
      drawn.push(svg("rect", { class: "steered", x, y, width: size - 3, height: size - 3 }));
    }
    return drawn;
  }

  #cellAt(event) {
    const box = this.#parts.grid.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.#size);
    const row = Math.floor((event.clientY - box.top) / this.#size);
    const inside = row >= 0 && column >= 0 && row < this.#view.rows.length && column < this.#view.columns.length;
    return inside ? [row, column] : [null, null];
  }

  #focused() {
    return this.#root.contains(document.activeElement) ? this.#active : [null, null];
  }

  // Makes the focused cell the active one, because a screen reader may move the focus without a key event.
  #focus(cell) {
    this.#active = ["rowindex", "colindex"].map((name) => Number(cell.getAttribute(`aria-${name}`)) - 1);
    this.#events.light(...this.#active);
  }

  #click(event) {
    const [row, column] = this.#cellAt(event);
    if (row === null) return;
    this.#active = [row, column];
    this.#place(true);
    this.#events.pick(row, column);
  }

  #key(event) {
    const [row, column] = this.#active;
    const [rows, columns] = [this.#view.rows.length, this.#view.columns.length];
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#events.pick(row, column);
      return;
    }
    const next = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      PageUp: [row - AROUND, column],
      PageDown: [row + AROUND, column],
      Home: [event.ctrlKey ? 0 : row, 0],
      End: [event.ctrlKey ? rows : row, columns],
    }[event.key];
    if (!next || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.#active = [clamp(next[0], rows), clamp(next[1], columns)];
    this.#place(true);
  }

  // Builds the elements of the cells around the active one. If `focus`, focuses the active cell and scrolls to it.
  #place(focus) {
    const { cells } = this.#parts;
    const [activeRow, activeColumn] = this.#active;
    const rows = span(activeRow, this.#view.rows.length);
    const columns = span(activeColumn, this.#view.columns.length);
    const built = rows.map((row) => {
      const line = element("div", { role: "row", "aria-rowindex": row + 1 });
      line.append(...columns.map((column) => this.#cell(row, column)));
      return line;
    });
    cells.replaceChildren(...built);
    if (!focus) return;
    const active = cells.querySelector("[tabindex='0']");
    active.focus({ preventScroll: true });
    this.#reveal();
  }

  #cell(row, column) {
    const cell = element("div", {
      role: "gridcell",
      "aria-rowindex": row + 1,
      "aria-colindex": column + 1,
      "aria-label": this.#view.describe(row, column),
      tabindex: row === this.#active[0] && column === this.#active[1] ? "0" : "-1",
    });
    const size = this.#size;
    Object.assign(cell.style, { left: `${column * size}px`, top: `${row * size}px` });
    Object.assign(cell.style, { width: `${size - 1}px`, height: `${size - 1}px` });
    return cell;
  }

  // Scrolls until the active cell is visible and not behind the labels, which stay in place while the cells scroll.
  #reveal() {
    const { left, top } = this.#parts;
    const [y, x] = this.#active.map((index) => index * this.#size);
    const box = this.#root;
    const [right, bottom] = [box.clientWidth - left - 2 * this.#size, box.clientHeight - top - 2 * this.#size];
    box.scrollLeft = Math.min(x, Math.max(box.scrollLeft, x - right));
    box.scrollTop = Math.min(y, Math.max(box.scrollTop, y - bottom));
    box.closest("figure")?.scrollIntoView({ block: "nearest" });
  }
}

// Draws a shape on top of a wider one in the page's colour, so that it is visible on pale and on dark cells.
const haloed = (name, className, shape) => ["halo", className].map((each) => svg(name, { class: each, ...shape }));

const clamp = (index, count) => Math.max(0, Math.min(count - 1, index));

function span(middle, count) {
  const from = Math.max(0, middle - AROUND);
  return Array.from({ length: Math.min(count, middle + AROUND + 1) - from }, (_, index) => from + index);
}
