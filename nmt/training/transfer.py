"""Weights of a model for another vocabulary: pieces that both have keep their vectors, new ones start from their parts.

Shapes: V new vocabulary, W old vocabulary.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.data.tokenizer import Tokenizer, Tokenizers

TABLES = {
    "source_embedding.weight": "source",
    "target_embedding.weight": "target",
    "output.weight": "target",
    "output.bias": "target",
}
"""Parameters with a row for each token, and the side it belongs to."""


class Origins(NamedTuple):
    """Where the vectors of a new vocabulary come from."""

    kept: dict[int, int]  # new token -> the old token of the same piece
    parts: dict[int, list[int]]  # new token -> the old tokens whose mean it starts from
    new: int  # tokens that share no part with the old vocabulary, and stay random

    def counts(self) -> dict[str, int]:
        """How many tokens start in each way, as the manifest records it."""
        return {"kept": len(self.kept), "from_parts": len(self.parts), "new": self.new}

    def describe(self) -> str:
        """In words."""
        return (
            f"{len(self.kept)} pieces keep their vectors, {len(self.parts)} start from their parts, {self.new} are new"
        )


def transfer_weights(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], old_tokenizers: Tokenizers, new_tokenizers: Tokenizers
) -> tuple[dict[str, Tensor], dict[str, Origins]]:
    """The weights `old` of a model with `old_tokenizers`, made to fit the model of the weights `new`, which has
    `new_tokenizers`; and the origins by side."""
    origins = {
        side: origins_of(new_tokenizer, old_tokenizer)
        for side, new_tokenizer, old_tokenizer in zip(Tokenizers._fields, new_tokenizers, old_tokenizers, strict=True)
    }
    weights = dict(old)
    for name, side in TABLES.items():
        if name in old:
            weights[name] = _moved(old[name], new[name], origins[side])
    return weights, origins


def _moved(old: Tensor, new: Tensor, origins: Origins) -> Tensor:
    """(W, ...), (V, ...) -> (V, ...)."""
    moved = new.clone()
    moved[torch.tensor(list(origins.kept), dtype=torch.int64)] = old[torch.tensor(list(origins.kept.values())).long()]
    for token, parts in origins.parts.items():
        moved[token] = old[parts].mean(0)
    return moved


def origins_of(new: Tokenizer, old: Tokenizer) -> Origins:
    """The origin of each token of a new tokenizer in the vocabulary of an old one. If the old one lowercases, so does
    the comparison."""
    old_ids = {piece: token for token, piece in enumerate(old.pieces(range(old.vocab_size)))}
    longest = max(map(len, old_ids))
    kept: dict[int, int] = {}
    parts: dict[int, list[int]] = {}
    for token, piece in enumerate(new.pieces(range(new.vocab_size))):
        if piece in old_ids:
            kept[token] = old_ids[piece]
        elif found := _segment(piece.lower() if old.lowercase else piece, old_ids, longest):
            parts[token] = found
    return Origins(kept, parts, new.vocab_size - len(kept) - len(parts))


def _segment(piece: str, vocabulary: Mapping[str, int], longest: int) -> list[int]:
    """The tokens of a piece from left to right, the longest that fits each time. A character that the vocabulary lacks
    stands as its bytes, if these are in it."""
    tokens: list[int] = []
    start = 0
    while start < len(piece):
        ends = range(min(len(piece), start + longest), start, -1)
        end = next((end for end in ends if piece[start:end] in vocabulary), None)
        if end is None:
            codes = [f"<0x{byte:02X}>" for byte in piece[start].encode("utf-8", "replace")]
            tokens += [vocabulary[code] for code in codes if code in vocabulary]
            end = start + 1
        else:
            tokens.append(vocabulary[piece[start:end]])
        start = end
    return tokens
