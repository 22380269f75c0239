"use strict";

const MOST_WORDS = 4; // that are named of what a word attended to

// What the pointer is on comes first, then what the keyboard has come to.
const PLACES = { mouseover: "target", mouseout: "relatedTarget", focusin: "target", focusout: "relatedTarget" };
for (const [type, place] of Object.entries(PLACES)) {
  document.addEventListener(type, (event) => {
    const find = (selector) => event[place]?.closest?.(selector) ?? document.activeElement?.closest(selector);
    light(find("[data-weights]"));
    emphasise(find("[data-system]"));
  });
}

// Lights up what the word of a translation attended to, and tells its shares.
function light(word) {
  for (const each of document.querySelectorAll(".lit")) each.classList.remove("lit");
  for (const each of document.querySelectorAll(".readout")) each.replaceChildren();
  if (!word) return;
  const example = word.closest(".example");
  const source = word.closest(".translation").querySelector(".source") ?? example.querySelector(".source");
  const weights = word.dataset.weights.split(" ").map(Number);
  const words = [...source.children].map((element, index) => ({ element, weight: weights[index] }));
  word.classList.add("lit");
  for (const { element, weight } of words) {
    element.style.setProperty("--weight", `${10 * Math.sqrt(weight)}%`); // its root, for weak ones to be seen, too
    element.classList.add("lit");
  }
  const strongest = words.filter(({ weight }) => weight >= 1).sort((a, b) => b.weight - a.weight).slice(0, MOST_WORDS);
  const shares = strongest.flatMap(({ element, weight }, index) => [index ? ", " : "", name(element), ` ${weight} %`]);
  example.querySelector(".readout").replaceChildren(name(word), " ← ", ...shares);
}

// Its text, whose direction does not affect what stands around it.
function name(word) {
  const element = document.createElement("bdi");
  element.textContent = word.textContent;
  return element;
}

// Sets a system off from the others of its comparison, in tables, legends and charts.
function emphasise(item) {
  for (const each of document.querySelectorAll(".emphasis, .on")) each.classList.remove("emphasis", "on");
  if (!item) return;
  const comparison = item.closest(".comparison");
  comparison.classList.add("emphasis");
  for (const each of comparison.querySelectorAll(`[data-system="${item.dataset.system}"]`)) each.classList.add("on");
}

// A sentence is one stop of the Tab key; the arrows go on from word to word.
document.addEventListener("keydown", (event) => {
  const word = event.target.closest("[data-weights]");
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!word || !step) return;
  const onward = (step === 1) === (getComputedStyle(word).direction === "ltr");
  const next = onward ? word.nextElementSibling : word.previousElementSibling;
  if (!next) return;
  event.preventDefault();
  word.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// A heading sorts by its column, once more the other way round; what is unknown stays last.
document.addEventListener("click", (event) => {
  const heading = event.target.closest("th[aria-sort]");
  if (!heading) return;
  const turned = { ascending: "descending", descending: "ascending", none: heading.dataset.first };
  const order = turned[heading.ariaSort];
  for (const each of heading.parentElement.children) each.ariaSort = each === heading ? order : "none";
  const value = (row) => row.cells[heading.cellIndex].dataset.value;
  const numeric = heading.classList.contains("number");
  const compare = (a, b) => (numeric ? a - b : a.localeCompare(b, "en", { numeric: true }));
  const sign = order === "ascending" ? 1 : -1;
  const body = heading.closest("table").tBodies[0];
  const rows = [...body.rows].sort((first, second) => {
    const [a, b] = [value(first), value(second)];
    return a === undefined || b === undefined ? (a === undefined) - (b === undefined) : sign * compare(a, b);
  });
  body.append(...rows);
});
