// The session asks the service for translations and keeps its answers: the translations found by a search ("found"), the scores
// of the translation that the user has typed ("own"), and the steerings of both.

import { Latest, post } from "./api.js";
import { hasBeam, searchSettings } from "./state.js";
import { Steering } from "./steering.js";

const oneLine = (text) => text.replace(/\s+/g, " ").trim();

export class Session {
  models = [];
  state;
  found = null; // { hypotheses, tree, subject }; subject is the { model, text } of the request
  selected = 0; // index of the selected hypothesis in found.hypotheses
  own = null; // hypothesis with the text that the user has typed, and its subject
  shown = "found"; // whether the pictures show a translation found ("found") or the user's ("own")
  before = null; // text of the translation found, before it was steered
  steering = { found: new Steering(), own: new Steering() };
  busy = false;
  errors = { found: "", own: "" };
  seconds = null; // duration of the last search
  #latest = { found: new Latest(), own: new Latest() };
  #kept = { prefix: null, attend: null };
  #changed;
  #denied;

  // Calls `changed()` after every change of the session, and `denied(error)` when the service needs a token.
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

  // The model and source text of the translation that the pictures show. They may be older than those of the page, until a new
  // answer comes.
  get subject() {
    return (this.shown === "own" ? this.own : this.found)?.subject ?? this;
  }

  // Whether the translation that the pictures show is of the page's present text and model.
  get current() {
    return this.subject.text === this.text && this.subject.model === this.model;
  }

  // Asks for all translations again, after text, model or settings have changed. Removes the steerings of the old translations.
  async restart() {
    this.steering.found.clear();
    this.steering.own.clear();
    this.before = null;
    this.#kept = { prefix: null, attend: null };
    await Promise.all([this.search(), this.force()]);
  }

  // Searches for translations of the page's text. Returns false after an error.
  async search() {
    const { model, state, text } = this;
    if (!model || !text) {
      this.#latest.found.cancel();
      [this.found, this.busy, this.errors.found, this.selected, this.seconds] = [null, false, "", 0, null];
      this.#changed();
      return true;
    }
    const wanted = { alignment: model.attention !== null, tree: state.view === "beam" && hasBeam(model) };
    const body = { text, model: model.name, ...searchSettings(state, model), ...wanted, ...this.#kept };
    const began = performance.now();
    this.busy = true;
    this.#changed();
    const answer = await this.#ask("found", "v1/translate", body);
    if (answer === undefined) return true;
    this.busy = false;
    if (answer) {
      const old = this.found?.subject;
      const hypotheses = answer.translations[0];
      const same = old?.text === text && old.model === model && this.selected < hypotheses.length;
      if (!same) this.selected = 0;
      this.found = { hypotheses, tree: answer.tree, subject: { model, text } };
      this.seconds = (performance.now() - began) / 1000;
    }
    this.#changed();
    return answer !== null;
  }

  // Scores the translation that the user has typed (forced decoding). Returns false after an error.
  async force() {
    const { model, text } = this;
    const target = oneLine(this.state.own);
    if (!model || !text || !target) {
      this.#latest.own.cancel();
      [this.own, this.errors.own, this.shown] = [null, "", "found"];
      this.#changed();
      return true;
    }
    const body = { text, model: model.name, target, alignment: model.attention !== null, attend: this.steering.own.attend };
    const answer = await this.#ask("own", "v1/translate", body);
    if (answer === undefined) return true;
    if (answer) this.own = { ...answer.translations[0][0], subject: { model, text } };
    else if (!this.steering.own.size) [this.own, this.shown] = [null, "found"];
    this.#changed();
    return answer !== null;
  }

  // Steers a step of the translation shown to a source position, or removes this steering if it exists already.
  steer(step, position) {
    const steering = this.steering[this.shown];
    if (steering.has(step, position)) return this.unsteer(step);
    return this.#resteer(step, () => steering.add(step, position, this.shown === "own"));
  }

  unsteer(step) {
    return this.#resteer(step, () => this.steering[this.shown].remove(step));
  }

  unsteerAll() {
    return this.#resteer(0, () => this.steering[this.shown].clear());
  }

  // Changes the steering of `step` and asks for the new translation. If the service refuses it, everything is restored. A
  // translation of an older text or model cannot be steered.
  async #resteer(step, change) {
    if (!this.current) return;
    const { shown, hypothesis } = this;
    const steering = this.steering[shown];
    const old = { cells: steering.cells, before: this.before, kept: this.#kept, selected: this.selected };
    change();
    if (shown === "found") {
      this.before = steering.size ? (this.before ?? hypothesis.text) : null;
      this.#kept = steering.request(step, hypothesis.tokens);
      this.selected = 0;
    }
    if ((await (shown === "own" ? this.force() : this.search())) !== false) return;
    steering.cells = old.cells;
    [this.before, this.#kept, this.selected] = [old.before, old.kept, old.selected];
    this.#changed();
  }

  // Sends a request. Returns its answer, null after an error, or undefined if the answer is no longer wanted.
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
