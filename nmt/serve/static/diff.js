// Finds and marks the words in which two translations differ: those outside their longest common subsequence.

const segmenter = globalThis.Intl?.Segmenter ? new Intl.Segmenter(undefined, { granularity: "word" }) : null;
const NO_SPACES = /[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]/;

// Splits a text into the parts that are compared: words with the white space around them. Texts in scripts that are written
// without spaces are split into the words that the browser finds in its dictionary.
export function parts(text) {
  const spaced = text.match(/\s*\S+\s*/g) ?? [];
  if (!segmenter) return spaced;
  return spaced.flatMap((part) => (NO_SPACES.test(part) ? Array.from(segmenter.segment(part), (each) => each.segment) : [part]));
}

// Returns for each part of a and of b whether it is outside their longest common subsequence.
export function differences(a, b) {
  const [left, right] = [a.map((part) => part.trim()), b.map((part) => part.trim())];
  const width = right.length + 1;
  // lengths[i * width + j]: length of the longest common subsequence of left.slice(i) and right.slice(j).
  const lengths = new Uint32Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i -= 1) {
    for (let j = right.length - 1; j >= 0; j -= 1) {
      const longer = Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
      lengths[i * width + j] = left[i] === right[j] ? lengths[(i + 1) * width + j + 1] + 1 : longer;
    }
  }
  const marks = [left.map(() => true), right.map(() => true)];
  for (let i = 0, j = 0; i < left.length && j < right.length; ) {
    if (left[i] === right[j]) [marks[0][i++], marks[1][j++]] = [false, false];
    else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return marks;
}

// Makes the nodes of a text, with its marked parts in <mark> elements.
export function marked(text, marks) {
  return parts(text).flatMap((part, index) => {
    if (!marks[index]) return [document.createTextNode(part)];
    const mark = document.createElement("mark");
    const [, before, word, after] = /^(\s*)(.*?)(\s*)$/su.exec(part);
    mark.textContent = word;
    return [document.createTextNode(before), mark, document.createTextNode(after)];
  });
}
