// Steering: at some steps the model must attend to a source position that one chose.

import { element, isolated, visible } from "./dom.js";

export class Steering {
  #positions = new Map(); // by step

  get size() {
    return this.#positions.size;
  }

  // Cells of the heatmap: [[step, position]].
  get cells() {
    return [...this.#positions].sort(([a], [b]) => a - b);
  }

  set cells(cells) {
    this.#positions = new Map(cells);
  }

  // For a request; null where nothing is steered.
  get attend() {
    return this.size ? Object.fromEntries(this.cells) : null;
  }

  has(step, position) {
    return this.#positions.get(step) === position;
  }

  // In a search the translation changes from this step on, so that later steerings lose their meaning.
  add(step, position, keepLater) {
    if (!keepLater) for (const later of [...this.#positions.keys()]) if (later > step) this.#positions.delete(later);
    this.#positions.set(step, position);
  }

  remove(step) {
    this.#positions.delete(step);
  }

  clear() {
    this.#positions.clear();
  }

  // What a search must keep and attend to, after a change at `step` of the translation with these tokens.
  request(step, tokens) {
    return this.size ? { prefix: tokens.slice(0, step), attend: this.attend } : { prefix: null, attend: null };
  }
}

// The list of steerings, each with a button that removes it. `before` is the text without steering, or null.
export function showSteerings(box, steering, { tokens, sourceTokens, before, remove, clear }) {
  box.hidden = !steering.size;
  if (!steering.size) {
    box.replaceChildren();
    return;
  }
  const items = steering.cells.map(([step, position]) => {
    const [word, source] = [tokens[step] ?? "–", sourceTokens[position] ?? "–"];
    const name = [`step ${step + 1}: `, isolated(visible(word)), " attends to ", isolated(visible(source))];
    const button = element("button", {
      type: "button",
      className: "small",
      "aria-label": `remove the steering of step ${step + 1}`,
      on: { click: () => remove(step) },
    }, "Remove");
    return element("li", {}, element("span", {}, name), button);
  });
  const all = element("button", { type: "button", className: "small", on: { click: clear } }, "Remove all");
  const without = before === null ? null : element("p", { className: "without" }, "Without steering: ", isolated(before));
  box.replaceChildren(
    element("div", { className: "steering-head" }, element("h3", {}, "Steered"), all),
    element("ul", {}, items),
    ...[without].filter(Boolean),
  );
}
