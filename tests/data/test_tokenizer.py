"""Tokenizers: special symbols, round trips, sampling, and sizes that the text does not allow."""

import io
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.config.errors import UserError
from nmt.config.schema import data as schema
from nmt.data.corpus import DemoPairs
from nmt.data.text import is_blank
from nmt.data.tokenizer import BOS, EOS, PAD, UNK, Tokenizer, Tokenizers, copy_unknown, join, make_tokenizers
from nmt.data.word_alignment import words_of_pieces

ENGLISH, FRENCH, _ = (list(side) for side in zip(*DemoPairs(2, 300), strict=True))
VALUES: dict[str, Any] = {
    "kind": "bpe",
    "vocab_size": 400,
    "byte_fallback": False,
    "normalization": "nfc",
    "character_coverage": 1.0,
    "split_punctuation": True,
    "lowercase": False,
    "sampling": 0.0,
    "max_train_lines": 1000,
}


def train(**changes: Any) -> Tokenizers:  # noqa: ANN401
    config = schema.TrainedTokenizer.model_validate(VALUES | changes)
    return make_tokenizers(config, ENGLISH, FRENCH)


@pytest.fixture(scope="module")
def shared() -> Tokenizers:
    return train()


def test_text_comes_back_and_ends_once(shared: Tokenizers) -> None:
    for tokenizer, lines in ((shared.source, ENGLISH[:50]), (shared.target, FRENCH[:50])):
        encoded = tokenizer.encode(lines)
        assert [tokenizer.decode(ids) for ids in encoded] == lines
        assert all(ids[-1] == EOS and EOS not in ids[:-1] and BOS not in ids for ids in encoded)
    assert shared.source.encode([""]) == [[EOS]]


def test_punctuation_is_split_off_unless_text_is_split_already() -> None:
    lines = ["le t-shirt d&apos; eau , qu&apos; elle a 2x ."] * 9

    def cut(split: bool) -> list[str]:
        config = schema.TrainedTokenizer.model_validate(VALUES | {"vocab_size": 60, "split_punctuation": split})
        return make_tokenizers(config, lines, lines).target.surfaces(lines[:1])[0]

    words = ["▁le", "▁t-shirt", "▁d&apos;", "▁eau", "▁,", "▁qu&apos;", "▁elle", "▁a", "▁2x", "▁.", "</s>"]
    assert cut(False) == words
    assert {"-", "&", "▁d", "▁qu", "▁2"} <= set(cut(True))


KINDS = ["bpe", "unigram", "char", "word"]
ODD = [
    *("<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "\u2581", "|||", "\u2047", " \u2047 ", "the", "cat", "LE", "\ufb01"),
    *(" ", "  ", "\t", "\r", "\r\n", "\n", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2028", "\u2029", "\u3000"),
    *("\0", "\x1b", "\x7f", "\xad", "\u200b", "\u200d", "\u202e", "\ufeff", "\ufffe", "\uffff", "\ue000", "\U0010ffff"),
    *("e\u0301", "\u0301", "\U0001f468\u200d\U0001f469", "\U0001f1e9\U0001f1ea", "\u05e9", "\u0e20\u0e32", "\u4ed6"),
]

Made = dict[tuple[str, str], Tokenizer]  # kind and Unicode form -> tokenizer
TEXT = st.lists(
    st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)), max_size=8
).map("".join)


@pytest.fixture(scope="module")
def byte_tokenizers() -> Made:
    pairs = [*((kind, "nfc") for kind in KINDS), *(("bpe", form) for form in ("none", "nfd", "nfkc", "nfkd"))]
    return {
        (kind, form): train(kind=kind, byte_fallback=True, vocab_size=600, normalization=form).source
        for kind, form in pairs
    }


def one_space(text: str) -> str:
    """Replace each run of spaces, ends of lines and "\u2581" by one space, and strip the line."""
    return " ".join(word for word in re.split("[ \u2581\r\n]", text) if word)


def composed(text: str, form: str) -> str:
    """Convert the line to a Unicode form and compose it, with one space for each run of white space, and without
    control characters."""
    kept = [char for char in text if char.isspace() or (unicodedata.category(char) != "Cc" and char != "\ufeff")]
    formed = unicodedata.normalize(form.upper(), "".join(kept))
    return unicodedata.normalize("NFC", " ".join(formed.replace("\u2581", " ").split()))


