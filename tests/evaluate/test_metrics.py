"""Scores of texts, of stored statistics and of sums of statistics equal those of sacreBLEU."""

import random
import unicodedata
from pathlib import Path

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from nmt.config.errors import UserError
from nmt.evaluate.metrics import METRICS, ScoreSettings, count, score, score_by_length, tokenizer_for

ENGLISH = (
    ["The cat sat on the Mat.", "He didn't say: 'no' (twice)!", "A red car stops here , now .", ""],
    ["The cat sat on the mat.", "He did not say 'no' twice!", "The red car stops here, now.", "Nothing at all."],
)
CHINESE = (["我们今天去学校。", "这本书很好看、对吗。"], ["我们今天去了学校。", "这本书很好看、是吗。"])
MIXED_13A = ScoreSettings(tokenize="13a", lowercase=False)


@pytest.mark.parametrize(
    ("pair", "settings"),
    [
        (ENGLISH, MIXED_13A),
        (ENGLISH, ScoreSettings(tokenize="none", lowercase=True)),
        (CHINESE, ScoreSettings("zh", lowercase=False)),
    ],
    ids=["mixed", "lowercase", "zh"],
)
def test_scores_and_signatures_are_sacrebleus(pair: tuple[list[str], list[str]], settings: ScoreSettings) -> None:
    counted = count(*pair, settings)
    found = counted.scores()
    bleu = BLEU(tokenize=settings.tokenize, lowercase=settings.lowercase, force=True)
    asian = settings.tokenize == "zh"
    others = CHRF(lowercase=settings.lowercase), TER(normalized=asian, asian_support=asian)
    for name, metric in zip(settings.metrics, (bleu, *others), strict=True):
        assert found[name] == pytest.approx(metric.corpus_score(pair[0], [pair[1]]).score)
        assert counted.signatures[name] == str(metric.get_signature())


def test_composed_and_decomposed_characters_are_the_same() -> None:
    composed = ["Le gar\u00e7on a \u00e9t\u00e9 tr\u00e8s \u00e9l\u00e9gant.", "Il est d\u00e9j\u00e0 l\u00e0, ou pas."]
    decomposed = [unicodedata.normalize("NFD", line) for line in composed]
    for pair in ((composed, decomposed), (decomposed, composed)):
        found = score(*pair, MIXED_13A)
        assert found == pytest.approx({"bleu": 100, "chrf": 100, "ter": 0})
        assert list(METRICS["bleu"].of_sentences(count(*pair, MIXED_13A).counts["bleu"])) == pytest.approx([100, 100])


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        ("flores200", "cannot be used: .*flores200sacrebleuspm"),  # its downloaded model is damaged
        ("ja-mecab", r"cannot be used: .* pip install sacrebleu\[ja\]$"),
        ("moses", f"is unknown; allowed: {', '.join(BLEU.TOKENIZERS)}$"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_says_why(
    tokenizer: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "flores200sacrebleuspm").write_bytes(b"cut off")
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    with pytest.raises(UserError, match=f"^evaluation.tokenize: '{tokenizer}' {reason}") as error:
        score(*ENGLISH, ScoreSettings(tokenizer, lowercase=False))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("codes", "tokenizer"),
    [
        (["zh", "ZH", "zh-CN", "zh_TW", "zho_Hans", "cmn"], "zh"),
        (["ja", "ja-JP", "jpn_Jpan"], "ja-mecab"),
        (["ko", "KO_kr", "kor"], "ko-mecab"),
        (["de", "en-GB", "fr", "", "jav", "kok"], "13a"),
        (["zh-CN,zh_TW", "zh,cmn"], "zh"),  # several target languages
        (["zh-CN,de", "de,zh-CN", "zh,de", "zh-CN,ja", "de,fr"], "13a"),
    ],
)
def test_tokenizer_of_language(codes: list[str], tokenizer: str) -> None:
    assert {tokenizer_for(code) for code in codes} == {tokenizer}
    assert tokenizer in BLEU.TOKENIZERS


def test_by_length_every_sentence_is_in_one_part_and_the_longest_are_last() -> None:
    sources = [" ".join("x" * n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 8, 8)]
    references = [f"{source} a b c d" for source in sources]
    hypotheses = [reference if len(reference) < 18 else "nothing like it" for reference in references]
    parts = score_by_length(count(hypotheses, references, MIXED_13A).counts["bleu"], "bleu", sources)
    found = [(part["words"], part["sentences"], part["score"]) for part in parts]
    assert found == [([1, 2], 2, pytest.approx(100)), ([3, 5], 3, pytest.approx(100)), ([6, 7], 2, 0), ([8, 8], 3, 0)]


