// Steering: at some steps, the model must attend to a source position that the user has chosen.

import { byId, element, isolated, visible } from "./dom.js";

export class Steering {
  #positions = new Map(); // step -> source position

  get size() {
    return this.#positions.size;
  }

  // The steered cells of the heatmap, [[step, position]], in the order of the steps.
  get cells() {
    return [...this.#positions].sort(([a], [b]) => a - b);
  }

  set cells(cells) {
    this.#positions = new Map(cells);
  }

  // The field `attend` of a request: step -> position, or null if no step is steered.
  get attend() {
    return this.size ? Object.fromEntries(this.cells) : null;
  }

  has(step, position) {
    return this.#positions.get(step) === position;
  }

  // Steers a step. Unless `keepLater`, the steerings of later steps are removed: in a search, the tokens from this step on may
  // change.
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

  // Makes the fields of a search request after the steering of `step` has changed: the tokens before it are kept as the prefix.
  request(step, tokens) {
    return this.size ? { prefix: tokens.slice(0, step), attend: this.attend } : { prefix: null, attend: null };
  }
}

// Shows the list of steerings, each with a button that removes it. `before` is the translation without steering, or null.
export function showSteerings(box, steering, { tokens, sourceTokens, before, remove, clear }) {
  const focused = [...box.querySelectorAll("button")].indexOf(document.activeElement); // -1: none of its buttons
  box.hidden = !steering.size;
  if (!steering.size) {
    box.replaceChildren();
    if (focused >= 0) byId("tab-alignment").focus();
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
  if (focused >= 0) [...box.querySelectorAll("button")].slice(0, focused + 1).at(-1).focus();
}