@given(text=TEXT)
@settings(max_examples=60, deadline=None)
def test_bytes_spell_any_text(byte_tokenizers: Made, text: str) -> None:
    for (_, form), tokenizer in byte_tokenizers.items():
        (ids,) = tokenizer.encode([text])
        assert ids[-1] == EOS
        assert not {PAD, UNK, BOS, EOS} & set(ids[:-1])
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        back = tokenizer.decode(ids)
        assert back == (one_space(text) if form == "none" else composed(text, form))
        assert tokenizer.decode(tokenizer.encode([back])[0]) == back


@given(text=TEXT)
@settings(max_examples=60, deadline=None)
def test_what_is_unknown_breaks_nothing_else(shared: Tokenizers, text: str) -> None:
    """Without byte fallback, unknown text still gives ids in range, one </s>, one line of text, one piece per id."""
    tokenizer = shared.source
    (ids,) = tokenizer.encode([text])
    assert ids[-1] == EOS
    assert not {PAD, BOS, EOS} & set(ids[:-1])
    assert not {"\n", "\r"} & set(tokenizer.decode(ids))
    (surfaces,) = tokenizer.surfaces([text])
    assert len(surfaces) == len(ids)
    assert not {"\n", "\r"} & set("".join(surfaces))


@given(text=TEXT, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_pieces_of_a_sampled_segmentation_spell_the_line_too(shared: Tokenizers, text: str, seed: int) -> None:
    """This includes unknown words, so that all pieces belong to the same words as without sampling."""
    tokenizer = shared.source
    line = f"the dog {text} sees"
    (surfaces,), (ids,) = tokenizer.surfaces([line]), tokenizer.sample([line], 0.3, [seed])
    sampled = tokenizer.surfaces_of(line, ids)
    assert len(sampled) == len(ids)
    assert "".join(sampled) == "".join(surfaces)
    assert max(words_of_pieces(sampled)) == max(words_of_pieces(surfaces))


@given(ids=st.lists(st.integers(0, 599), max_size=60))
@settings(max_examples=60, deadline=None)
def test_whatever_a_model_writes_is_one_line_of_unicode(byte_tokenizers: Made, ids: list[int]) -> None:
    for tokenizer in byte_tokenizers.values():
        text = tokenizer.decode([i for i in ids if i < tokenizer.vocab_size])
        assert not {"\n", "\r", "\u2581"} & set(text)
        assert text.encode("utf-8").decode("utf-8") == text


SPELLINGS = ["가감", "Straße", "tchaá"]
SOUNDS = ["k a̠ \u0261 a̠ m", "ʃ t ʁ a\u02d0 s ə", "tʃ ɐ̃ a\u02d0 d͡z"]
SIDE = {key: VALUES[key] for key in schema.TokenizerSide.model_fields}


def sides(source: dict[str, Any], target: dict[str, Any]) -> Tokenizers:
    values = {"kind": "sides", "source": SIDE | source, "target": SIDE | target, "max_train_lines": 9}
    config = schema.SidesTokenizer.model_validate({**values, "lowercase": False})
    return make_tokenizers(config, SPELLINGS, SOUNDS)


def test_letters_become_symbols_that_stay_whole(tmp_path: Path) -> None:
    tokenizers = sides({"kind": "char", "normalization": "nfd"}, {"kind": "word", "normalization": "nfd"})
    tokenizers.save(tmp_path)
    source, target = Tokenizers.load(tmp_path, lowercase=False)
    assert source.surfaces(SPELLINGS[:1]) == [["▁", *"\u1100\u1161\u1100\u1161\u11b7", "</s>"]]
    assert target.surfaces(SOUNDS[2:]) == [["▁tʃ", "▁ɐ\u0303", "▁a\u02d0", "▁d\u0361z", "</s>"]]
    for tokenizer, lines in ((source, SPELLINGS), (target, SOUNDS)):
        encoded = tokenizer.encode(lines)
        assert not any(UNK in ids for ids in encoded)
        composed = [unicodedata.normalize("NFC", line) for line in lines]
        assert [tokenizer.decode(ids) for ids in encoded] == composed
        assert [tokenizer.spell(pieces) for pieces in tokenizer.surfaces(lines)] == composed
    assert target.pieces(target.encode(["a\u02d0 tʃ\u02d0 t"])[0]) == ["▁a\u02d0", "<unk>", "▁t", "</s>"]


def test_each_side_is_named_in_its_errors() -> None:
    with pytest.raises(UserError, match=r"^tokenizer\.target\.vocab_size=9000: .* set tokenizer\.target\.vocab_size="):
        sides({"kind": "char"}, {"vocab_size": 9000})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 9000}, r"tokenizer\.vocab_size=9000: .* at most (\d+); set tokenizer\.vocab_size=\1"),
        ({"kind": "unigram", "vocab_size": 9000}, r"tokenizer\.vocab_size=9000: .* at most \d+"),
        ({"vocab_size": 10}, r"tokenizer\.vocab_size=10: .* more characters; set tokenizer\.vocab_size=\d+ or more"),
        (
            {"kind": "char", "vocab_size": 99, "byte_fallback": True},
            "takes 256 pieces; set tokenizer.vocab_size=261 or",
        ),
    ],
)
def test_impossible_sizes_name_a_possible_one(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        train(**changes)
    named = int(str(error.value).split("tokenizer.vocab_size=")[2].split()[0])
    assert train(**(changes | {"vocab_size": named})).source.vocab_size == named


def test_saved_models_come_back(shared: Tokenizers, tmp_path: Path) -> None:
    shared.save(tmp_path)
    loaded = Tokenizers.load(tmp_path, lowercase=False)
    assert loaded.source is loaded.target
    assert loaded.source.encode(ENGLISH[:5]) == shared.source.encode(ENGLISH[:5])
    Tokenizers(shared.source, train(kind="char").target).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.model", "target.model"]
    loaded = Tokenizers.load(tmp_path, lowercase=False)
    assert (loaded.source.vocab_size, loaded.target.pieces([40])) == (400, train(kind="char").target.pieces([40]))


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that trains a model with SentencePiece's defaults: no padding token, other ids."""

    def make(**options: Any) -> Path:  # noqa: ANN401
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(ENGLISH), model_writer=model, vocab_size=200, minloglevel=2, **options
        )
        path = tmp_path / "foreign.model"
        path.write_bytes(model.getvalue())
        return path

    return make


