// Colours of weights. Equal steps of a weight look about equally large, because they are equal steps in the colour space
// OKLCH (Ottosson 2020). Weight 0 has the page's colour.

const LEVELS = 64; // number of levels between 0 and the largest weight; cells of one level are drawn as one path

// Encodes linear light as an sRGB value, both from 0 to 1.
const TRANSFER = (value) => (value <= 0.0031308 ? 12.92 * value : 1.055 * value ** (1 / 2.4) - 0.055);

// [lightness, chroma, hue in degrees] at 0, at half of the largest weight and at the largest weight, by theme.
const SEQUENTIAL = {
  light: [[0.99, 0.003, 250], [0.7, 0.12, 245], [0.36, 0.13, 275]],
  dark: [[0.25, 0.012, 265], [0.56, 0.14, 255], [0.93, 0.09, 200]],
};
// The same for weights below 0.
const BELOW = {
  light: [[0.99, 0.003, 60], [0.74, 0.13, 55], [0.42, 0.13, 35]],
  dark: [[0.25, 0.012, 265], [0.58, 0.13, 45], [0.9, 0.11, 85]],
};

// Converts a colour from OKLCH to hexadecimal sRGB.
function hex([lightness, chroma, hue]) {
  const angle = (hue * Math.PI) / 180;
  const [a, b] = [chroma * Math.cos(angle), chroma * Math.sin(angle)];
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  const bytes = linear.map((value) => Math.round(255 * Math.min(1, Math.max(0, TRANSFER(Math.max(0, value))))));
  return `#${bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

function along([low, middle, high], share) {
  const [from, to, part] = share < 0.5 ? [low, middle, 2 * share] : [middle, high, 2 * share - 1];
  return hex(from.map((value, index) => value + part * (to[index] - value)));
}

export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// Makes the scale of these weights, from 0 (from -max if there are negative weights) to max. `level` maps a weight to its level,
// -LEVELS to LEVELS, and `colour` maps a level to its colour.
export function scaleOf(weights) {
  let [low, high] = [0, 0];
  for (const row of weights) {
    for (const weight of row) [low, high] = [Math.min(low, weight), Math.max(high, weight)];
  }
  const max = Math.max(0.1, Math.ceil(10 * Math.max(high, -low) - 1e-6) / 10);
  const signed = low < -1e-9;
  const level = (weight) => Math.round(LEVELS * Math.min(1, Math.max(-1, weight / max)));
  return { max, signed, level, colour: colourOf };
}

export function colourOf(level) {
  const theme = isDark() ? "dark" : "light";
  return along((level < 0 ? BELOW : SEQUENTIAL)[theme], Math.abs(level) / LEVELS);
}

// Returns the levels of a legend's fields, from left to right.
export function legendLevels(signed, steps = 32) {
  const from = signed ? -LEVELS : 0;
  return Array.from({ length: steps }, (_, index) => Math.round(from + ((LEVELS - from) * index) / (steps - 1)));
}
