"""All combinations of attention components that the configuration accepts, and small inputs for them.

Shapes: B batch, S source positions, T target positions, Q query, M memory.
"""

import itertools
from functools import cache
from typing import Any, NamedTuple

import torch
from pairwise import slow_but_pairwise
from pydantic import ValidationError
from torch import Tensor

from nmt.attention.attention import Attended, Attention, MultiHeadAttention
from nmt.config.schema import model as schema
from nmt.model.build import build_attention

AnyAttention = Attention | MultiHeadAttention
Made = tuple[AnyAttention, Tensor, Tensor, Tensor]  # query (B, T, Q), states (B, S, M), valid (B, S)

# Sizes differ from each other where the configuration allows it, so that a test notices two swapped axes.
SCORES: dict[str, dict[str, Any]] = {
    "dot": {"kind": "dot"},
    "scaled_dot": {"kind": "scaled_dot"},
    "general": {"kind": "general"},
    "additive": {"kind": "additive", "dim": 3},
    "normed_additive": {"kind": "normed_additive", "dim": 3},
    "concat": {"kind": "concat", "dim": 3, "layers": 1},
    "concat3": {"kind": "concat", "dim": 3, "layers": 3},
    "cosine": {"kind": "cosine", "initial_strength": 10.0},
    "location": {"kind": "location", "max_positions": 7},
    "location_aware": {"kind": "location_aware", "dim": 3, "filters": 2, "width": 5},
    "gaussian_mixture": {"kind": "gaussian_mixture", "components": 2},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "global": {"kind": "global"},
    "local_m": {"kind": "local_m", "reach": 1},
    "local_p": {"kind": "local_p", "reach": 1, "dim": 3},
}
NORMALIZERS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax", "temperature": 0.7},
    "sparsemax": {"kind": "sparsemax"},
    "entmax15": {"kind": "entmax15"},
    "first_order": {"kind": "first_order", "reach": 1, "monotonic": False},
    "ahead": {"kind": "first_order", "reach": 2, "monotonic": True},
    "monotonic": {"kind": "monotonic", "noise": 0.0, "initial_offset": -1.0, "outside_training": "stop"},
    "mocha": {"kind": "mocha", "noise": 0.0, "initial_offset": -1.0, "outside_training": "stop", "chunk": 3},
    "linear_chain": {"kind": "linear_chain"},
    "fertility": {"kind": "fertility", "fertility": 0.6},
}
ALIGNMENTS: dict[str, dict[str, Any]] = {
    "": {"kind": "expected"},
    "sampled": {
        "kind": "sampled",
        "soft_share": 0.0,
        "baseline": "moving",
        "discount": 1.0,
        "weight": 1.0,
        "entropy_weight": 0.0,
    },
    "straight_through": {"kind": "straight_through", "temperature": 0.7},
    "marginal": {"kind": "marginal", "top_k": None, "min_share": 0.0},
}
COVERAGES: dict[str, dict[str, Any]] = {
    "": {"kind": "none"},
    "coverage": {"kind": "linear", "loss_weight": 0.0, "loss_start": 0},
}
PROJECTIONS: dict[str, dict[str, Any]] = {"": {"kind": "none"}, "heads": {"kind": "heads", "heads": 2, "dim": 8}}
DRAWING = {"sampled", "straight_through"}  # alignments that draw positions in training
DRAWS = torch.Generator().manual_seed(1).get_state()


@cache
def configuration(name: str, reach: int = 1) -> schema.ScoredAttention:
    """Build the section for a name such as additive-local_m-softmax-coverage-heads, made of the keys above. Raises
    ValidationError if the configuration refuses the combination."""
    score, window, normalizer, *rest = name.split("-")
    alignment = next((part for part in rest if part in ALIGNMENTS), "")
    local = {} if window == "global" else {"reach": reach}
    return schema.ScoredAttention.model_validate(
        {
            "kind": "attention",
            "score": SCORES[score],
            "window": WINDOWS[window] | local,
            "normalizer": NORMALIZERS[normalizer],
            "alignment": ALIGNMENTS[alignment],
            "coverage": COVERAGES["coverage" if "coverage" in rest else ""],
            "projection": PROJECTIONS["heads" if "heads" in rest else ""],
            "dropout": 0.0,
        }
    )


def _accepted() -> list[str]:
    names = []
    for parts in itertools.product(SCORES, WINDOWS, NORMALIZERS, ALIGNMENTS, COVERAGES, PROJECTIONS):
        name = "-".join(part for part in parts if part)
        try:
            configuration(name)
        except ValidationError:
            continue
        names.append(name)
    return names


def choices(name: str) -> list[tuple[int, str]]:
    """List the components of a name as pairs (place in the name, component)."""
    score, window, normalizer, *rest = name.split("-")
    alignment = next((part for part in rest if part in ALIGNMENTS), "")
    return [*enumerate((score, window, normalizer, alignment, str("coverage" in rest), str("heads" in rest)))]


COMBINATIONS = _accepted()
EVERY = slow_but_pairwise(COMBINATIONS, choices)
# A smaller set: every score; every window with every normalizer, coverage and projection; and every alignment with a
# softmax.
CHOSEN = [f"{score}-global-softmax" for score in SCORES] + [
    name
    for name in COMBINATIONS
    if name.startswith("general-") and ("softmax" in name or not set(ALIGNMENTS) & set(name.split("-")[3:]))
]
LOCAL = [name for name in COMBINATIONS if "local_" in name]


def made(config: schema.ScoredAttention, query_dim: int, memory_dim: int, generator: torch.Generator) -> AnyAttention:
    """Build the attention in float64 with random values for all parameters."""
    attention = build_attention(config, query_dim, memory_dim).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0, 0.8, generator=generator)
    return attention


class Case(NamedTuple):
    """The name of an attention and the shapes of its inputs."""

    name: str
    lengths: tuple[int, ...] = (8, 2, 5)
    padding: int = 0  # number of padded positions after the end of the longest sentence
    steps: int = 3
    training: bool = False
    seed: int = 0
    reach: int = 1
    query_dim: int = 4
    memory_dim: int = 5

    @property
    def config(self) -> schema.ScoredAttention:
        return configuration(self.name, self.reach)

    @property
    def draws(self) -> bool:
        return self.training and self.config.alignment.kind in DRAWING

    def make(self) -> Made:
        generator = torch.Generator().manual_seed(self.seed)
        B, S, M = len(self.lengths), max(self.lengths) + self.padding, self.memory_dim
        Q = M if self.config.needs_equal_sizes else self.query_dim
        attention = made(self.config, Q, M, generator).train(self.training)
        query, states = (
            torch.randn(B, *sizes, generator=generator, dtype=torch.float64) for sizes in ((self.steps, Q), (S, M))
        )
        return attention, query, states, torch.arange(S) < torch.tensor(self.lengths)[:, None]


def attend(attention: AnyAttention, query: Tensor, states: Tensor, valid: Tensor) -> Attended:
    """Attend from the first step on, with the same random numbers at each call."""
    torch.set_rng_state(DRAWS)
    attended: Attended = attention.sequence(query, attention.remember(states, valid))
    return attended
