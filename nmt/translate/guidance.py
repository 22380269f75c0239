"""What a user decides in translations: first tokens, phrases that must or must not appear, where steps attend to.

Shapes: B sentences, S source positions, L steps.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.attention.steering import Steering
from nmt.config.errors import UserError
from nmt.data.tokenizer import Tokenizer
from nmt.translate.search.forbidden import Forbidden

Attend = Mapping[int, int | Sequence[float]]
"""Step from 0 -> the source position to attend to, from 0, or a weight for every position."""

ROUNDING = 1e-3  # of weights that sum to 1


class Guidance(NamedTuple):
    """What a user decides about several translations; `attend` and `forbidden` hold for each of them."""

    prefixes: Sequence[Sequence[int]] = ()  # of each sentence, the tokens it starts with, without </s>; or none at all
    attend: Attend = MappingProxyType({})
    constraints: Sequence[Sequence[Sequence[int]]] = ()  # of each sentence, the phrases it must contain; or none at all
    forbidden: Forbidden | None = None

    def steering(self, lengths: Sequence[int], device: torch.device) -> Steering | None:
        """Lengths of the B sentences -> Steering of L steps, None without steps."""
        if not self.attend:
            return None
        L, S = max(self.attend) + 1, max(lengths)
        weights, steered = torch.zeros(len(lengths), L, S), torch.zeros(len(lengths), L, dtype=torch.bool)
        for step, target in self.attend.items():
            weights[:, step] = _row(target, S)
            steered[:, step] = True
        return Steering(weights.to(device), steered.to(device))


def check_attend(attend: Attend, length: int) -> None:
    """Raises UserError unless these steps can be steered in a source sentence of this many tokens."""
    for step, target in attend.items():
        if step < 0:
            raise UserError(f"attend: step {step} does not exist; steps count from 0")
        if isinstance(target, int):
            if not 0 <= target < length:
                raise UserError(
                    f"attend: step {step} attends to position {target}, but the source has positions 0 to {length - 1}"
                )
            continue
        if len(target) != length:
            raise UserError(f"attend: step {step} has {len(target)} weights for {length} source tokens")
        total = sum(target)
        if not all(weight >= 0 for weight in target) or not math.isfinite(total) or total > 1 + ROUNDING:
            raise UserError(f"attend: the weights of step {step} must not be negative, nor sum to more than 1")


def prefix_tokens(tokenizer: Tokenizer, prefix: str | Sequence[str], field: str = "prefix") -> list[int]:
    """The tokens of a text, or of pieces as in Translation.tokens, without </s>. Raises UserError for an unknown
    piece; `field` names it."""
    if isinstance(prefix, str):
        (tokens,) = tokenizer.encode([prefix])
        return tokens[:-1]
    tokens = []
    for piece in prefix:
        token = tokenizer.id_of(piece)
        if token is None:
            raise UserError(f"{field}: {piece!r} is no piece of the target tokenizer")
        tokens.append(token)
    return tokens


def _row(target: int | Sequence[float], length: int) -> Tensor:
    row = torch.zeros(length)
    if isinstance(target, int):
        row[target] = 1.0
    else:
        row[: len(target)] = torch.tensor(target)
    return row
