// Sub-words and words, by the rules of nmt/data/word_alignment.py.

const START = "▁"; // SentencePiece's mark of a space
const END = "</s>";
const UNKNOWN = "<unk>";

// The index of the word that each piece belongs to. A word starts at "▁", at "</s>" and after it; "<unk>" is one of its own;
// a lone "▁" belongs to what follows; a "▁" inside a piece counts as a word more.
export function wordsOfPieces(pieces) {
  const words = [];
  pieces.forEach((piece, index) => {
    if (!index) return words.push(0);
    const previous = pieces[index - 1];
    const unknown = previous === UNKNOWN || (piece === UNKNOWN && previous !== START);
    const starts = piece.startsWith(START) || piece === END || previous === END || unknown;
    const inside = Array.from(previous).slice(1).filter((character) => character === START).length;
    return words.push(words[index - 1] + inside + Number(starts));
  });
  return words;
}

// The texts of the words.
export function wordTexts(pieces) {
  const membership = wordsOfPieces(pieces);
  const texts = Array.from({ length: count(membership) }, () => "");
  pieces.forEach((piece, index) => (texts[membership[index]] += piece.replaceAll(START, " ")));
  return texts.map((text) => text.trim());
}

// (T, S) of pieces -> (T, S) of words: sums over a source word's pieces, means over a target word's. Rows keep their sum.
export function mergeToWords(weights, targetPieces, sourcePieces) {
  const target = wordsOfPieces(targetPieces);
  const source = wordsOfPieces(sourcePieces);
  const merged = Array.from({ length: count(target) }, () => new Array(count(source)).fill(0));
  const sizes = new Array(merged.length).fill(0);
  target.forEach((word) => (sizes[word] += 1));
  weights.forEach((row, step) =>
    row.forEach((weight, position) => (merged[target[step]][source[position]] += weight / sizes[target[step]])),
  );
  return merged;
}

// Log-probabilities of pieces -> of words, which are sums.
export function sumToWords(values, pieces) {
  const membership = wordsOfPieces(pieces);
  const sums = new Array(count(membership)).fill(0);
  values.forEach((value, index) => (sums[membership[index]] += value));
  return sums;
}

const count = (membership) => (membership.length ? membership[membership.length - 1] + 1 : 0);

export { END };
