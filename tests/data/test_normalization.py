"""The normalization rule nfc: it composes characters and changes nothing else that is visible."""

import sys
import unicodedata

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from nmt.data.tokenizer import CHARACTERS, nfc_rule

MARKS = st.sampled_from("aeouAIO\u0131\u01b0\u03b1\u0915\u1100\u1161\u11a8" + "".join(map(chr, range(0x300, 0x330))))


@pytest.fixture(scope="module")
def nfc(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceNormalizer:
    path = tmp_path_factory.mktemp("rule") / "nfc.tsv"
    path.write_text(nfc_rule(), encoding="ascii")
    return sentencepiece.SentencePieceNormalizer(
        rule_tsv=str(path), add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )


def composed(char: str) -> str:
    if char.isspace():
        return " "
    return "" if unicodedata.category(char) == "Cc" or char == "\ufeff" else unicodedata.normalize("NFC", char)


def test_every_character_becomes_its_composed_form(nfc: sentencepiece.SentencePieceNormalizer) -> None:
    chars = [char for char in CHARACTERS[1:] if unicodedata.category(char) != "Cs"]
    expected = list(map(composed, chars))
    assert nfc.normalize(chars) == expected
    assert nfc.normalize([unicodedata.normalize("NFD", char) for char in chars]) == expected


@given(text=st.lists(MARKS, max_size=6).map("".join))
def test_the_result_is_canonically_equivalent(nfc: sentencepiece.SentencePieceNormalizer, text: str) -> None:
    assert unicodedata.normalize("NFC", nfc.normalize(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("spelling", ["\u1ec7", "e\u0323\u0302", "e\u0302\u0323", "\u1eb9\u0302", "\xea\u0323"])
def test_every_order_of_marks_is_composed(nfc: sentencepiece.SentencePieceNormalizer, spelling: str) -> None:
    assert nfc.normalize(f"Vi{spelling}t") == "Vi\u1ec7t"


def test_what_a_reader_would_miss_is_kept(nfc: sentencepiece.SentencePieceNormalizer) -> None:
    chinese, persian = "\u4f60\u597d\uff0c\u300c\uff21\u300d\uff01", "\u0645\u06cc\u200c\u0631\u0648\u0645"
    for text in (chinese, persian, "\u2026 \xbd m\xb2 \ufb01n"):
        assert nfc.normalize(text) == text


def test_no_character_is_left_out() -> None:
    later = map(chr, range(len(CHARACTERS), sys.maxunicode + 1))
    assert all(unicodedata.normalize("NFD", char) == char for char in later)
