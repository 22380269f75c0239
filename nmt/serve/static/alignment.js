// The view "Alignment": weights of the translation shown, by sub-words or words, as a heatmap and as lines.

import { Latest, post } from "./api.js";
import { colourOf, isDark, legendLevels, scaleOf } from "./colours.js";
import { byId, element, figure, isolated, visible } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { legend, Links } from "./links.js";
import { mergeToWords, pieceTexts, wordsOfPieces, wordTexts } from "./words.js";

const NO_ATTENTION =
  "This model has no attention: one vector holds the whole source sentence, so there are no weights to show. " +
  "What its translation depends on can still be measured, by gradients.";
const NAMES = { attention: "attention", saliency: "gradient saliency", difference: "attention − saliency" };
const WIDEST = 700; // width of a heatmap in pixels, unless cells of the smallest size make it wider
const MOST_NAMED = 3; // number of words with their weights in the line above the pictures

export class Alignment {
  #events;
  #heatmap;
  #links;
  #latest = new Latest();
  #explained = new Map(); // body of a request to /v1/explain as JSON -> its answer
  #given = null;
  #view = null;
  #seen = []; // values from which the pictures were last drawn

  // Calls `pick(step, position)` when the user picks a cell to steer, and `change(key, value)` to change the state.
  constructor(events) {
    this.#events = events;
    const light = (row, column) => this.#light(row, column);
    const pick = (row, column) => this.#pick(row, column);
    const room = () => Math.min(byId("pictures").clientWidth, WIDEST);
    this.#heatmap = new Heatmap(byId("heatmap"), { light, pick, room });
    this.#links = new Links(byId("links"), { light });
    byId("overlay").addEventListener("change", () => this.show(this.#given));
  }

  // given: { model, text, hypothesis, steering, own, state }; without a translation, hypothesis is null. `own` says whether
  // the hypothesis is the user's own translation.
  async show(given) {
    const { model, hypothesis, state } = given;
    const steered = JSON.stringify(given.steering.attend);
    const choices = [state.weights, state.unit, state.pictures, byId("overlay").checked];
    const seen = [model, hypothesis, steered, ...choices, isDark(), innerWidth];
    if (seen.every((value, index) => value === this.#seen[index])) return undefined;
    [this.#given, this.#seen] = [given, seen];
    this.#latest.cancel();
    byId("alignment-status").textContent = "";
    this.#choices(model, state);
    if (!hypothesis?.tokens.length) return this.#say("The alignment appears here as soon as there is a translation.");
    const explained = this.#known();
    const needed = state.weights !== "attention" || this.#overlaid;
    if (needed && !explained) {
      if (!this.#drawable(null)) this.#say("Computing…");
      else this.#draw(null);
      return this.#explain();
    }
    return this.#draw(explained ?? null);
  }

  get empty() {
    return !this.#view;
  }

  // Returns the arguments of `picture` in export.js: the pictures that are visible, side by side.
  placed() {
    const shown = [["heatmap", this.#heatmap], ["links", this.#links]].filter(([id]) => byId(id).clientWidth > 0);
    let [x, tallest] = [0, 0];
    const nodes = [];
    for (const [, picture] of shown) {
      const [placed, width, height] = picture.placed();
      nodes.push(...placed.map((each) => ({ ...each, x: each.x + x })));
      [x, tallest] = [x + width + 32, Math.max(tallest, height)];
    }
    return [nodes, x - 32, tallest];
  }

  get data() {
    const { model, text, hypothesis, state, steering } = this.#given;
    const { rows, columns, weights } = this.#view;
    const { score, log_prob, tokens, token_log_probs, source_tokens } = hypothesis;
    const pieces = { source_tokens, tokens, token_log_probs };
    const shown = { kind: state.weights, unit: state.unit, source: columns, target: rows, weights };
    return { model: model.name, text, translation: hypothesis.text, score, log_prob, attend: steering.attend, ...pieces, shown };
  }

  get #overlaid() {
    const { model, state } = this.#given;
    return byId("overlay").checked && state.unit === "tokens" && (model.window !== null || model.monotonic);
  }

  #choices(model, state) {
    const options = [["attention", model?.attention === null ? "attention (none)" : "attention"]];
    if (model && model.members === 1) {
      options.push(["saliency", "gradient saliency"]);
      if (model.attention !== null) options.push(["difference", "attention − saliency"]);
      for (let head = 1; head <= model.heads; head += 1) options.push([`head-${head}`, `head ${head}`]);
    }
    const select = byId("weights");
    if (!options.some(([value]) => value === state.weights)) state.weights = "attention";
    select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
    select.value = state.weights;
    const extra = model?.window ? "window" : model?.monotonic ? "stops" : "";
    byId("overlay-choice").hidden = !extra;
    byId("overlay").disabled = state.unit === "words";
    byId("overlay-name").textContent = extra === "window" ? "window: centre and reach" : "where it stopped";
  }

  // Makes the body of a request to /v1/explain.
  #body() {
    const { model, text, hypothesis, steering, own, state } = this.#given;
    const saliency = state.weights === "saliency" || state.weights === "difference";
    // The user's own translation is sent as text: its tokens may show characters that are not in the vocabulary.
    const target = own ? hypothesis.text : hypothesis.tokens;
    return { text, model: model.name, target, attend: steering.attend, saliency };
  }

  // Finds the answer to the request if it is already known. An answer with saliency also serves a request without it.
  #known() {
    const body = this.#body();
    const full = this.#explained.get(JSON.stringify({ ...body, saliency: true }));
    return full ?? this.#explained.get(JSON.stringify(body));
  }

  async #explain() {
    const body = this.#body();
    const status = byId("alignment-status");
    try {
      const waiting = (said) => (status.textContent = said);
      const answer = await this.#latest.run((signal) => post("v1/explain", body, { signal, waiting }));
      if (!answer) return;
      this.#explained.set(JSON.stringify(body), answer);
      status.textContent = "";
      this.#draw(answer);
    } catch (error) {
      status.textContent = error.message;
      if (!this.#view) byId("notice").hidden = true; // it says "Computing…"
    }
  }

  // Returns the chosen weights of the sub-words, (T, S): T target and S source tokens; null while they are not known.
  #matrix(explained) {
    const { hypothesis, state } = this.#given;
    const attention = hypothesis.alignment ?? explained?.alignment ?? null;
    if (state.weights === "attention") return attention;
    if (state.weights.startsWith("head-")) return explained?.heads?.[Number(state.weights.slice(5)) - 1] ?? null;
    const saliency = explained?.saliency ?? null;
    if (state.weights === "saliency" || !saliency) return saliency;
    return attention && attention.map((row, step) => row.map((weight, position) => weight - saliency[step][position]));
  }

  #drawable(explained) {
    return this.#matrix(explained) !== null;
  }

  #draw(explained) {
    const { model, hypothesis, state, steering } = this.#given;
    const matrix = this.#matrix(explained);
    if (!matrix) return this.#say(model.attention === null ? NO_ATTENTION : "The service did not return these weights.", model);
    const { tokens, source_tokens: source } = hypothesis;
    const merged = state.unit === "words";
    const weights = merged ? mergeToWords(matrix, tokens, source) : matrix;
    const [rows, columns] = merged
      ? [wordTexts(tokens), wordTexts(source)]
      : [pieceTexts(tokens, source), pieceTexts(source, tokens)];
    const scale = scaleOf(weights);
    const overlay = this.#overlaid ? explained : null;
    const describe = (row, column) => `${visible(rows[row])} from ${visible(columns[column])}: ${figure(weights[row][column], 3)}`;
    const steered = merged
      ? steering.cells.map(([step, position]) => [wordsOfPieces(tokens)[step], wordsOfPieces(source)[position]])
      : steering.cells;
    const [windows, stops] = [overlay?.window && windowsOf(overlay.window, source.length), overlay?.stops ?? null];
    const marks = steered.filter(([row]) => row < rows.length);
    this.#view = { rows, columns, weights, scale, describe, marks, windows, stops, name: this.#name() };
    byId("notice").hidden = true;
    byId("pictures").hidden = false; // hidden elements have no size, and the pictures measure theirs
    this.#heatmap.show(this.#view);
    this.#links.clear();
    const [above, besideIt] = ["heatmap", "links"].map((id) => byId(id).getBoundingClientRect().top);
    this.#links.show(this.#view, state.pictures === "both" && above === besideIt ? this.#heatmap.rows : undefined);
    byId("scale").replaceChildren(legend(scale, legendLevels(scale.signed), colourOf));
    this.#light(null, null);
    return undefined;
  }

  #name() {
    const kind = this.#given.state.weights;
    return NAMES[kind] ?? kind.replace("-", " ");
  }

