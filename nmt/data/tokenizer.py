"""SentencePiece tokenizers: text to ids and back, and the only place that knows the ids of special symbols."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from nmt.config.errors import UserError
from nmt.data.subword_sampling import Sampler, sampler
from nmt.files import read_bytes, write_atomically
from nmt.metrics.alignment import END, UNKNOWN, WORD_START

LONE_SURROGATES = re.compile("[\ud800-\udfff]")  # which Python's strings can hold and Unicode text cannot


class Tokenizer:
    """One language's text <-> token ids. Adds no <s>, always adds </s>.

    decode(encode(line)) is the line after normalization, with one space for each run of spaces and none at its ends;
    unless a piece is unknown, which byte_fallback rules out. Special symbols written in a line are text like any other,
    and a lone surrogate is read as U+FFFD.
    """

    def __init__(self, model: bytes, lowercase: bool = False, name: str = "tokenizer") -> None:
        """Raises UserError if the bytes are no SentencePiece model or one without <s> or </s>."""
        self.model, self.lowercase = model, lowercase
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError):
            raise UserError(f"{name}: is not a SentencePiece model") from None
        self.unk, self.bos, self.eos = (
            self._processor.unk_id(),
            self._processor.bos_id(),
            self._processor.eos_id(),
        )
        if min(self.bos, self.eos) < 0:
            raise UserError(f"{name}: the SentencePiece model lacks <s> or </s>; train it with bos_id and eos_id")
        size = self._processor.get_piece_size()
        has_pad = self._processor.pad_id() >= 0
        self.pad = self._processor.pad_id() if has_pad else size  # a model without padding gets one id more
        self.vocab_size = size if has_pad else size + 1

    @classmethod
    def load(cls, path: Path, lowercase: bool = False) -> "Tokenizer":
        """Raises UserError if the file is missing or no SentencePiece model."""
        try:
            return cls(read_bytes(path), lowercase, str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot read the tokenizer ({error.strerror})") from None

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Lines -> ids, each ending in </s>."""
        encoded: list[list[int]] = self._processor.encode(self._prepare(lines), add_eos=True)
        return encoded

    def sample(self, lines: Sequence[str], alpha: float, seeds: Sequence[int]) -> list[list[int]]:
        """Like encode, with segmentations drawn anew (BPE-dropout, or subword regularisation for unigram models),
        the same for a seed in every process.

        Each line has its own seed, of 32 bits: what is drawn for it does not depend on the lines beside it.
        """
        assert self._sampler is not None
        normalised = self._processor.normalize(self._prepare(lines))
        return [
            [*self._sampler.draw(line, alpha, seed), self.eos] for line, seed in zip(normalised, seeds, strict=True)
        ]

    def samples(self) -> bool:
        """Can this model draw segmentations? (Those of BPE, if they use all their pieces, and of unigrams.)"""
        return self._sampler is not None

    @cached_property
    def _sampler(self) -> Sampler | None:
        return sampler(self.model)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text in one line, without special symbols."""
        text: str = self._processor.decode([i for i in ids if i not in {self.pad, self.bos, self.eos}])
        return _with_spaces(text.removeprefix(WORD_START))  # bytes can spell ends of lines and the mark of a space

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Ids -> pieces, "▁" before a word's first, and </s> where it is."""
        return ["<pad>" if i == self.pad else self._processor.id_to_piece(int(i)) for i in ids]

    def surfaces(self, lines: Sequence[str]) -> list[list[str]]:
        """Lines -> pieces as `encode` cuts them, unknown ones as they are written instead of <unk>; </s> last.

        "▁" stands for spaces of the line: see `restore_spaces`.
        """
        cut: list[list[str]] = self._processor.encode(self._prepare(lines), out_type=str, add_eos=True)
        return [self.restore_spaces(line, pieces) for line, pieces in zip(lines, cut, strict=True)]

    def restore_spaces(self, line: str, pieces: list[str]) -> list[str]:
        """The pieces of a line, with "▁" only for spaces of the line: their words are those that spaces separate.

        Other white space that normalization makes a space, such as a no-break space, stands as in the line.
        """
        if line.isascii() and line.isprintable():
            return pieces
        (prepared,) = self._prepare([line])
        written = line.lower() if self.lowercase else line  # has as many characters
        text, origins = self._processor.normalize(prepared, with_offsets=True)
        marks = iter([i for i, char in enumerate(text) if char == WORD_START])

        def spaces(match: re.Match[str]) -> str:
            i = next(marks)
            span = _with_no_break(written[origins[i] if i else 0 : origins[i + 1]])
            before, space, after = re.sub(" +", WORD_START, span).rpartition(WORD_START)
            if i == 0 and not span:
                space = WORD_START  # SentencePiece writes one before a line
            return f"{before}{match[1]}{space}{after}"

        return re.sub(f"(\n?){WORD_START}", spaces, "\n".join(pieces)).split("\n")

    def _prepare(self, lines: Sequence[str]) -> list[str]:
        return [clean(line, self.lowercase) for line in lines]


def clean(line: str, lowercase: bool) -> str:
    """The line as SentencePiece is to see it, in training and after."""
    line = _with_spaces(line.lower() if lowercase else line)
    return line if line.isascii() else LONE_SURROGATES.sub("\ufffd", line)


def _with_spaces(text: str) -> str:
    """Spaces for SentencePiece's own mark of one, and for ends of lines."""
    return text.replace(WORD_START, " ").replace("\n", " ").replace("\r", " ")


def _with_no_break(text: str) -> str:
    """No-break spaces for what `_with_spaces` replaces: none of it separates words."""
    return re.sub(f"[{WORD_START}\r\n]", "\xa0", text)


class Tokenizers(NamedTuple):
    """Both languages' tokenizers; one and the same object where the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    def save(self, directory: Path) -> None:
        """tokenizer.model, or source.model and target.model."""
        if self.source is self.target:
            write_atomically(directory / "tokenizer.model", self.source.model)
        else:
            write_atomically(directory / "source.model", self.source.model)
            write_atomically(directory / "target.model", self.target.model)

    @classmethod
    def load(cls, directory: Path, lowercase: bool) -> "Tokenizers":
        """What `save` wrote. Raises UserError."""
        joint = directory / "tokenizer.model"
        if joint.exists():
            tokenizer = Tokenizer.load(joint, lowercase)
            return cls(tokenizer, tokenizer)
        return cls(
            Tokenizer.load(directory / "source.model", lowercase),
            Tokenizer.load(directory / "target.model", lowercase),
        )


def copy_unknown(pieces: Sequence[str], weights: NDArray[np.float32], source: Sequence[str]) -> str:
    """Text in which each "<unk>" is the source piece it attends to most (Luong et al. 2015, 4).

    pieces (T,), weights (T, S), source (S,) as it is written, "▁" before a word's first piece. "</s>" is not copied,
    and a word that attends to nothing else stays "<unk>".
    """
    real = np.where([piece == END for piece in source], 0.0, weights)
    words = [source[i] if row.any() else UNKNOWN for i, row in zip(real.argmax(1), real, strict=True)]
    known = [word if piece == UNKNOWN else piece for piece, word in zip(pieces, words, strict=True)]
    return "".join(piece for piece in known if piece != END).replace(WORD_START, " ").strip()
