// One sentence through several models, and the words in which their translations differ.

import { Latest, post } from "./api.js";
import { colourOf, scaleOf } from "./colours.js";
import { differences, marked, parts } from "./diff.js";
import { element, figure, isolated, svg } from "./dom.js";
import { cellPaths } from "./heatmap.js";
import { MOST_MODELS, searchSettings } from "./state.js";

const AT_A_TIME = 2; // requests, so that one page does not keep a service busy
const [WIDEST, LARGEST] = [280, 18]; // pixels of a small heatmap, and of its cells

export class Compare {
  #parts;
  #events;
  #latest = new Latest();
  #answers = new Map(); // by request: translations already seen
  #shown = []; // { model, answer or error }

  // parts: { chooser, cards, status }; `choose(names)` hears of another choice, `open(name)` of a closer look.
  constructor(parts, events) {
    this.#parts = parts;
    this.#events = events;
  }

  async show({ models, names, text, state }) {
    this.#choices(models, names);
    const chosen = names.map((name) => models.find((model) => model.name === name)).filter(Boolean);
    if (!text || !chosen.length) {
      this.#latest.cancel();
      this.#shown = [];
      const missing = text ? "Choose the models to compare." : "Type a sentence above.";
      this.#parts.cards.replaceChildren(element("p", { className: "note" }, missing));
      return;
    }
    this.#shown = chosen.map((model) => ({ model, key: JSON.stringify([model.name, text, searchSettings(state, model)]) }));
    this.#draw();
    await this.#latest.run(async (signal) => {
      const queue = this.#shown.filter((each) => !this.#answers.has(each.key));
      const worker = async () => {
        for (let each = queue.shift(); each && !signal.aborted; each = queue.shift()) await this.#ask(each, text, state, signal);
      };
      await Promise.all(Array.from({ length: AT_A_TIME }, worker));
    });
  }

  cancel() {
    this.#latest.cancel();
  }

  // For a file.
  get data() {
    return this.#shown.map(({ model, key }) => ({ model: model.name, translation: this.#answers.get(key) ?? null }));
  }

  async #ask(each, text, state, signal) {
    const { model, key } = each;
    const settings = { ...searchSettings(state, model), nbest: 1 };
    const body = { text, model: model.name, ...settings, alignment: model.attention !== null };
    try {
      const waiting = (said) => (this.#parts.status.textContent = said);
      const answer = await post("v1/translate", body, { signal, waiting });
      this.#answers.set(key, answer.translations[0][0]);
    } catch (error) {
      if (signal.aborted) return;
      each.error = error.message;
    }
    this.#draw();
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

  // A word of the first translation is marked where any other differs, a word of the others where it differs from the first.
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
    const missing = this.#shown.filter((each, index) => !known[index] && !each.error).length;
    this.#parts.status.textContent = missing ? `Translating with ${missing} more…` : "";
  }

  #card({ model, error }, answer, marks) {
    const facts = [model.attention ?? "no attention"];
    if (model.members > 1) facts.push(`ensemble of ${model.members}`);
    if (model.bleu !== null) facts.push(`BLEU ${figure(model.bleu, 1)}`);
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

// The heatmap without labels; those stand in the closer look.
function thumbnail({ alignment, source_tokens: source, tokens }) {
  if (!alignment) return element("p", { className: "note" }, "No attention, so no alignment.");
  const size = Math.max(2, Math.min(LARGEST, Math.floor(WIDEST / Math.max(source.length, tokens.length))));
  const [width, height] = [source.length * size, tokens.length * size];
  const name = `alignment, ${tokens.length} target by ${source.length} source tokens`;
  const cells = cellPaths(alignment, scaleOf(alignment), size, size > 4 ? 1 : 0);
  const ground = svg("rect", { width, height, fill: colourOf(0), class: "ground" });
  return element("div", { className: "thumbnail" }, svg("svg", { width, height, role: "img", "aria-label": name }, ground, cells));
}
