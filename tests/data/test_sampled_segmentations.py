"""BPE-dropout and subword regularisation: what encode does without chance, the same in every process."""

import io
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.data import demo, pieces
from nmt.data import tokenizer as module
from nmt.data.tokenizer import Tokenizer

ENGLISH, FRENCH, _ = (list(side) for side in zip(*demo.generate(300, 1, 1, 1).train, strict=True))
PLAIN: dict[str, Any] = {"vocab_size": 300}
MODELS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "bytes": {"byte_fallback": True, "vocab_size": 500},
    "identity": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
    "casefolded": {"normalization_rule_name": "nfkc_cf"},
    "symbols": {"user_defined_symbols": ["<2fr>", "<2", "é!", "▁to▁x", "c"]},
    "symbols and bytes": {"user_defined_symbols": ["<2fr>", "<2"], "byte_fallback": True, "vocab_size": 500},
    "across words": {"split_by_whitespace": False},
    "spaces alone": {"allow_whitespace_only_pieces": True, "remove_extra_whitespaces": False},
    "suffix": {"treat_whitespace_as_suffix": True},
    "unescaped": {"escape_whitespaces": False},
    "few characters": {"character_coverage": 0.95, "vocab_size": 100},
}
WORDS = st.sampled_from(
    [*{word for line in ENGLISH[:40] + FRENCH[:40] for word in line.split()}, "<2fr>", "<2", "é!", "</s>", "<unk>", "<0x41>"]
)
TEXT = st.lists(
    WORDS | st.sampled_from([" ", "  ", "▁", "\t", "\0", "👩‍👩‍👧", "日本語", "ﬁ", "ⅷ"]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    max_size=12,
).map(" ".join) | st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
KINDS = pytest.mark.parametrize("kind", ["bpe", "unigram"])


@cache
def made(kind: str, name: str = "plain") -> Tokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ENGLISH + FRENCH),
        model_writer=model,
        model_type=kind,
        minloglevel=2,
        hard_vocab_limit=False,
        **(PLAIN | MODELS[name]),
    )
    return Tokenizer(model.getvalue())


def normalised(tokenizer: Tokenizer, line: str) -> str:
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).normalize(line)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
@KINDS
def test_the_model_is_read_as_sentencepiece_reads_it(kind: str, name: str) -> None:
    tokenizer = made(kind, name)
    theirs, found = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model), pieces.read(tokenizer.model)
    assert found.kind == {"bpe": pieces.BPE, "unigram": pieces.UNIGRAM}[kind]
    assert len(found.pieces) == theirs.get_piece_size()
    for i, piece in enumerate(found.pieces):
        assert (piece.text, piece.score) == (theirs.id_to_piece(i), theirs.get_score(i))
        assert theirs.is_byte(i) == (piece.type == pieces.BYTE)
        assert theirs.is_unknown(i) == (piece.type == pieces.UNKNOWN)
        user = MODELS[name].get("user_defined_symbols", [])
        assert (piece.text in user) == (piece.type == pieces.USER_DEFINED)


@pytest.mark.parametrize("name", MODELS)
@given(line=TEXT)
@settings(max_examples=150, deadline=None)
def test_without_dropout_bpe_is_encode(name: str, line: str) -> None:
    tokenizer = made("bpe", name)
    assert tokenizer.sample([line], 0, [1]) == tokenizer.encode([line])


@pytest.mark.parametrize("name", MODELS)
@given(line=TEXT)
@settings(max_examples=150, deadline=None)
def test_the_sharpest_unigram_sampling_is_encode(name: str, line: str) -> None:
    tokenizer = made("unigram", name)
    (drawn,), (best,) = tokenizer.sample([line], 1e5, [1]), tokenizer.encode([line])
    if drawn != best:  # two that are as good
        scores = [piece.score for piece in pieces.read(tokenizer.model).pieces]
        assert math.isclose(sum(scores[i] for i in drawn), sum(scores[i] for i in best), rel_tol=1e-5)
