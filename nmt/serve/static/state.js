// The state of the page, and its copy in the fragment of the address, so that a link opens the page in the same state.

export const VIEWS = ["alignment", "beam", "compare"];
export const PICTURES = ["both", "heatmap", "links"];
export const UNITS = ["tokens", "words"];
export const PENALTIES = ["none", "average", "gnmt"];
export const MOST_MODELS = 6; // models that can be shown side by side

const DEFAULTS = {
  text: "",
  own: "",
  model: "", // name; "" is the service's default model
  models: [], // names of the models that are shown side by side
  view: "alignment",
  pictures: "both",
  unit: "tokens",
  weights: "attention", // or "saliency", "difference", "head-1", ...
  nbest: null, // null in this and the next three keys lets searchSettings choose the value
  beam_size: null,
  length_penalty: null,
  alpha: null,
};

const ALLOWED = { view: VIEWS, pictures: PICTURES, unit: UNITS, length_penalty: PENALTIES };
const NUMBERS = new Set(["nbest", "beam_size", "alpha"]);

// Reads the state from a fragment, and the token if there is one. Values that are missing or not allowed become the default.
export function readFragment(fragment) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const state = { ...DEFAULTS };
  for (const key of Object.keys(DEFAULTS)) {
    const value = given.get(key);
    if (value === null || (ALLOWED[key] && !ALLOWED[key].includes(value))) continue;
    if (NUMBERS.has(key)) state[key] = Number.isFinite(Number(value)) && value !== "" ? Number(value) : null;
    else if (key === "models") state.models = given.getAll(key).slice(0, MOST_MODELS);
    else state[key] = value;
  }
  return { state, token: given.get("token") };
}

export function fragmentOf(state) {
  const written = new URLSearchParams();
  for (const [key, standard] of Object.entries(DEFAULTS)) {
    const value = state[key];
    if (key === "models") for (const name of value) written.append(key, name);
    else if (value !== standard && value !== null && value !== "") written.set(key, value);
  }
  return String(written);
}

// Makes the search settings of a request. If the state has no nbest, nbest is 5, or the beam size if that is smaller. If the
// state has no beam size, beam_size is null, which means the model's setting, or nbest if the n-best list needs a larger beam.
export function searchSettings(state, model) {
  const beam = state.beam_size ?? model.beam_size ?? 5;
  const { length_penalty, alpha } = state;
  const nbest = state.nbest ?? Math.min(5, beam);
  // Only models with beam search have a length penalty, and only they take a beam size.
  const beam_size = state.beam_size ?? (hasBeam(model) && nbest > beam ? nbest : null);
  return { nbest, beam_size, length_penalty, alpha };
}

// Does the model search with a beam? Other searches have no tree.
export function hasBeam(model) {
  return model.length_penalty !== null;
}
