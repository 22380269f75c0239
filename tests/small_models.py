"""Models of a few units in float64, combinations of their parts, and a batch of three sentences for them."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pairwise import slow_but_pairwise
from torch import Tensor

from nmt.config.schema.model import Model
from nmt.model.build import build_model
from nmt.model.decoder import Decoded
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.products import Weight
from nmt.training.losses import likelihood
from nmt.translate.search_model import SearchModel

LIKELIHOOD = partial(likelihood, smoothing=0.1)
V, PAD, BOS, EOS = 13, 0, 2, 3
NONE = {"kind": "none", "context": "first_state"}
CHO = {"kind": "none", "context": "every_step"}


SOFTMAX = {"kind": "softmax", "temperature": 1.0}
HEADS = {"kind": "heads", "heads": 2, "dim": 4}
SELF_ATTENTION = {"kind": "attention", "layers": 2, "score": {"kind": "scaled_dot"}, "dropout": 0.0}
SELF_ATTENTION |= {"window": {"kind": "local_m", "reach": 1}, "normalizer": SOFTMAX, "projection": HEADS}


def attention(score: str, **parts: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "additive": {"dim": 6},
        "normed_additive": {"dim": 6},
        "location_aware": {"dim": 6, "filters": 2, "width": 3},
        "gaussian_mixture": {"components": 2},
    }
    plain = {"window": "global", "alignment": "expected", "coverage": "none", "projection": "none"}
    chosen = {"score": {"kind": score, **settings.get(score, {})}, "normalizer": SOFTMAX, "dropout": 0.0}
    return {"kind": "attention", **{part: {"kind": kind} for part, kind in plain.items()}, **chosen, **parts}


MARGINAL = {"kind": "marginal", "top_k": None, "min_share": 0.0}
VARIATIONAL = MARGINAL | {"kind": "variational", "estimator": "enumerate", "dim": 5, "kl_weight": 1.0}
POSTERIOR = MARGINAL | {"kind": "posterior", "prior_share": 0.25}


def values(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the sections of a small model, in which section__key=value or section=values replace the default."""
    network = {"cell": "gru", "layers": 1, "dropout": 0.0, "residual": False}
    reading = {"bidirectional": True, "self_attention": {"kind": "none"}}
    predicting = {"readout": "deep", "readout_dim": 6, "lexical": False, "copy": False, "fixnorm": False}
    feeding = {"attend": "after", "input_feeding": False, "bridge": "final"}
    config: dict[str, Any] = {
        "embedding": {"dim": 6, "dropout": 0.0, "word_dropout": 0.0, "tie_source_target": True, "tie_output": True},
        "encoder": {**network, "hidden": 4, **reading},
        "decoder": {**network, "hidden": 8, **feeding, **predicting},
        "attention": attention("dot"),
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config[section] = {**config[section], name: value} if name else value
    return config


def model_of(**changes: Any) -> Seq2Seq:  # noqa: ANN401
    return build_model(Model.model_validate(values(**changes)), V, V, (PAD, PAD)).double().eval()


class Bounded:
    """A weight that asserts inputs between -1 and 1."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        assert inputs.abs().max() <= 1
        return torch.nn.functional.linear(inputs, self.weight, bias)


def unpacked(weight: Tensor, bounded: bool = False) -> Weight:
    """Return the weight as it is, or if `bounded` as one that checks its inputs."""
    return Bounded(weight) if bounded else weight


def prepared(model: Seq2Seq, hypotheses: int = 1) -> SearchModel:
    return SearchModel(model, hypotheses, unpacked)


def read_out(model: Seq2Seq, *inputs: Tensor) -> Tensor:
    """Compute readouts from outputs (..., H), contexts (..., M) and words (..., E)."""
    readout = model.decoder.readout
    return readout.activation(readout.proj(torch.cat(inputs, dim=-1)))


def logits_of(model: Seq2Seq, decoded: Decoded) -> Tensor:
    """Compute logits (B, T, V); for a mixture or a model that copies, log-probabilities."""
    return decoded.prediction.logits(model.output.layer())


LENGTHS = torch.tensor([5, 2, 4])
VALID = torch.arange(5) < LENGTHS[:, None]
SOURCE = torch.tensor([[4, 5, 6, 7, EOS], [8, EOS, PAD, PAD, PAD], [9, 10, 11, EOS, PAD]])
TARGET = torch.tensor([[BOS, 4, 5, 6], [BOS, 7, 8, 9], [BOS, 10, 4, 12]])


def slope_equals_difference(model: Seq2Seq, loss: Callable[[], Tensor]) -> None:
    """Compare the slope of the loss along a random direction of all parameters with a finite difference."""
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in parameters]
    gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    step, values = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            torch._foreach_add_(parameters, directions, alpha=sign * step)
            values.append(float(loss()))
    assert abs((values[0] - values[1]) / (2 * step) - slope) < 1e-6 + 1e-5 * abs(slope)


LOCAL_P = {"kind": "local_p", "reach": 1, "dim": 3}
MONOTONIC = {"kind": "monotonic", "noise": 1.0, "initial_offset": 1.0, "outside_training": "stop"}
MOCHA = {"kind": "mocha", "noise": 1.0, "initial_offset": 1.0, "outside_training": "stop", "chunk": 2}
FERTILITY = {"kind": "fertility", "fertility": 0.7}
FIRST_ORDER = {"kind": "first_order", "reach": 2, "monotonic": False}
LINEAR_CHAIN = {"kind": "linear_chain"}
COVERAGE = {"kind": "linear", "loss_weight": 1.0, "loss_start": 0}
FREE = COVERAGE | {"loss_weight": 0.0}  # coverage without the coverage loss


def case(cell: str, layers: int, attend: str, feeding: bool, kind: dict[str, Any], **decoder: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the values that turn the default small model into this case."""
    values = {"layers": layers, "attend": attend, "input_feeding": feeding, **decoder}
    more = {f"decoder__{name}": value for name, value in values.items()}
    return {"encoder__cell": cell, "decoder__cell": cell, "attention": kind, **more}


NETWORKS = [("gru", 1, "maxout", "final"), ("lstm", 2, "attentional", "mean")]
NETWORKS += [("rnn", 2, "deep", "final"), ("lstm", 1, "deep", "final")]
TIMINGS = [("gru", 1, "before", False), ("lstm", 2, "after", False)]
TIMINGS += [("rnn", 1, "between", True), ("gru", 2, "first_layer", False)]
COMBINATIONS = [
    case(
        *(cell, layers, attend, feeding, kind),
        readout=readout,
        bridge=bridge,
        lexical=layers == 2 and kind["kind"] != "none",
        fixnorm=readout == "deep",
        residual=readout == "deep" and layers == 2,
    )
    for (cell, layers, readout, bridge), attend, feeding, kind in itertools.product(
        NETWORKS,
        ["before", "between", "after", "first_layer"],
        [False, True],
        [
            NONE,
            CHO,
            attention("additive"),
            attention("dot"),
            attention("location_aware", coverage=COVERAGE),
            attention("general", window=LOCAL_P, projection=HEADS),
            attention("normed_additive", normalizer=MONOTONIC),
        ],
    )
    if (attend == "after" or kind["kind"] != "none") and (attend != "first_layer" or (layers == 2 and not feeding))
]
COMBINATIONS += [
    case(*timing, kind)
    for timing, kind in itertools.product(
        TIMINGS,
        [
            attention("general", normalizer=LINEAR_CHAIN),
            attention("additive", normalizer=FERTILITY, projection=HEADS),
            attention("dot", normalizer=FERTILITY, coverage=COVERAGE),
            attention("normed_additive", normalizer=MOCHA),
            attention("location_aware", normalizer=MOCHA, projection=HEADS),
            attention("gaussian_mixture"),
        ],
    )
]
GNMT = case("lstm", 4, "first_layer", False, attention("normed_additive"), residual=3)
GNMT |= {"encoder__bidirectional": "first", "encoder__layers": 4, "encoder__residual": 3}
COMBINATIONS += [GNMT, case("gru", 1, "after", False, attention("dot")) | {"encoder__self_attention": SELF_ATTENTION}]
EXPECTED = MOCHA | {"outside_training": "expected"}
COMBINATIONS += [case("gru", 1, "before", False, attention("normed_additive", normalizer=EXPECTED))]
FEW = MARGINAL | {"top_k": 3, "min_share": 0.5}
EXACT_POSTERIOR = POSTERIOR | {"prior_share": 0.0}
AFTER, FED, BEFORE = ("gru", 1, "after", False), ("gru", 1, "after", True), ("lstm", 2, "before", False)
LOCAL_MARGINAL = attention("location_aware", alignment=MARGINAL, window={"kind": "local_m", "reach": 1})
CHAIN = attention("general", alignment=EXACT_POSTERIOR, normalizer=FIRST_ORDER)
LATENT = [
    case(*timing, kind, readout=readout, lexical=lexical, fixnorm=lexical, residual=timing[1] == 2)
    for timing, readout, lexical, kind in [
        (FED, "deep", True, attention("general", alignment=MARGINAL)),
        (BEFORE, "maxout", False, attention("additive", alignment=MARGINAL | {"top_k": 2})),
        (("gru", 1, "between", True), "attentional", True, attention("dot", alignment=MARGINAL)),
        (("lstm", 2, "first_layer", False), "deep", True, attention("additive", alignment=FEW)),
        (("rnn", 1, "after", False), "deep", False, LOCAL_MARGINAL),
        (AFTER, "deep", False, attention("general", alignment=MARGINAL, window=LOCAL_P)),
        (FED, "deep", False, attention("general", alignment=VARIATIONAL)),
        (("lstm", 1, "before", False), "deep", True, attention("additive", alignment=VARIATIONAL | {"top_k": 2})),
        (FED, "deep", False, attention("general", alignment=VARIATIONAL, normalizer=LINEAR_CHAIN)),
        (FED, "deep", True, attention("general", alignment=POSTERIOR)),
        (("lstm", 2, "after", True), "maxout", False, attention("additive", alignment=POSTERIOR | {"top_k": 2})),
        (AFTER, "deep", True, CHAIN),
        (("gru", 1, "before", True), "deep", False, attention("additive", alignment=POSTERIOR, coverage=FREE)),
    ]
]
COMBINATIONS += LATENT
COPYING = [
    case(*timing, kind, readout=readout, lexical=lexical, fixnorm=lexical, copy=True)
    for timing, readout, lexical, kind in [
        (AFTER, "deep", False, attention("dot")),
        (("lstm", 2, "before", True), "maxout", True, attention("additive", coverage=COVERAGE)),
        (("gru", 1, "between", False), "attentional", True, attention("general", projection=HEADS)),
        (("lstm", 2, "first_layer", False), "deep", False, attention("additive", normalizer={"kind": "sparsemax"})),
        (("rnn", 2, "after", True), "deep", True, attention("general", window=LOCAL_P)),
        (AFTER, "maxout", False, attention("normed_additive", normalizer=MOCHA, projection=HEADS)),
        (("lstm", 1, "before", False), "deep", False, attention("dot", normalizer=FERTILITY)),
    ]
]
COMBINATIONS += COPYING


def label(changes: dict[str, Any]) -> str:
    parts = changes["attention"]
    kind = parts["context"] if parts["kind"] == "none" else parts["score"]["kind"]
    for part, plain in (("normalizer", "softmax"), ("alignment", "expected")):
        if parts.get(part, {}).get("kind", plain) != plain:
            kind += f"-{parts[part]['kind']}"
    feed = "-feed" if changes["decoder__input_feeding"] else ""
    feed += "-copy" if changes.get("decoder__copy") else ""
    return f"{changes['encoder__cell']}{changes['decoder__layers']}-{changes['decoder__attend']}{feed}-{kind}"


def choices(changes: dict[str, Any]) -> list[tuple[str, str]]:
    """List the keys and values of a combination, with the attention's components as keys of their own."""
    values = {**changes, **{f"attention.{part}": value for part, value in changes["attention"].items()}}
    return [(key, str(value)) for key, value in values.items() if key != "attention"]


EVERY = slow_but_pairwise(COMBINATIONS, choices)
