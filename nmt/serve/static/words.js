// Merges sub-words (pieces) to words by the rules of nmt/data/word_alignment.py.

const START = "▁"; // SentencePiece's mark of a space
const END = "</s>";
const UNKNOWN = "<unk>";

// Returns the index of the word that each piece belongs to. A word starts at a piece that begins with "▁", at "</s>" and after
// "</s>". "<unk>" is a word by itself. A lone "▁" belongs to the piece that follows. A piece with "▁" inside spans several words:
// it gets the index of the first one, and the index after it grows by one for each "▁" inside.
export function wordsOfPieces(pieces) {
  const words = [];
  pieces.forEach((piece, index) => {
    if (!index) return words.push(0);
    const previous = pieces[index - 1];
    const alone = [previous, piece].some((each) => each === END || each === UNKNOWN);
    const starts = previous !== START && (piece.startsWith(START) || alone);
    const inside = Array.from(previous).slice(1).filter((character) => character === START).length;
    return words.push(words[index - 1] + inside + Number(starts));
  });
  return words;
}

// Returns the texts that stand for pieces. If each "▁" is a piece of its own, the pieces are characters, and "▁" becomes "␣".
// Whole words have no "▁" beside a side of single characters, because no piece of such a pair continues a word.
export function pieceTexts(pieces, others) {
  if (pieces.every((piece) => piece === START || !piece.includes(START))) return pieces.map((piece) => (piece === START ? "␣" : piece));
  const whole = pieces.every((piece) => piece.startsWith(START) || piece === END || piece === UNKNOWN);
  return whole && areLetters(others) ? pieces.map((piece) => piece.replace(START, "")) : pieces;
}

// Is each text at most a letter with a mark, or "</s>"?
export const areLetters = (texts) => texts.every((text) => text === END || Array.from(text).length <= 2);

// Returns the text of each word.
export function wordTexts(pieces) {
  const membership = wordsOfPieces(pieces);
  const texts = Array.from({ length: count(membership) }, () => "");
  pieces.forEach((piece, index) => (texts[membership[index]] += piece.replaceAll(START, " ")));
  return texts.map((text) => text.trim());
}

// Merges the weights of pieces (T, S) to weights of words: sums over the pieces of a source word, and means over the pieces of
// a target word. If the rows of the pieces sum to 1, so do the rows of the words.
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

// Sums the log-probabilities of the pieces of each word.
export function sumToWords(values, pieces) {
  const membership = wordsOfPieces(pieces);
  const sums = new Array(count(membership)).fill(0);
  values.forEach((value, index) => (sums[membership[index]] += value));
  return sums;
}

const count = (membership) => (membership.length ? membership[membership.length - 1] + 1 : 0);