def existing(source: Path, target: Path | None = None, **sampling: Any) -> Tokenizers:  # noqa: ANN401
    models = {"source_model": str(source), "target_model": target and str(target)}
    values = {"kind": "file", "lowercase": False, "sampling": 0.0}
    config = schema.FileTokenizer.model_validate({**values, **models, **sampling})
    return make_tokenizers(config, (), ())


def test_an_existing_model_brings_its_own_ids_and_rule(foreign: Callable[..., Path]) -> None:
    tokenizer = existing(foreign()).source
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.vocab_size) == (0, 1, 2, 200, 201)
    ids = tokenizer.encode([ENGLISH[0]])[0]
    assert tokenizer.decode([*ids, tokenizer.pad]) == ENGLISH[0]
    assert tokenizer.form == "none"  # it keeps its own rule, NFKC
    assert join(tokenizer.surfaces(["ﬁ"])[0]) == "fi"


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_of_special_pieces_change_nothing(foreign: Callable[..., Path], kind: str) -> None:
    options = {"model_type": kind, "hard_vocab_limit": kind in {"bpe", "unigram"}}
    plain = Tokenizer.load(foreign(**options))
    renamed = Tokenizer.load(foreign(**options, unk_piece="UNK", bos_piece="[CLS]", eos_piece="END", pad_piece="PAD"))
    lines = [f"the {odd} sees the \u2603 zebrafinch ." for odd in ODD] + ENGLISH[:20]
    assert plain.surfaces(lines) == renamed.surfaces(lines)
    for line in lines:
        (ids,) = plain.encode([line])
        seen = [[each.pieces(ids), each.surfaces_of(line, ids)] for each in (plain, renamed)]
        assert seen[0] == seen[1]
        assert [*map(plain.id_of, seen[0][0])] == [*map(renamed.id_of, seen[0][0])]
    assert plain.vocabulary() == renamed.vocabulary()
    assert plain.boundary.tolist() == renamed.boundary.tolist()
    assert plain.pieces([plain.unk, plain.eos, plain.pad]) == ["<unk>", "</s>", "<pad>"]


def test_models_that_are_sampled_have_merges(foreign: Callable[..., Path], tmp_path: Path) -> None:
    merges = foreign(model_type="bpe").rename(tmp_path / "merges.model")
    assert existing(merges, sampling=0.1).source.can_sample()
    with pytest.raises(UserError, match=r"^tokenizer\.sampling=0\.1: .*foreign.model is not a bpe model"):
        existing(merges, foreign(), sampling=0.1)


def test_surfaces_show_unknown_pieces_as_they_are_written() -> None:
    tokenizer = train(kind="word", vocab_size=400).source
    for line, surface in (("the zebrafinch .", "▁zebrafinch"), ("the zebra finch .", "▁zebra▁finch")):
        assert tokenizer.pieces(tokenizer.encode([line])[0])[1] == "<unk>"
        assert tokenizer.surfaces([line])[0] == ["▁the", surface, "▁.", "</s>"]
        assert len(tokenizer.encode([line])[0]) == 4


