// Connects the page's fields and buttons with the session, and shows what the session knows.

import { Alignment } from "./alignment.js";
import { get, keepToken } from "./api.js";
import { Compare } from "./compare.js";
import { byId, element, figure, rove, shortCount } from "./dom.js";
import { picture, saveJson, savePng, saveSvg } from "./export.js";
import { Session } from "./session.js";
import { fragmentOf, hasBeam, MOST_MODELS, readFragment, searchSettings, VIEWS } from "./state.js";
import { showSteerings } from "./steering.js";
import { startTheme } from "./theme.js";
import { showExamples, showProbabilities, showTranslations } from "./translations.js";
import { Tree } from "./tree.js";

const PAUSE = 200; // milliseconds after the last change of a text or setting, before the page asks for a translation
const SOON = "The beam appears here as soon as there is a translation.";
const SETTINGS = ["nbest", "beam_size", "length_penalty", "alpha"];
const given = readFragment(location.hash);
if (given.token) keepToken(given.token);

const session = new Session(given.state, { changed: render, denied: askForToken });
const { state } = session;
const alignment = new Alignment({ pick: (step, position) => session.steer(step, position), change });
const tree = new Tree(
  Object.fromEntries(["box", "detail", "story", "slider", "pruned", "play"].map((part) => [part, byId(`tree-${part}`)])),
);
const compare = new Compare(
  { chooser: byId("compare-chooser"), cards: byId("compare-cards"), status: byId("compare-status") },
  { choose: (names) => change("models", names), open: lookCloser },
);

function delayed(action, wait) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, wait);
  };
}

const remember = delayed(() => history.replaceState(null, "", `#${fragmentOf(state)}`), 300);
const typed = delayed(() => session.restart(), PAUSE);
const typedOwn = delayed(() => {
  session.steering.own.clear();
  if (state.own.trim()) session.shown = "own";
  session.force();
}, PAUSE);

function change(key, value) {
  Object.assign(state, { [key]: value });
  const lacksTree = session.busy || (session.found && !session.found.tree);
  if (key === "view" && value === "beam" && session.model && hasBeam(session.model) && lacksTree) session.search();
  render();
}

function render() {
  const { model, found, errors, hypothesis, shown } = session;
  remember();
  byId("error").textContent = errors.found;
  byId("own-error").textContent = errors.own;
  byId("about").textContent = model ? about(model) : "";
  byId("source-language").textContent = model?.source ?? "";
  byId("target-language").textContent = model?.target ?? "";
  showStatus();
  byId("found").classList.toggle("stale", session.busy || errors.found !== "");
  const select = (index) => {
    [session.selected, session.shown] = [index, "found"];
    render();
  };
  const selected = shown === "found" ? session.selected : -1;
  showTranslations(byId("translations"), found?.hypotheses ?? [], { selected, before: session.before, select });
  showProbabilities(byId("probabilities"), found?.hypotheses[session.selected] ?? null, state.unit);
  showProbabilities(byId("own-probabilities"), session.own, state.unit);
  byId("copy").disabled = !found?.hypotheses.length;
  Object.assign(byId("show-own"), { disabled: !session.own, checked: shown === "own" });
  showSteered("steerings", shown, hypothesis);
  // While the pictures show the user's own translation, a second list has the steerings of the translation found.
  if (shown === "own") showSteered("list-steerings", "found", found?.hypotheses[session.selected]);
  byId("list-steerings").hidden = shown === "found" || !session.steering.found.size;
  byId("compare-steered").hidden = !session.steering.found.size;
  showView();
}

// Lists the steerings of `place`: "found" or "own". Removing one of them also shows the translation of this place.
function showSteered(box, place, hypothesis) {
  const undo = (action) => {
    session.shown = place;
    action();
  };
  showSteerings(byId(box), session.steering[place], {
    tokens: hypothesis?.tokens ?? [],
    sourceTokens: hypothesis?.source_tokens ?? [],
    before: place === "found" ? session.before : null,
    remove: (step) => undo(() => session.unsteer(step)),
    clear: () => undo(() => session.unsteerAll()),
  });
}

function showStatus() {
  const { busy, found, seconds } = session;
  const took = found && seconds !== null ? `${found.hypotheses.length} found in ${figure(seconds)} s` : "";
  byId("status").textContent = busy ? "Translating…" : took;
}

function about(model) {
  const facts = [model.attention ?? "no attention", `${shortCount(model.parameters)} parameters`];
  if (model.members > 1) facts.push(`ensemble of ${model.members}`);
  if (model.score !== null) facts.push(model.score);
  return facts.join(" · ");
}

function showView() {
  const { model, hypothesis, shown, text, found } = session;
  for (const view of VIEWS) {
    byId(view).hidden = view !== state.view;
    byId(`tab-${view}`).setAttribute("aria-selected", String(view === state.view));
  }
  rove(VIEWS.map((view) => byId(`tab-${view}`)), byId(`tab-${state.view}`));
  byId("alignment").dataset.pictures = state.pictures;
  for (const name of ["pictures", "unit"]) {
    for (const radio of document.getElementsByName(name)) radio.checked = radio.value === state[name];
  }
  byId("own-note").hidden = !(model?.latent && shown === "own");
  byId("save-png").hidden = byId("save-svg").hidden = state.view === "compare";
  if (state.view === "alignment") {
    const { subject } = session;
    const given = { model: subject.model, text: subject.text, hypothesis, steering: session.steering[shown], state };
    alignment.show({ ...given, own: shown === "own" });
  } else if (state.view === "beam") {
    if (found?.tree) tree.show(found.tree.steps, found.hypotheses[0].source_tokens, hypothesis?.tokens ?? []);
    else tree.clear();
    byId("tree-none").hidden = Boolean(found?.tree);
    byId("tree-none").textContent = !model || hasBeam(model) ? SOON : "This model's search has no beam.";
    byId("tree").hidden = !found?.tree;
  }
  if (state.view === "compare") compare.show({ models: session.models, names: state.models, text, state });
  else compare.cancel();
}

