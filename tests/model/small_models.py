"""Models of a few units in float64, and a batch of three sentences for them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nmt.config.schema.model import Model
from nmt.model.build import build_model
from nmt.model.decoder import Decoded
from nmt.model.seq2seq import Seq2Seq
from nmt.training.losses import likelihood

LIKELIHOOD = partial(likelihood, smoothing=0.1)
V, PAD, BOS, EOS = 13, 0, 2, 3
NONE = {"kind": "none", "context": "first_state"}
CHO = {"kind": "none", "context": "every_step"}


SELF_ATTENTION = {
    "kind": "attention",
    "layers": 2,
    "score": {"kind": "scaled_dot"},
    "window": {"kind": "local_m", "reach": 1},
    "normalizer": {"kind": "softmax", "temperature": 1.0},
    "projection": {"kind": "heads", "heads": 2, "dim": 4},
    "dropout": 0.0,
}


def attention(score: str, **parts: dict[str, Any]) -> dict[str, Any]:
    extra = {
        "additive": {"dim": 6},
        "normed_additive": {"dim": 6},
        "location_aware": {"dim": 6, "filters": 2, "width": 3},
        "gaussian_mixture": {"components": 2},
    }
    return {
        "kind": "attention",
        "score": {"kind": score, **extra.get(score, {})},
        "window": {"kind": "global"},
        "normalizer": {"kind": "softmax", "temperature": 1.0},
        "alignment": {"kind": "expected"},
        "coverage": {"kind": "none"},
        "projection": {"kind": "none"},
        "dropout": 0.0,
        **parts,
    }


MARGINAL = {"kind": "marginal", "top_k": None, "min_share": 0.0}
VARIATIONAL = {
    "kind": "variational",
    "top_k": None,
    "min_share": 0.0,
    "estimator": "enumerate",
    "dim": 5,
    "kl_weight": 1.0,
}
POSTERIOR = {"kind": "posterior", "top_k": None, "min_share": 0.0, "prior_share": 0.25}


def values(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    config: dict[str, Any] = {
        "embedding": {
            "dim": 6,
            "dropout": 0.0,
            "word_dropout": 0.0,
            "tie_source_target": True,
            "tie_output": True,
        },
        "encoder": {
            "cell": "gru",
            "hidden": 4,
            "layers": 1,
            "bidirectional": True,
            "dropout": 0.0,
            "self_attention": {"kind": "none"},
            "residual": False,
        },
        "decoder": {
            "cell": "gru",
            "hidden": 8,
            "layers": 1,
            "dropout": 0.0,
            "attend": "after",
            "input_feeding": False,
            "readout": "deep",
            "readout_dim": 6,
            "lexical": False,
            "copy": False,
            "fixnorm": False,
            "bridge": "final",
            "residual": False,
        },
        "attention": attention("dot"),
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            config[section][name] = value
        else:
            config[section] = value
    return config


def model_of(**changes: Any) -> Seq2Seq:  # noqa: ANN401
    return build_model(Model.model_validate(values(**changes)), V, V, (PAD, PAD)).double().eval()


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
