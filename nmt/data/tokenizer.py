"""SentencePiece tokenizers: text to token ids and back.

Shapes: S source positions, T target positions.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from unicodedata import category

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from nmt.config.errors import UserError
from nmt.data.reading.text import is_blank
from nmt.data.subword_sampling import Sampler, make_sampler
from nmt.data.word_alignment import END, UNKNOWN, WORD_START
from nmt.system.files import read_bytes, write_atomically

log = logging.getLogger(__name__)
CONTINUATION = re.compile("[^\\W_]|[-\u2010\u2011]|<0x[0-9A-F]{2}>$")  # letter, digit, hyphen, byte of byte_fallback
TOKENIZER_FILES = ("tokenizer.model", "source.model", "target.model")  # in a run: the first, or the other two
LONE_SURROGATES = re.compile("[\ud800-\udfff]")  # possible in Python strings, but not in UTF-8


class Tokenizer:
    """Converts one language's text to token ids, without <s> and with </s>, and back.

    decode(encode(line)) is the normalised line without leading, trailing or repeated spaces, except for unknown pieces,
    which byte_fallback avoids. Special symbols in a line are ordinary text. A lone surrogate becomes U+FFFD.
    """

    def __init__(self, model: bytes, lowercase: bool = False, name: str = "tokenizer") -> None:
        """Raises UserError if the bytes are not a SentencePiece model with <s> and </s>."""
        self.model, self.lowercase = model, lowercase
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError):
            raise UserError(f"{name}: is not a SentencePiece model") from None
        processor = self._processor
        self.unk, self.bos, self.eos = processor.unk_id(), processor.bos_id(), processor.eos_id()
        if min(self.bos, self.eos) < 0:
            raise UserError(
                f"{name}: the SentencePiece model lacks <s> or </s>; train it without bos_id=-1 and eos_id=-1"
            )
        size, pad = processor.get_piece_size(), processor.pad_id()
        self.pad, self.vocab_size = (pad, size) if pad >= 0 else (size, size + 1)  # a model may lack padding

    @classmethod
    def load(cls, path: Path, lowercase: bool = False) -> "Tokenizer":
        """Raises UserError if the file cannot be read or is not a SentencePiece model."""
        try:
            return cls(read_bytes(path), lowercase, str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot read the tokenizer ({error.strerror})") from None

    def same_as(self, other: "Tokenizer") -> bool:
        """Do both give every text the same tokens?"""
        return (self.model, self.lowercase) == (other.model, other.lowercase)

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[bytes, bool]]:
        return Tokenizer, (self.model, self.lowercase)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Lines -> ids, each ending in </s>."""
        encoded: list[list[int]] = self._processor.encode(self._clean(lines), add_eos=True)
        return encoded

    def sample(self, lines: Sequence[str], alpha: float, seeds: Sequence[int]) -> list[list[int]]:
        """Like `encode`, with random segmentations: BPE-dropout, or subword regularisation for unigram models.

        The segmentation of a line depends only on the line and its 32-bit seed.
        """
        assert self._sampler is not None
        normalised = self._processor.normalize(self._clean(lines))
        return [
            [*self._sampler.draw(line, alpha, seed), self.eos] for line, seed in zip(normalised, seeds, strict=True)
        ]

    def can_sample(self) -> bool:
        """True for unigram models, and for BPE models without unused pieces."""
        return self._sampler is not None

    @cached_property
    def _sampler(self) -> Sampler | None:
        return make_sampler(self.model)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> one line of text without special symbols."""
        text: str = self._processor.decode([i for i in ids if i not in {self.pad, self.bos, self.eos}])
        return _with_spaces(text.removeprefix(WORD_START))  # byte pieces can spell line ends and "▁"

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Ids -> pieces, with "▁" at the start of a word; </s> is included."""
        return ["<pad>" if i == self.pad else self._processor.id_to_piece(int(i)) for i in ids]

    def id_of(self, piece: str) -> int | None:
        """The id of a piece as in `pieces`; None for anything else, and for symbols that no translation holds."""
        token: int = self._processor.piece_to_id(piece)
        known = self._processor.id_to_piece(token) == piece
        return token if known and token not in {self.pad, self.bos, self.eos} else None

    def boundary(self) -> NDArray[np.bool_]:
        """(V,): true for tokens that do not continue the word before them: they start with a space or with punctuation
        other than a hyphen, or are </s>."""
        pieces = self.pieces(range(self.vocab_size))
        return np.array([not (CONTINUATION.match(piece) or category(piece[0])[0] == "M") for piece in pieces])

    def surfaces(self, lines: Sequence[str]) -> list[list[str]]:
        """Lines -> the pieces of `encode`, unknown ones as in the text instead of <unk>; </s> last.

        "▁" stands only for spaces of the line: see `restore_spaces`.
        """
        segmented: list[list[str]] = self._processor.encode(self._clean(lines), out_type=str, add_eos=True)
        return [self.restore_spaces(line, pieces) for line, pieces in zip(lines, segmented, strict=True)]

    def surfaces_of(self, line: str, ids: Iterable[int]) -> list[str]:
        """A line and the tokens of one of its segmentations -> their pieces, as `surfaces` gives them."""
        pieces = self.pieces(ids)
        if UNKNOWN in pieces:
            text = self._processor.normalize(self._clean([line])[0])
            ends = [*map(re.escape, pieces[1:-1]), "$"]  # an unknown piece ends where the next one starts
            pairs = zip(pieces[:-1], ends, strict=True)
            parts = (f"(?>.+?(?={end}))" if piece == UNKNOWN else re.escape(piece) for piece, end in pairs)
            pattern = "".join(f"({part})" for part in parts)
            if found := re.fullmatch(pattern, text, re.DOTALL):
                pieces = [*found.groups(), pieces[-1]]
        return self.restore_spaces(line, pieces)

    def restore_spaces(self, line: str, pieces: list[str]) -> list[str]:
        """A line's pieces, with "▁" only where the line has a space, so that words are separated by spaces only.

        Normalisation turns other white space, such as a no-break space, into a space; this puts it back.
        """
        if line.isascii() and line.isprintable():
            return pieces
        (cleaned,) = self._clean([line])
        original = line.lower() if self.lowercase else line  # has the same length
        text, origins = self._processor.normalize(cleaned, with_offsets=True)
        marks = iter([i for i, char in enumerate(text) if char == WORD_START])

        def restore(match: re.Match[str]) -> str:
            i = next(marks)
            # The characters that `_with_spaces` replaces do not separate words: show them as no-break spaces.
            span = re.sub(f"[{WORD_START}\r\n]", "\xa0", original[origins[i] if i else 0 : origins[i + 1]])
            before, space, after = re.sub(" +", WORD_START, span).rpartition(WORD_START)
            if i == 0 and not span:
                space = WORD_START  # SentencePiece's own, at the start of the line
            return f"{before}{match[1]}{space}{after}"

        return re.sub(f"(\n?){WORD_START}", restore, "\n".join(pieces)).split("\n")

    def _clean(self, lines: Sequence[str]) -> list[str]:
        return [clean(line, self.lowercase) for line in lines]


