// Makes elements and formats texts and numbers. No function parses HTML, so that texts of users cannot inject elements.

const SVG = "http://www.w3.org/2000/svg";
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
const SPACE = "▁"; // U+2581
const LETTER = /\p{L}/u;

export const byId = (id) => document.getElementById(id);

// Makes an element. `on` holds listeners by event type, `data` holds data attributes. A value whose key is a property of the
// element is set as this property, any other value as an attribute; null, undefined and false are left out.
export function element(name, { on = {}, data = {}, ...values } = {}, ...children) {
  return filled(document.createElement(name), on, data, values, children);
}

// Makes an SVG element. All values are set as attributes.
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

// Makes a text with its own writing direction, which does not affect the text around it.
export const isolated = (text, className = "") => element("bdi", { dir: "auto", className }, text);

// Returns the writing direction of a text, "rtl" or "ltr", which its first letter decides.
export function direction(text) {
  const letter = LETTER.exec(text)?.[0];
  return letter && RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
}

// Replaces characters without a glyph by their code points, because they are invisible or, as U+202E does, reverse the text
// that follows. The joiners U+200C and U+200D stay, because some scripts need them.
export function visible(text) {
  const named = (mark) => `U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  return text.replace(/(?![\u200c\u200d])[\p{Cc}\p{Cf}]/gu, named);
}

// Makes an SVG text whose left edge, middle or right edge is at x, in either writing direction.
export function label(text, x, y, edge = "left", values = {}) {
  const rtl = direction(text) === "rtl";
  const anchor = edge === "middle" ? "middle" : (edge === "left") === rtl ? "end" : "start";
  const attributes = { x, y, "text-anchor": anchor, "unicode-bidi": "isolate", ...values };
  return svg("text", rtl ? { ...attributes, direction: "rtl" } : attributes, ...quietStart(text, svg, "tspan"));
}

// Splits a text that starts with SentencePiece's mark of a space: the mark gets an element of its own, which is drawn paler.
function quietStart(text, make, name) {
  return text.startsWith(SPACE) ? [make(name, { class: "space" }, SPACE), text.slice(1)] : [text];
}

export function piece(text, className) {
  return element("bdi", { dir: "auto", className }, ...quietStart(text, element, "span"));
}

const measuring = document.createElement("canvas").getContext("2d");

// The page's font, read only once: with each call of getComputedStyle the browser updates the styles of changed elements.
let family = "";

// Measures the width of a text in pixels.
export function textWidth(text, size = 13, weight = 400) {
  family ||= getComputedStyle(document.body).fontFamily;
  measuring.font = `${weight} ${size}px ${family}`;
  return measuring.measureText(text).width;
}

// Shortens a text to at most `width` pixels: its longest beginning that fits, and "…".
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

// Formats a number with a real minus sign; "–" stands for a missing value.
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

// Makes `current` the only item of a group that the Tab key reaches (a "roving tabindex").
export function rove(items, current) {
  for (const item of items) item.setAttribute("tabindex", item === current ? "0" : "-1");
}
