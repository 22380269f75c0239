"""Pretrained word vectors as initial embeddings: text files of word2vec, GloVe and fastText.

Shapes: E embedding.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.data.word_alignment import WORD_START
from nmt.model.seq2seq import Seq2Seq

Vector = NDArray[np.float32]  # (E,)


class Found(NamedTuple):
    """How many pieces of a vocabulary have a pretrained vector."""

    pieces: int
    vocabulary: int
    file: str
    content: str  # digest of the vectors, by which two runs with moved files are known to have the same ones

    def describe(self, side: str) -> str:
        """The coverage in words, for the log."""
        return f"{self.pieces} of {self.vocabulary} pieces of the {side} vocabulary have a vector in {self.file}"


@torch.no_grad()
def load_pretrained(model: Seq2Seq, files: Sequence[str | None], tokenizers: Tokenizers) -> dict[str, Found]:
    """Fill the source and target embeddings from a file each (None: leave that side). Returns the coverage by side.

    In a table that both sides share, the target's file fills what the source's left. Raises UserError for files that
    cannot be read, vectors of another size than the embeddings, or if no piece is found.
    """
    found: dict[str, Found] = {}
    filled: dict[int, set[int]] = {}  # tokens, by table
    for side, file, tokenizer in zip(Tokenizers._fields, files, tokenizers, strict=True):
        table: Tensor = getattr(model, f"{side}_embedding").weight
        if file is None:
            continue
        vectors = _of_pieces(file, tokenizer, table.shape[1])
        if not vectors:
            raise UserError(
                f"embedding.pretrained: no piece of the {side} vocabulary has a vector in {file}; is it of this "
                "language?"
            )
        done = filled.setdefault(table.data_ptr(), set())
        for token in vectors.keys() - done:
            table[token] = torch.from_numpy(vectors[token])
        done.update(vectors)
        found[side] = Found(len(vectors), tokenizer.vocab_size, file, _digest(vectors))
    return found


def _digest(vectors: Mapping[int, Vector]) -> str:
    digest = hashlib.sha256()
    for token in sorted(vectors):
        digest.update(f"{token}:".encode() + vectors[token].tobytes())
    return digest.hexdigest()


def _of_pieces(file: str, tokenizer: Tokenizer, dim: int) -> dict[int, Vector]:
    """Vectors of tokens. Of the names of a piece in the file the first counts."""
    tokens = range(tokenizer.vocab_size)
    names = {token: list(_names(piece)) for token, piece in zip(tokens, tokenizer.pieces(tokens), strict=True)}
    vectors = _read(file, {name for known in names.values() for name in known}, dim)
    first = ((token, next((name for name in known if name in vectors), None)) for token, known in names.items())
    return {token: vectors[name] for token, name in first if name is not None}


def _names(piece: str) -> Iterator[str]:
    """Names under which a file may hold the vector of a piece, best first: the piece itself, the word without "▁", the
    lowercased word; for punctuation the piece alone. Nothing for parts of words."""
    if piece.startswith(WORD_START) and len(piece) > 1:
        yield piece
        yield piece[1:]
        yield piece[1:].lower()
    elif not any(character.isalnum() for character in piece):
        yield piece


def _read(file: str, wanted: set[str], dim: int) -> dict[str, Vector]:
    """The vectors of these words; of a repeated word the first one."""
    path = Path(user_path(file))
    vectors: dict[str, Vector] = {}
    number, opened = 0, gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and _is_header(file, line, dim):
                    continue
                word = line.partition(" ")[0]
                if word in wanted and word not in vectors:
                    # A few lines of GloVe have words with spaces.
                    name, *numbers = line.rstrip().rsplit(" ", dim)
                    if name != word:
                        continue
                    vectors[word] = np.array(numbers, dtype=np.float32)
                    if len(numbers) != dim or not np.isfinite(vectors[word]).all():
                        raise ValueError
    except UserError:  # a ValueError, too
        raise
    except ValueError:
        raise UserError(
            f"embedding.pretrained={file}, line {number}: expected a word and {dim} numbers, separated by spaces"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"embedding.pretrained={file}: cannot be read ({reason})") from None
    return vectors


def _is_header(file: str, line: str, dim: int) -> bool:
    """Does the first line hold the numbers of words and dimensions, instead of a vector? Raises UserError unless it
    has this size."""
    fields = line.split()
    header = len(fields) == 2 and all(field.isdigit() for field in fields)  # noqa: PLR2004
    size = int(fields[1]) if header else len(fields) - 1
    if size < 1 or "\ufffd" in line:
        raise UserError(
            f"embedding.pretrained={file}, line 1: is not a text file of vectors (word2vec's text format, GloVe, "
            "fastText's .vec; also as .gz)"
        )
    if size != dim:
        raise UserError(
            f"embedding.pretrained={file}: has vectors of {size} numbers, but embedding.dim={dim}; set "
            f"embedding.dim={size} (with embedding.tie_output=true also decoder.readout_dim={size})"
        )
    return header
