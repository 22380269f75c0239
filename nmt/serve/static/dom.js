// Elements, texts of strangers and figures. Text only ever becomes text: nothing here reads HTML.

const SVG = "http://www.w3.org/2000/svg";
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
const SPACE = "▁"; // U+2581
const LETTER = /\p{L}/u;

export const byId = (id) => document.getElementById(id);

// An element: `on` holds listeners, `data` the data attributes, keys of DOM properties are set, all others are attributes.
export function element(name, { on = {}, data = {}, ...values } = {}, ...children) {
  return filled(document.createElement(name), on, data, values, children);
}

export function svg(name, { on = {}, data = {}, ...values } = {}, ...children) {
  return filled(document.createElementNS(SVG, name), on, data, values, children);
}

function filled(node, on, data, values, children) {
  for (const [type, listener] of Object.entries(on)) node.addEventListener(type, listener);
  Object.assign(node.dataset, data);
  for (const [key, value] of Object.entries(values)) {
    if (value === undefined || value === null || value === false) continue;
    if (key in node && !(node instanceof SVGElement)) node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// A text that keeps its own writing direction and lends it to nobody.
export const isolated = (text, className = "") => element("bdi", { dir: "auto", className }, text);

// "rtl" or "ltr", by the first letter.
export function direction(text) {
  const letter = LETTER.exec(text)?.[0];
  return letter && RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
}

// Marks that have no glyph (U+202E turns all that follows around) are named; joiners stay, scripts need them.
export function visible(text) {
  const named = (mark) => `U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  return text.replace(/(?![\u200c\u200d])[\p{Cc}\p{Cf}]/gu, named);
}

// An SVG text whose left, middle or right edge is at x, whatever its writing direction.
export function label(text, x, y, edge = "left", values = {}) {
  const rtl = direction(text) === "rtl";
  const anchor = edge === "middle" ? "middle" : (edge === "left") === rtl ? "end" : "start";
  const attributes = { x, y, "text-anchor": anchor, "unicode-bidi": "isolate", ...values };
  return svg("text", rtl ? { ...attributes, direction: "rtl" } : attributes, ...quietStart(text, svg, "tspan"));
}

// SentencePiece's mark of a space should be seen, but not before the word.
function quietStart(text, make, name) {
  return text.startsWith(SPACE) ? [make(name, { class: "space" }, SPACE), text.slice(1)] : [text];
}

export function piece(text, className) {
  return element("bdi", { dir: "auto", className }, ...quietStart(text, element, "span"));
}

const measuring = document.createElement("canvas").getContext("2d");

let family = ""; // asked for once: each question makes the browser compute the styles of all that has changed

export function textWidth(text, size = 13, weight = 400) {
  family ||= getComputedStyle(document.body).fontFamily;
  measuring.font = `${weight} ${size}px ${family}`;
  return measuring.measureText(text).width;
}

// The text, or its beginning and "…" where it is wider.
export function fitted(text, width, size = 13) {
  if (textWidth(text, size) <= width) return text;
  const characters = Array.from(text);
  let [low, high] = [0, characters.length];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (textWidth(`${characters.slice(0, middle).join("")}…`, size) <= width) low = middle;
    else high = middle - 1;
  }
  return `${characters.slice(0, low).join("")}…`;
}

// Figures with a real minus sign.
export function figure(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  return value.toFixed(digits).replace(/^-(?=.*[1-9])/, "−").replace(/^-/, "");
}

export function shortCount(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  return value >= 1e3 ? `${Math.round(value / 1e3)} k` : String(value);
}

export function probability(value) {
  if (value >= 0.995) return value > 0.9999 ? "100 %" : `${(100 * value).toFixed(1)} %`;
  if (value < 0.001) return "< 0.1 %";
  return value >= 0.1 ? `${Math.round(100 * value)} %` : `${(100 * value).toPrecision(2)} %`;
}

// One element of a group is in the tab order, the last one that had the focus.
export function rove(items, current) {
  for (const item of items) item.setAttribute("tabindex", item === current ? "0" : "-1");
}
