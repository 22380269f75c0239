// The view "Side by side": translations of one sentence by several models, with the words marked in which they differ.

import { post } from "./api.js";
import { colourOf, scaleOf } from "./colours.js";
import { differences, marked, parts } from "./diff.js";
import { element, figure, isolated, svg } from "./dom.js";
import { cellPaths } from "./heatmap.js";
import { MOST_MODELS, searchSettings } from "./state.js";

const AT_A_TIME = 2; // requests that may run at a time, so that one page does not keep a service busy
const [WIDEST, LARGEST] = [280, 18]; // largest side of a small heatmap and of its cells, in pixels

export class Compare {
  #parts;
  #events;
  // The keys of these maps are the bodies of requests as JSON.
  #answers = new Map(); // best translation of each request that was answered
  #errors = new Map(); // error message of each request that has failed
  #asking = new Map(); // AbortController of each request that still runs
  #shown = []; // { model, body, key } for each card

  // parts: elements of the page, { chooser, cards, status }. Calls `choose(names)` when the user chooses other models, and
  // `open(name)` when the user asks for a closer look at a model.
  constructor(parts, events) {
    this.#parts = parts;
    this.#events = events;
  }

  show({ models, names, text, state }) {
    this.#choices(models, names);
    const chosen = text ? names.map((name) => models.find((model) => model.name === name)).filter(Boolean) : [];
    this.#shown = chosen.map((model) => {
      const settings = { ...searchSettings(state, model), nbest: 1 };
      const body = { text, model: model.name, ...settings, alignment: model.attention !== null };
      return { model, body, key: JSON.stringify(body) };
    });
    const wanted = new Set(this.#shown.map(({ key }) => key));
    for (const [key, controller] of this.#asking) if (!wanted.has(key)) controller.abort();
    if (chosen.length) this.#draw();
    else {
      const missing = text ? "Choose the models to compare." : "Type a sentence above.";
      this.#parts.cards.replaceChildren(element("p", { className: "note" }, missing));
      this.#parts.status.textContent = "";
    }
    this.#askNext();
  }

  // Ends all requests, because the view is no longer shown. Requests that have failed are tried again when it is shown next.
  cancel() {
    for (const controller of this.#asking.values()) controller.abort();
    this.#errors.clear();
    this.#shown = [];
  }

  // The translations shown, for the JSON file.
  get data() {
    return this.#shown.map(({ model, key }) => ({ model: model.name, translation: this.#answers.get(key) ?? null }));
  }

  #askNext() {
    for (const { key, body } of this.#shown) {
      if (this.#asking.size >= AT_A_TIME) return;
      if (!this.#answers.has(key) && !this.#errors.has(key) && !this.#asking.has(key)) this.#ask(key, body);
    }
  }

  async #ask(key, body) {
    const controller = new AbortController();
    const { signal } = controller;
    this.#asking.set(key, controller);
    try {
      const waiting = (said) => (this.#parts.status.textContent = said);
      const answer = await post("v1/translate", body, { signal, waiting });
      this.#answers.set(key, answer.translations[0][0]);
    } catch (error) {
      if (!signal.aborted) this.#errors.set(key, error.message);
    }
    this.#asking.delete(key);
    if (this.#shown.some((each) => each.key === key)) this.#draw();
    this.#askNext();
  }

  #choices(models, names) {
    const boxes = models.map((model) => {
      const checked = names.includes(model.name);
      const change = () => this.#events.choose(checked ? names.filter((name) => name !== model.name) : [...names, model.name]);
      const disabled = !checked && names.length >= MOST_MODELS;
      const box = element("input", { type: "checkbox", value: model.name, checked, disabled, on: { change } });
      return element("label", { className: "choice" }, box, isolated(model.name));
    });
    const focused = this.#parts.chooser.contains(document.activeElement) && document.activeElement.value;
    this.#parts.chooser.replaceChildren(...boxes);
    if (focused) boxes.find((box) => box.firstChild.value === focused)?.firstChild.focus();
  }

  // Marks a word of the first translation if it is missing from any other, and a word of another translation if it is missing
  // from the first.
  #draw() {
    const known = this.#shown.map(({ key }) => this.#answers.get(key) ?? null);
    const first = known.find(Boolean);
    const marks = known.map((answer) => (answer && answer !== first ? differences(parts(first.text), parts(answer.text)) : null));
    const anyDiffers = first ? parts(first.text).map((_, index) => marks.some((mark) => mark?.[0][index])) : [];
    const cards = this.#shown.map((each, index) => {
      const answer = known[index];
      const ofText = answer === first ? anyDiffers : marks[index]?.[1];
      return this.#card(each, answer, ofText ?? []);
    });
    this.#parts.cards.replaceChildren(...cards);
    const missing = this.#shown.filter(({ key }, index) => !known[index] && !this.#errors.has(key)).length;
    this.#parts.status.textContent = missing ? `Translating with ${missing} more…` : "";
  }

  #card({ model, key }, answer, marks) {
    const error = this.#errors.get(key);
    const facts = [model.attention ?? "no attention"];
    if (model.members > 1) facts.push(`ensemble of ${model.members}`);
    if (model.score !== null) facts.push(model.score);
    const head = element("header", {}, element("h3", {}, isolated(model.name)), element("p", {}, facts.join(" · ")));
    if (error) return element("article", { className: "card" }, head, element("p", { className: "error" }, error));
    if (!answer) return element("article", { className: "card waiting", "aria-busy": "true" }, head, element("p", {}, "…"));
    const text = element("p", { dir: "auto", className: "text" }, marked(answer.text, marks));
    const look = { type: "button", className: "small", on: { click: () => this.#events.open(model.name) } };
    const foot = element(
      "footer",
      {},
      element("span", {}, `score ${figure(answer.score, 3)}`),
      element("button", { ...look, "aria-label": `look closer at ${model.name}` }, "Look closer"),
    );
    return element("article", { className: "card", data: { model: model.name } }, head, text, thumbnail(answer), foot);
  }
}

// Draws a small heatmap without labels.
function thumbnail({ alignment, source_tokens: source, tokens }) {
  if (!alignment) return element("p", { className: "note" }, "No attention, so no alignment.");
  const size = Math.max(2, Math.min(LARGEST, Math.floor(WIDEST / Math.max(source.length, tokens.length))));
  const [width, height] = [source.length * size, tokens.length * size];
  const name = `alignment, ${tokens.length} target by ${source.length} source tokens`;
  const cells = cellPaths(alignment, scaleOf(alignment), size, size > 4 ? 1 : 0);
  const ground = svg("rect", { width, height, fill: colourOf(0), class: "ground" });
  return element("div", { className: "thumbnail" }, svg("svg", { width, height, role: "img", "aria-label": name }, ground, cells));
}