function lookCloser(name) {
  state.view = "alignment";
  chooseModel(name);
  byId("tab-alignment").focus();
}

function chooseModel(name) {
  state.model = name;
  byId("model").value = name;
  showModel();
  session.restart();
}

// Shows what depends only on the model: the examples and the default settings of the search.
function showModel() {
  const { model } = session;
  const use = (text) => {
    byId("source").value = state.text = text;
    byId("examples-box").open = false;
    session.restart();
  };
  byId("examples-box").open = !state.text.trim();
  showExamples(byId("examples"), model.examples, use);
  byId("nbest").placeholder = String(searchSettings(state, model).nbest);
  byId("beam_size").placeholder = String(model.beam_size ?? "");
  byId("beam_size").max = byId("nbest").max = String(model.max_beam_size);
  byId("alpha").placeholder = String(model.alpha ?? "");
  const own = byId("length_penalty").options[0];
  own.textContent = model.length_penalty ? `the model's (${model.length_penalty})` : "the model's";
}

async function start() {
  try {
    const waiting = (said) => (byId("error").textContent = said);
    const { models, default: standard } = await get("v1/models", { waiting });
    session.models = models;
    if (!session.model) state.model = standard;
    const known = (name) => models.some((model) => model.name === name);
    state.models = state.models.filter(known);
    if (!state.models.length) state.models = models.slice(0, MOST_MODELS / 2).map((model) => model.name);
    byId("model").replaceChildren(...models.map(({ name }) => element("option", { value: name }, name)));
    byId("model").value = state.model;
    byId("token-form").hidden = true;
    showModel();
    session.restart();
  } catch (error) {
    byId("error").textContent = error.message;
    if (error.status === 401) askForToken();
  }
}

function askForToken() {
  byId("token-form").hidden = false;
  byId("token").focus();
}

function showFields() {
  byId("source").value = state.text;
  byId("own").value = state.own;
  for (const name of SETTINGS) byId(name).value = state[name] ?? "";
}

// Calls `later` when the text of a field changes, which becomes state[key].
function typing(id, key, later) {
  const heard = (event) => {
    if (event.isComposing) return; // the user is still composing a word with an input method
    state[key] = byId(id).value;
    later();
  };
  byId(id).addEventListener("input", heard);
  byId(id).addEventListener("compositionend", heard);
}

typing("source", "text", typed);
typing("own", "own", typedOwn);
byId("model").addEventListener("change", () => chooseModel(byId("model").value));
byId("weights").addEventListener("change", () => change("weights", byId("weights").value));
byId("show-own").addEventListener("change", () => {
  session.shown = "own";
  render();
});
byId("copy").addEventListener("click", () => {
  byId("own").value = state.own = session.found.hypotheses[session.selected].text;
  session.steering.own.clear();
  session.shown = "own";
  session.force();
  byId("own").focus();
});
for (const name of SETTINGS) {
  const heard = () => {
    const { value } = byId(name);
    const setting = value === "" ? null : name === "length_penalty" ? value : Number(value);
    if (setting === state[name]) return;
    state[name] = setting;
    typed();
  };
  for (const type of ["input", "change"]) byId(name).addEventListener(type, heard);
}
for (const name of ["pictures", "unit"]) {
  for (const radio of document.getElementsByName(name)) radio.addEventListener("change", () => change(name, radio.value));
}
for (const view of VIEWS) byId(`tab-${view}`).addEventListener("click", () => change("view", view));
byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  change("view", VIEWS[(VIEWS.indexOf(state.view) + step + VIEWS.length) % VIEWS.length]);
  byId(`tab-${state.view}`).focus();
});
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(byId("token").value.trim());
  byId("token").value = "";
  start();
});

function save(write) {
  const shown = state.view === "beam" ? tree : alignment;
  if (!shown.empty) write(picture(...shown.placed()), `${state.model}-${state.view}`);
}

byId("save-png").addEventListener("click", () => save(savePng));
byId("save-svg").addEventListener("click", () => save(saveSvg));
byId("save-json").addEventListener("click", () => {
  const { found, text } = session;
  const data = {
    alignment: () => (alignment.empty ? null : alignment.data),
    beam: () => found && { ...found.subject, model: found.subject.model.name, translations: found.hypotheses, tree: found.tree },
    compare: () => ({ text, translations: compare.data }),
  }[state.view]();
  if (data) saveJson(data, `${state.model}-${state.view}`);
});
byId("share").addEventListener("click", async () => {
  const link = `${location.href.replace(/#.*/s, "")}#${fragmentOf(state)}`;
  try {
    await navigator.clipboard.writeText(link);
    byId("share").textContent = "Copied";
  } catch {
    history.replaceState(null, "", link); // without a clipboard, the user can copy the address of the page
    byId("share").textContent = "See the address";
  }
  setTimeout(() => (byId("share").textContent = "Copy link"), 2000);
});
addEventListener("hashchange", () => {
  const changed = readFragment(location.hash);
  if (changed.token) keepToken(changed.token);
  Object.assign(state, changed.state, { model: changed.state.model || state.model });
  remember();
  showFields();
  start();
});
addEventListener("resize", delayed(showView, 150));
remember(); // replaces the address by one without the token
startTheme(byId("theme"), render);
showFields();
start();
