// What is asked of the service, and what is known: translations found, the translation of one's own, steerings of both.

import { Latest, post } from "./api.js";
import { searchSettings } from "./state.js";
import { Steering } from "./steering.js";

const oneLine = (text) => text.replace(/\s+/g, " ").trim();

export class Session {
  models = [];
  state;
  found = null; // { hypotheses, tree, subject }
  selected = 0; // of the hypotheses
  own = null; // a hypothesis with the text of one's own, and { model, text } that it was scored with
  shown = "found"; // or "own": which of them the pictures show
  before = null; // the text of the translation before it was steered
  steering = { found: new Steering(), own: new Steering() };
  busy = false;
  errors = { found: "", own: "" };
  seconds = null; // that the last search took
  #latest = { found: new Latest(), own: new Latest() };
  #kept = { prefix: null, attend: null };
  #changed;
  #denied;

  // `changed()` hears of every news, `denied(error)` that a token is needed.
  constructor(state, { changed, denied }) {
    this.state = state;
    this.#changed = changed;
    this.#denied = denied;
  }

  get model() {
    return this.models.find(({ name }) => name === this.state.model) ?? null;
  }

  get text() {
    return oneLine(this.state.text);
  }

  // The translation that the pictures show, or null.
  get hypothesis() {
    return this.shown === "own" ? this.own : (this.found?.hypotheses[this.selected] ?? null);
  }

  // The model and the text that this translation is of; while newer ones are on their way they are not the page's.
  get subject() {
    return (this.shown === "own" ? this.own : this.found)?.subject ?? this;
  }

  // Text, model or settings have changed, so that steerings mean nothing any more.
  async restart() {
    this.steering.found.clear();
    this.steering.own.clear();
    this.before = null;
    this.#kept = { prefix: null, attend: null };
    await Promise.all([this.search(), this.force()]);
  }

  async search() {
    const { model, state, text } = this;
    if (!model || !text) {
      this.#latest.found.cancel();
      [this.found, this.busy, this.errors.found, this.selected, this.seconds] = [null, false, "", 0, null];
      this.#changed();
      return;
    }
    const wanted = { alignment: model.attention !== null, tree: state.view === "beam" };
    const body = { text, model: model.name, ...searchSettings(state, model), ...wanted, ...this.#kept };
    const began = performance.now();
    this.busy = true;
    this.#changed();
    const answer = await this.#ask("found", "v1/translate", body);
    if (answer === undefined) return;
    this.busy = false;
    if (answer) {
      this.found = { hypotheses: answer.translations[0], tree: answer.tree, subject: { model, text } };
      this.selected = Math.min(this.selected, Math.max(0, this.found.hypotheses.length - 1));
      this.seconds = (performance.now() - began) / 1000;
    }
    this.#changed();
  }

  // Forced decoding of the text of one's own.
  async force() {
    const { model, text } = this;
    const target = oneLine(this.state.own);
    if (!model || !text || !target) {
      this.#latest.own.cancel();
      [this.own, this.errors.own, this.shown] = [null, "", "found"];
      this.#changed();
      return;
    }
    const body = { text, model: model.name, target, alignment: model.attention !== null, attend: this.steering.own.attend };
    const answer = await this.#ask("own", "v1/translate", body);
    if (answer === undefined) return;
    this.own = answer ? { ...answer.translations[0][0], subject: { model, text } } : null;
    if (!this.own) this.shown = "found";
    this.#changed();
  }

  // Steers the translation shown, or takes a steering back that is there already.
  async steer(step, position) {
    const steering = this.steering[this.shown];
    if (steering.has(step, position)) return this.unsteer(step);
    if (this.shown === "own") {
      steering.add(step, position, true);
      return this.force();
    }
    this.before ??= this.hypothesis.text;
    steering.add(step, position, false);
    return this.#research(step);
  }

  async unsteer(step) {
    this.steering[this.shown].remove(step);
    return this.shown === "own" ? this.force() : this.#research(step);
  }

  async unsteerAll() {
    this.steering[this.shown].clear();
    return this.shown === "own" ? this.force() : this.#research(0);
  }

  async #research(step) {
    this.#kept = this.steering.found.request(step, this.hypothesis.tokens);
    if (!this.steering.found.size) this.before = null;
    this.selected = 0;
    return this.search();
  }

  // null after an error, undefined if the answer is no longer wanted.
  async #ask(place, path, body) {
    const waiting = (said) => {
      this.errors[place] = said;
      this.#changed();
    };
    try {
      const answer = await this.#latest[place].run((signal) => post(path, body, { signal, waiting }));
      if (answer) this.errors[place] = "";
      return answer;
    } catch (error) {
      if (error.status === 401) this.#denied(error);
      this.errors[place] = error.message;
      return null;
    }
  }
}