SPACED = [
    ("the\xa0cat sees the dog", [["the\xa0cat"], ["sees"], ["the"], ["dog"]]),
    ("\xa0the  cat\xa0 dog", [["the"], ["cat"], ["dog"]]),
    ("the \xa0 cat", [["the"], [], ["cat"]]),  # normalization leaves nothing of the second word
    ("the\tcat \u2581 dog\r the", [["the\tcat"], [], ["dog"], ["the"]]),
    ("THE\u2003CAT\u3000dog the", [["the\u2003cat\u3000dog"], ["the"]]),
]


@pytest.mark.parametrize(("kind", "rule"), [*((kind, "nfc") for kind in KINDS), ("bpe", "nfkc")])
@pytest.mark.parametrize(("line", "expected"), SPACED)
def test_pieces_belong_to_the_words_that_spaces_separate(
    line: str, expected: list[list[str]], kind: str, rule: str
) -> None:
    tokenizer = _lowercasing(kind, rule)
    found = [tokenizer.surfaces([line])[0]]
    if tokenizer.can_sample():
        (ids,) = tokenizer.sample([line], 0.5, [1])
        found.append(tokenizer.restore_spaces(line, tokenizer.pieces(ids)))
    for pieces in found:
        texts = [""] * len(expected)
        for word, piece in zip(words_of_pieces(pieces)[:-1], pieces, strict=False):
            texts[word] += re.sub("[\\s\u2581]", "", piece)
        assert texts == [re.sub(r"\s", "", "".join(word)) for word in expected]


@cache
def _lowercasing(kind: str, rule: str) -> Tokenizer:
    return train(kind=kind, normalization=rule, lowercase=True, vocab_size=300).source


def test_what_is_no_usable_model_is_refused(foreign: Callable[..., Path], tmp_path: Path) -> None:
    for options, message in (
        ({"bos_id": -1}, "foreign.model: the SentencePiece model lacks <s> or </s>"),
        ({"add_dummy_prefix": False}, "does not put \u2581 before each word; train it without add_dummy_prefix=false"),
        ({"treat_whitespace_as_suffix": True}, "does not put \u2581 before each word"),
        ({"eos_piece": "<eos>", "user_defined_symbols": ["</s>"]}, "has </s> as an ordinary piece"),
        ({"unk_piece": "[UNK]", "user_defined_symbols": ["<unk>"]}, "has <unk> as an ordinary piece"),
    ):
        with pytest.raises(UserError, match=message):
            Tokenizer.load(foreign(**options))
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"x\.model: is not a SentencePiece model"):
        Tokenizer.load(tmp_path / "x.model")
    with pytest.raises(UserError, match=r"y\.model: cannot read"):
        Tokenizer.load(tmp_path / "y.model")


def test_a_line_is_blank_if_it_shows_nothing() -> None:
    blank = ["", " \t", "\u200b", "\u2060\u00ad", "\0", "\ufe0f", "\u3164\u2800", "\u2028"]
    visible = [".", "\u200ba", "\N{WOMAN}\u200d\N{SCHOOL}", "e\u0301", "\ufffd", "\u4eba"]
    assert [text for text in blank + visible if is_blank(text)] == blank


# Unknown words that are replaced by source words

ZEBRA, OMEGA = "▁the ▁zebra ▁sleeps </s>", "▁the ▁ Ω </s>"
LONE = [0.1, 0.5, 0.2, 0.2]  # the largest weight is on the lone "▁"
EYE = np.eye(4).tolist()


@pytest.mark.parametrize(
    ("pieces", "rows", "source", "text"),
    [
        ("▁le <unk> ▁dort </s>", EYE, ZEBRA, "le zebra dort"),
        ("<unk>", [[0.1, 0.2, 0.1, 0.6]], ZEBRA, "zebra"),  # </s> has the largest weight, but is never copied
        ("▁le <unk>", [[0.0] * 4] * 2, ZEBRA, "le<unk>"),
        ("<unk>", EYE[3:], ZEBRA, "<unk>"),
        ("▁caf <unk> </s>", np.eye(3).tolist(), "▁caf é </s>", "café"),  # inside a word, without a space
        ("▁le <unk> </s>", [LONE] * 3, OMEGA, "le Ω"),  # a lone "▁" is copied with its piece
        ("▁le ▁ <unk> </s>", [LONE] * 4, OMEGA, "le Ω"),
        ("<unk> ▁dort </s>", [LONE] * 3, OMEGA, "Ω dort"),
    ],
)
def test_an_unknown_word_is_the_one_it_attends_to(pieces: str, rows: list[list[float]], source: str, text: str) -> None:
    assert join(copy_unknown(pieces.split(), np.array(rows, np.float32), source.split())) == text
