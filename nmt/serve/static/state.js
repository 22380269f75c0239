// What the page shows, and its copy in the address's fragment, so that a view can be passed on as a link.

export const VIEWS = ["alignment", "beam", "compare"];
export const PICTURES = ["both", "heatmap", "links"];
export const UNITS = ["tokens", "words"];
export const PENALTIES = ["none", "average", "gnmt"];
export const MOST_MODELS = 6; // side by side

const DEFAULTS = {
  text: "",
  own: "",
  model: "", // the service's default
  models: [], // side by side
  view: "alignment",
  pictures: "both",
  unit: "tokens",
  weights: "attention", // or saliency, difference, head-1, ...
  nbest: null, // null: the model's own settings
  beam_size: null,
  length_penalty: null,
  alpha: null,
};

const ALLOWED = { view: VIEWS, pictures: PICTURES, unit: UNITS, length_penalty: PENALTIES };
const NUMBERS = new Set(["nbest", "beam_size", "alpha"]);

// The state that a fragment tells, and the token it may hold. What it does not tell or tells wrongly is the default.
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

// What a request says about the search. An empty n-best list is five, or as many as the beam holds; an empty beam size is the
// model's, or as many as are listed.
export function searchSettings(state, model) {
  const beam = state.beam_size ?? model.beam_size ?? 5;
  const { length_penalty, alpha } = state;
  const nbest = state.nbest ?? Math.min(5, beam);
  const beam_size = state.beam_size ?? (model.length_penalty !== null && nbest > beam ? nbest : null); // beam search alone has a penalty
  return { nbest, beam_size, length_penalty, alpha };
}
