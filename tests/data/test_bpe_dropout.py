"""BPE-dropout: equal to `encode` without randomness, and the same in every process."""

import io
import math
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from nmt.data import bpe_dropout
from nmt.data.corpus import DemoPairs
from nmt.data.tokenizer import Tokenizer

ENGLISH, FRENCH, _ = (list(side) for side in zip(*DemoPairs(2, 300), strict=True))
PLAIN: dict[str, Any] = {"vocab_size": 300}
MODELS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "bytes": {"byte_fallback": True, "vocab_size": 500},
    "identity": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "casefolded": {"normalization_rule_name": "nfkc_cf"},
    "symbols": {"user_defined_symbols": ["<2fr>", "<2", "é!", "▁to▁x", "c"]},
    "symbols and bytes": {"user_defined_symbols": ["<2fr>", "<2"], "byte_fallback": True, "vocab_size": 500},
    "across words": {"split_by_whitespace": False},
    "spaces alone": {"allow_whitespace_only_pieces": True, "remove_extra_whitespaces": False},
    "few characters": {"character_coverage": 0.98, "vocab_size": 100},
}
CHARACTERS = st.characters(exclude_categories=["Cs"])
MARKS = st.sampled_from(["<2fr>", "<2", "é!", "</s>", "<unk>", "<0x41>"])
WORDS = st.sampled_from(sorted({word for line in ENGLISH[:9] + FRENCH[:9] for word in line.split()})) | MARKS
ODD = st.sampled_from([" ", "  ", "▁", "\t", "\0", "👩‍👩‍👧", "日本語", "ﬁ", "ⅷ"])
TEXT = st.one_of(
    st.lists(WORDS | ODD | st.text(CHARACTERS, max_size=5), max_size=12).map(" ".join),
    st.lists(WORDS | ODD, max_size=12).map("".join),
    st.text("aenst ", max_size=20),  # repeats the same pairs of characters
    st.text(CHARACTERS, max_size=60),
)


@cache
def made(name: str = "plain") -> Tokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ENGLISH + FRENCH),
        model_writer=model,
        model_type="bpe",
        minloglevel=2,
        hard_vocab_limit=False,
        **(PLAIN | MODELS[name]),
    )
    return Tokenizer(model.getvalue())


def normalised(tokenizer: Tokenizer, line: str) -> str:
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).normalize(line)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
@given(line=TEXT)
@settings(max_examples=30, deadline=None)
def test_without_dropout_bpe_is_encode(name: str, line: str) -> None:
    tokenizer = made(name)
    assert tokenizer.sample([line], 0, [1]) == tokenizer.encode([line])


def unknown(tokenizer: Tokenizer) -> str:
    """Make a pattern for runs of characters that occur in no piece."""
    known = {character for piece in tokenizer.pieces(range(3, tokenizer.vocab_size - 1)) for character in piece}
    return f"[^{re.escape(''.join(known))}]+"


@given(line=TEXT)
@settings(max_examples=30, deadline=None)
def test_bpe_without_merges_is_characters(line: str) -> None:
    tokenizer = made("few characters")
    runs = re.findall(f"{unknown(tokenizer)}|.", normalised(tokenizer, line), re.DOTALL)
    expected = ["<unk>" if re.fullmatch(unknown(tokenizer), run) else run for run in runs]
    assert tokenizer.pieces(tokenizer.sample([line], 1, [1])[0]) == [*expected, "</s>"]


@given(lines=st.lists(WORDS, max_size=8), alpha=st.floats(0.1, 1))
@settings(max_examples=30, deadline=None)
def test_symbols_of_the_user_stay_whole(lines: list[str], alpha: float) -> None:
    tokenizer = made("symbols")
    line = " ".join(lines)
    user = tuple(MODELS["symbols"]["user_defined_symbols"])
    expected, drawn = (
        [piece for piece in tokenizer.pieces(ids) if piece in user]
        for ids in (tokenizer.encode([line])[0], tokenizer.sample([line], alpha, [1])[0])
    )
    assert drawn == expected


def test_a_draw_depends_on_its_seed_alone() -> None:
    tokenizer, lines = made(), ENGLISH[:40]
    seeds = [2**32 - 1, *range(39)]
    drawn = tokenizer.sample(lines, 0.2, seeds)
    assert drawn == tokenizer.sample(lines, 0.2, seeds) != tokenizer.encode(lines)
    assert drawn != tokenizer.sample(lines, 0.2, range(100, 140))
    assert drawn != tokenizer.sample(lines, 0.3, seeds)
    assert drawn == [tokenizer.sample([line], 0.2, [seed])[0] for line, seed in zip(lines, seeds, strict=True)]
    fresh = Tokenizer(tokenizer.model)  # earlier draws do not matter
    assert drawn[::-1] == fresh.sample(lines[::-1], 0.2, seeds[::-1])
    assert len({tuple(ids) for ids in tokenizer.sample([ENGLISH[0]] * 50, 0.2, range(50))}) > 10


@pytest.mark.parametrize(("alpha", "longest_cached"), [(0.1, 32), (0.5, 0)])
def test_frequencies_are_those_of_sentencepiece(
    alpha: float, longest_cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the frequencies of all segmentations, within random variation."""
    monkeypatch.setattr(bpe_dropout, "LONGEST_CACHED", longest_cached)
    tokenizer, draws = made(), 2000
    theirs = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    longest = sorted({word for line in ENGLISH for word in line.split()}, key=lambda word: (len(word), word))
    for line in (longest[-1], f"{longest[-20]} ☃", "the cat"):
        ours = Counter(tuple(ids[:-1]) for ids in tokenizer.sample([line] * draws, alpha, range(draws)))
        sampled = (theirs.encode(line, enable_sampling=True, alpha=alpha, nbest_size=-1) for _ in range(draws))
        expected = Counter(map(tuple, sampled))
        for cut in {*ours, *expected}:
            share = (ours[cut] + expected[cut] + 2) / (2 * draws)
            assert abs(ours[cut] - expected[cut]) < 5.5 * math.sqrt(2 * draws * share), (line, cut)


def test_a_model_with_unused_pieces_cannot_be_sampled() -> None:
    model = sentencepiece_model_pb2.ModelProto.FromString(made().model)
    model.pieces[3].type = model.pieces[3].UNUSED
    assert not Tokenizer(model.SerializeToString()).can_sample()
