// The list of translations found, the probabilities of the words of one translation, and the list of examples.

import { differences, marked, parts } from "./diff.js";
import { element, figure, isolated, piece, probability, visible } from "./dom.js";
import { pieceTexts, sumToWords, wordTexts } from "./words.js";

// Shows the n-best list as radio buttons. Words that differ from the text `before` are marked, unless it is null.
export function showTranslations(box, hypotheses, { selected, before, select }) {
  const focused = box.contains(document.activeElement);
  const items = hypotheses.map((hypothesis, index) => {
    const radio = element("input", {
      type: "radio",
      name: "shown",
      value: String(index),
      checked: index === selected,
      on: { change: () => select(index) },
    });
    const marks = before === null ? [] : differences(parts(before), parts(hypothesis.text))[1];
    const text = element("bdi", { dir: "auto", className: "text" }, marked(hypothesis.text, marks));
    const score = element("span", { className: "score", title: "score: log-probability / length penalty" }, figure(hypothesis.score, 3));
    return element("label", { className: "translation" }, radio, text, score);
  });
  box.replaceChildren(...items);
  if (focused) box.querySelector(":checked")?.focus();
}

// Shows each word (or sub-word) above its probability, and figures of the whole translation.
export function showProbabilities(box, hypothesis, unit) {
  if (!hypothesis) {
    box.replaceChildren();
    return;
  }
  const { tokens, token_log_probs: pieces, log_prob: total } = hypothesis;
  const texts = unit === "words" ? wordTexts(tokens) : pieceTexts(tokens, hypothesis.source_tokens);
  const values = unit === "words" ? sumToWords(pieces, tokens) : pieces;
  const words = texts.map((text, index) => {
    const share = Math.exp(values[index]);
    const bar = element("span", { className: "bar" });
    bar.style.setProperty("--share", `${100 * share}%`);
    const word = element("span", { className: "word", role: "listitem" });
    word.title = `log-probability ${figure(values[index], 3)}`;
    word.append(piece(visible(text), "token"), bar, element("span", { className: "probability" }, probability(share)));
    word.classList.toggle("unlikely", share < 0.1);
    return word;
  });
  const direction = { dir: "auto", role: "list", className: "words", "aria-label": "probability of each word" };
  const facts = [
    ["log-probability", figure(total, 3)],
    ["perplexity", figure(Math.exp(-total / Math.max(1, tokens.length)))],
    ["sub-words", String(tokens.length)],
  ];
  const list = facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  box.replaceChildren(element("div", direction, words), element("dl", { className: "facts" }, list));
}

// Shows example sentences as buttons. Calls `choose(text)` when the user clicks one.
export function showExamples(box, examples, choose) {
  const buttons = examples.map((text) =>
    element("button", { type: "button", className: "example", on: { click: () => choose(text) } }, isolated(text)),
  );
  box.replaceChildren(...buttons);
  box.parentElement.hidden = !examples.length;
}