def test_by_length_parts_are_as_equal_as_can_be_also_in_characters_where_there_are_no_spaces() -> None:
    lengths = [1] * 30 + [2] * 29 + [3] * 20 + [4] * 6 + [5] * 15
    references = [f"a b c d {'x' * n}" for n in lengths]
    counts = count(references, references, MIXED_13A).counts["bleu"]
    parts = score_by_length(counts, "bleu", [" ".join("x" * n) for n in lengths], 5)
    assert [part["sentences"] for part in parts] == [30, 29, 20, 21]  # 21 is nearer to a fifth than 15
    sources = ["狗" * n for n in range(1, 9)]
    parts = score_by_length(count(["a"] * 8, ["a"] * 8, MIXED_13A).counts["bleu"], "bleu", sources)
    assert [part["words"] for part in parts] == [[1, 2], [3, 4], [5, 6], [7, 8]]


WORDS = ["a", "b", "c", "d", "the", "The", "cat", "sat", ",", ".", "zz"]


def drawn(rng: random.Random, longest: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, longest)))


def test_scores_are_sacrebleus() -> None:
    """Tests also empty texts, texts shorter than an n-gram, and orders without a match."""
    rng = random.Random(0)
    for case in range(100):
        size, longest = rng.choice([1, 1, 2, 5]), rng.choice([1, 3, 6, 12])
        hypotheses, references = ([drawn(rng, longest) for _ in range(size)] for _ in range(2))
        counts = count(hypotheses, references, MIXED_13A).counts
        found = [float(METRICS[name].formula(counts[name].sum(0).astype(float))) for name in MIXED_13A.metrics]
        metrics = BLEU(force=True), CHRF(), TER()
        expected = [metric.corpus_score(hypotheses, [references]).score for metric in metrics]
        assert found == pytest.approx(expected, abs=1e-9), (case, hypotheses, references)
        sentence = BLEU(force=True, effective_order=True)
        each = [sentence.sentence_score(*pair).score for pair in zip(hypotheses, zip(references), strict=True)]
        assert list(METRICS["bleu"].of_sentences(counts["bleu"])) == pytest.approx(each, abs=1e-9)


# Error rates of short outputs

SHORT = ScoreSettings("none", lowercase=False, metrics=("wer", "ser"))
SOUNDS = (
    # outputs: right, a substitution, a deletion, two insertions, nothing
    ["h œy s", "k a t", "b o\u02d0", "x t ə ə", ""],
    ["h œy s", "k \u0251 t", "b o\u02d0 m", "t ə", "z e\u02d0"],
)


def test_error_rates_are_those_of_the_published_evaluation() -> None:
    """The task divides the number of wrong words by all words, and the sum of all edits by the sum of all phones."""
    found = score(*SOUNDS, SHORT)
    assert (f"{found['wer']:.2f}", f"{found['ser']:.2f}") == ("80.00", "46.15")  # 4 of 5 words, 6 edits of 13 phones
    counts = count(*SOUNDS, SHORT).counts
    assert METRICS["ser"].of_sentences(counts["ser"]) == pytest.approx([0, 100 / 3, 100 / 3, 100, 100])


def test_symbols_stay_whole_and_their_spelling_in_unicode_does_not_matter() -> None:
    assert score(["t ʃ a\u0303"], ["tʃ \xe3"], SHORT) == {"wer": 100, "ser": 100}  # 2 edits, 2 symbols
    assert score([" tʃ  a\u0303 "], ["tʃ \xe3"], SHORT) == {"wer": 0, "ser": 0}
    assert score(["Tʃ"], ["tʃ"], SHORT)["wer"] == 100
    assert score(["Tʃ"], ["tʃ"], ScoreSettings("none", lowercase=True, metrics=("wer",)))["wer"] == 0


def test_any_answer_to_the_same_source_is_right() -> None:
    sources, references = ["bass", "bass", "base"], ["b æ s", "b e\u026a s", "b e\u026a z"]
    output = ["b e\u026a s", "b e\u026a", "b e\u026a s"]
    counts = count(output, references, SHORT, sources=sources).counts
    assert counts["wer"].tolist() == [[0, 1], [1, 1], [1, 1]]
    assert counts["ser"].tolist() == [[0, 3], [1, 3], [1, 3]]
    assert score(output, references, SHORT)["wer"] == 100
    assert count(output, references, MIXED_13A, sources=sources).scores() == score(output, references, MIXED_13A)