def clean(line: str, lowercase: bool) -> str:
    """The line as SentencePiece reads it, in training and afterwards."""
    line = _with_spaces(line.lower() if lowercase else line)
    return line if line.isascii() else LONE_SURROGATES.sub("\ufffd", line)


def _with_spaces(text: str) -> str:
    """The text with spaces in place of line ends and of "▁", which SentencePiece uses internally."""
    return text.replace(WORD_START, " ").replace("\n", " ").replace("\r", " ")


class Tokenizers(NamedTuple):
    """Both languages' tokenizers, the same object for a joint vocabulary."""

    source: Tokenizer
    target: Tokenizer

    def save(self, directory: Path) -> None:
        """Write tokenizer.model, or source.model and target.model."""
        if self.source is self.target:
            write_atomically(directory / "tokenizer.model", self.source.model)
        else:
            write_atomically(directory / "source.model", self.source.model)
            write_atomically(directory / "target.model", self.target.model)

    @classmethod
    def load(cls, directory: Path, lowercase: bool) -> "Tokenizers":
        """Read what `save` wrote. Raises UserError."""
        joint = directory / "tokenizer.model"
        if joint.exists():
            tokenizer = Tokenizer.load(joint, lowercase)
            return cls(tokenizer, tokenizer)
        source, target = (Tokenizer.load(directory / f"{name}.model", lowercase) for name in ("source", "target"))
        return cls(source, target)


def copy_unknown(pieces: Sequence[str], weights: NDArray[np.float32], source: Sequence[str]) -> str:
    """Text in which each "<unk>" is replaced by the source piece it attends to most (Luong et al. 2015, 4).

    pieces (T,), weights (T, S), source (S,) from `Tokenizer.surfaces`. "</s>" is never copied; a piece that attends to
    nothing else stays "<unk>".
    """
    weights = np.where([piece == END for piece in source], 0.0, weights)
    copies = [source[row.argmax()] if row.any() else UNKNOWN for row in weights]
    replaced = [copy if piece == UNKNOWN else piece for piece, copy in zip(pieces, copies, strict=True)]
    return "".join(piece for piece in replaced if piece != END).replace(WORD_START, " ").strip()


def encode_lines(
    tokenizer: Tokenizer, lines: Sequence[str], limit: int, name: str, first_line: int = 1
) -> tuple[list[list[int]], list[list[str]]]:
    """Token ids and pieces of each line, truncated to `limit` tokens with a warning, such as "line 3 has 900 tokens". A
    line that shows nothing has no token but </s>.

    Encodes line by line, so that memory never holds all tokens of more than one overlong line.
    """
    encoded: list[list[int]] = []
    surfaces: list[list[str]] = []
    for number, line in enumerate(lines, first_line):
        text = "" if is_blank(line) else line
        (ids,), (pieces,) = tokenizer.encode([text]), tokenizer.surfaces([text])
        if len(ids) > limit:
            log.warning("%s %d has %d tokens: cut to search.max_source_length=%d", name, number, len(ids), limit)
            del ids[limit - 1 : -1], pieces[limit - 1 : -1]  # all but </s>
        encoded.append(ids)
        surfaces.append(pieces)
    return encoded, surfaces