  #say(text, model = null) {
    this.#view = null;
    this.#heatmap.clear();
    this.#links.clear();
    byId("readout").textContent = "";
    byId("scale").replaceChildren();
    byId("pictures").hidden = true;
    byId("notice").hidden = false;
    const offered = model && model.attention === null && model.members === 1;
    const show = { type: "button", on: { click: () => this.#events.change("weights", "saliency") } };
    byId("notice").replaceChildren(element("p", {}, text), ...(offered ? [element("button", show, "Show gradient saliency")] : []));
  }

  get #steerable() {
    const { model, state } = this.#given;
    return model.attention !== null && state.weights === "attention" && state.unit === "tokens";
  }

  #pick(row, column) {
    if (this.#steerable) this.#events.pick(row, column);
  }

  #light(row, column) {
    if (!this.#view) return;
    this.#heatmap.light(row, column);
    this.#links.light(row, column);
    const { rows, columns, weights } = this.#view;
    if (row === null && column === null) {
      const steer = this.#steerable ? " Click a cell, or press Enter on it, and the model must attend there." : "";
      byId("readout").textContent = `Point at a cell or a word for its weights.${steer}`;
      return;
    }
    const other = row === null ? rows.map((_, index) => [index, column]) : columns.map((_, index) => [row, index]);
    const pairs = row !== null && column !== null ? [[row, column]] : strongest(other, weights);
    const named = pairs.flatMap(([step, position], index) => {
      const word = isolated(visible(row === null ? rows[step] : columns[position]));
      return [index ? ", " : "", word, element("b", {}, ` ${figure(weights[step][position], 3)}`)];
    });
    const subject = isolated(visible(row === null ? columns[column] : rows[row]));
    byId("readout").replaceChildren(subject, row === null ? " → " : " ← ", ...named);
  }
}

const strongest = (pairs, weights) =>
  pairs.sort(([a, b], [c, d]) => Math.abs(weights[c][d]) - Math.abs(weights[a][b])).slice(0, MOST_NAMED);

// Computes the columns [from, to) that the window of a local attention covers in each row.
function windowsOf({ centres, reach }, length) {
  return centres.map((centre) => {
    const from = Math.max(0, Math.ceil(centre - reach));
    return { from, to: Math.min(length, Math.floor(centre + reach) + 1), centre };
  });
}
