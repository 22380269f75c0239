// Saves the picture shown as an SVG or PNG file, or its data as a JSON file.

import { svg } from "./dom.js";

// A file has no style sheet, so these computed styles of each element are written into it as attributes.
const LOOKS = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "opacity"];
const TEXT_LOOKS = ["font-family", "font-size", "font-weight", "font-style"];
const LONGEST_SIDE = 8000; // pixels of the longer side of a PNG
const MARGIN = 16; // pixels

// Makes an SVG that looks the same outside the page: copies of SVG nodes, [{ node, x, y }], on the page's background. Together
// they are `width` by `height` pixels.
export function picture(placed, width, height) {
  const size = { width: width + 2 * MARGIN, height: height + 2 * MARGIN };
  const ground = resolved("--paper");
  const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", ...size, viewBox: `0 0 ${size.width} ${size.height}` });
  root.append(svg("rect", { ...size, fill: ground }));
  for (const { node, x, y } of placed) {
    const copy = node.cloneNode(true);
    lookLike(copy, node);
    for (const name of ["class", "style", "aria-hidden", "role", "tabindex"]) copy.removeAttribute(name);
    copy.setAttribute("x", x + MARGIN);
    copy.setAttribute("y", y + MARGIN);
    root.append(copy);
  }
  return root;
}

function lookLike(copy, original) {
  const style = getComputedStyle(original);
  const isText = original.localName === "text" || original.localName === "tspan";
  if (original.localName !== "svg" && original.localName !== "g") {
    for (const name of isText ? [...LOOKS, ...TEXT_LOOKS] : LOOKS) {
      if (style.getPropertyValue(name) !== "") copy.setAttribute(name, style.getPropertyValue(name));
    }
  } else if (original.localName === "g" && style.opacity !== "1") copy.setAttribute("opacity", style.opacity);
  for (const name of ["class", "tabindex", "role", "aria-label", "aria-selected"]) copy.removeAttribute(name);
  [...original.children].forEach((child, index) => lookLike(copy.children[index], child));
}

function resolved(variable) {
  const probe = document.createElement("i");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

const markup = (root) => `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(root)}\n`;

export function saveSvg(root, name) {
  save(new Blob([markup(root)], { type: "image/svg+xml" }), `${name}.svg`);
}

export function saveJson(value, name) {
  save(new Blob([`${JSON.stringify(value, null, 1)}\n`], { type: "application/json" }), `${name}.json`);
}

// Saves a PNG with two pixels for each pixel of the page, or fewer if the picture is very large.
export async function savePng(root, name) {
  const [width, height] = [Number(root.getAttribute("width")), Number(root.getAttribute("height"))];
  const scale = Math.min(2, LONGEST_SIDE / Math.max(width, height));
  const address = URL.createObjectURL(new Blob([markup(root)], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [Math.ceil(width * scale), Math.ceil(height * scale)];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    save(blob, `${name}.png`);
  } finally {
    URL.revokeObjectURL(address);
  }
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
