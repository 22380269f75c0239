"use strict";

const MAX_SOURCE_WORDS = 4; // source words that are listed for a target word

// The element under the pointer takes precedence over the focused one.
const ELEMENTS = { mouseover: "target", mouseout: "relatedTarget", focusin: "target", focusout: "relatedTarget" };
for (const [type, property] of Object.entries(ELEMENTS)) {
  document.addEventListener(type, (event) => {
    const find = (selector) => event[property]?.closest?.(selector) ?? document.activeElement?.closest(selector);
    highlightAttention(find("[data-weights]"));
    highlightSystem(find("[data-system]"));
  });
}

// Highlights the source words that a target word attended to, and lists the largest weights.
function highlightAttention(word) {
  for (const element of document.querySelectorAll(".lit")) element.classList.remove("lit");
  for (const element of document.querySelectorAll(".readout")) element.replaceChildren();
  if (!word) return;
  const example = word.closest(".example");
  const source = word.closest(".translation").querySelector(".source") ?? example.querySelector(".source");
  const weights = word.dataset.weights.split(" ").map(Number);
  const words = [...source.children].map((element, index) => ({ element, weight: weights[index] }));
  word.classList.add("lit");
  for (const { element, weight } of words) {
    element.style.setProperty("--weight", `${10 * Math.sqrt(weight)}%`); // the square root makes small weights visible
    element.classList.add("lit");
  }
  const strongest = words.filter(({ weight }) => weight >= 1).sort((a, b) => b.weight - a.weight).slice(0, MAX_SOURCE_WORDS);
  const shares = strongest.flatMap(({ element, weight }, index) => [index ? ", " : "", name(element), ` ${weight} %`]);
  example.querySelector(".readout").replaceChildren(name(word), " ← ", ...shares);
}

// Returns the word's text, isolated from the writing direction of the text around it.
function name(word) {
  const element = document.createElement("bdi");
  element.textContent = word.textContent;
  return element;
}

// Highlights a system in all tables, legends and charts of its comparison.
function highlightSystem(item) {
  for (const element of document.querySelectorAll(".emphasis, .on")) element.classList.remove("emphasis", "on");
  if (!item) return;
  const comparison = item.closest(".comparison");
  comparison.classList.add("emphasis");
  const selector = `[data-system="${item.dataset.system}"]`;
  for (const element of comparison.querySelectorAll(selector)) element.classList.add("on");
}

// The Tab key moves between sentences, the arrow keys between words.
document.addEventListener("keydown", (event) => {
  const word = event.target.closest("[data-weights]");
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!word || !step) return;
  const forward = (step === 1) === (getComputedStyle(word).direction === "ltr");
  const next = forward ? word.nextElementSibling : word.previousElementSibling;
  if (!next) return;
  event.preventDefault();
  word.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// A click on a heading sorts by its column, a second click reverses the order; unknown values stay last.
document.addEventListener("click", (event) => {
  const heading = event.target.closest("th[aria-sort]");
  if (!heading) return;
  const next = { ascending: "descending", descending: "ascending", none: heading.dataset.first };
  const order = next[heading.ariaSort];
  for (const other of heading.parentElement.children) other.ariaSort = other === heading ? order : "none";
  const value = (row) => row.cells[heading.cellIndex].dataset.value;
  const numeric = heading.classList.contains("number");
  const number = (text) => (text === "inf" ? Infinity : Number(text));
  const compare = (a, b) => (numeric ? Math.sign(number(a) - number(b)) || 0 : a.localeCompare(b, "en", { numeric: true }));
  const sign = order === "ascending" ? 1 : -1;
  const body = heading.closest("table").tBodies[0];
  const rows = [...body.rows].sort((first, second) => {
    const [a, b] = [value(first), value(second)];
    return a === undefined || b === undefined ? (a === undefined) - (b === undefined) : sign * compare(a, b);
  });
  body.append(...rows);
});
