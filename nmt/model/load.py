"""Models of runs: from configuration and tokenizers, with the weights of a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.tokenizer import Tokenizers
from nmt.model.build import build_model, build_unfilled
from nmt.model.ensemble import Ensemble
from nmt.model.seq2seq import Seq2Seq
from nmt.model.weights import BEST, LAST, read_checkpoint
from nmt.system.run import RunDirectory

FILES = {"best": BEST, "last": LAST}
UNFIT = "is corrupt, or the checkpoint of another model"


def new_model(config: schema.TrainConfig, tokenizers: Tokenizers) -> Seq2Seq:
    """A model for these vocabularies, with random weights."""
    return build_model(config, *_sizes(tokenizers))


def _sizes(tokenizers: Tokenizers) -> tuple[int, int, tuple[int, int]]:
    source, target = tokenizers
    return source.vocab_size, target.vocab_size, (source.pad, target.pad)


def load_weights(model: Seq2Seq, path: Path) -> None:
    """Fill a model from a checkpoint. Raises UserError if it does not fit."""
    checkpoint = _read(path)
    _check_fit(model, checkpoint, path)
    model.load_state_dict(checkpoint["model"])


def load_model(config: schema.TrainConfig, tokenizers: Tokenizers, path: Path) -> tuple[Seq2Seq, dict[str, Any]]:
    """A model with the weights of a checkpoint, and the checkpoint. Raises UserError if the two do not fit.

    The shapes are compared before the model is allocated, so a configuration cannot ask for more memory than the
    checkpoint has.
    """
    checkpoint = _read(path)
    weights = checkpoint.get("model")
    if isinstance(weights, dict) and max(config.encoder.layers, config.decoder.layers) <= len(weights):
        sizes = _sizes(tokenizers)
        with torch.device("meta"):
            outline = build_unfilled(config, *sizes)
        _check_fit(outline, checkpoint, path)
        model = build_unfilled(config, *sizes)
        model.load_state_dict(weights)
        return model, checkpoint
    raise UserError(f"{path}: {UNFIT}")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; has the run reached its first validation?")
    try:
        return read_checkpoint(path)
    except ValueError:
        raise UserError(f"{path}: {UNFIT}") from None


def _check_fit(model: Seq2Seq, checkpoint: dict[str, Any], path: Path) -> None:
    """Raises UserError unless a checkpoint has the model's weights, all finite, and its step and scores."""
    weights = checkpoint.get("model", {})
    if not same_form(weights, model.state_dict()):
        raise UserError(f"{path}: {UNFIT}")
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise UserError(f"{path}: has weights that are infinite or not a number; take another checkpoint")
    step, scores = checkpoint.get("step"), checkpoint.get("scores", {})  # last.pt has no scores
    if type(step) is not int or not isinstance(scores, dict):
        raise UserError(f"{path}: {UNFIT}")
    if not all(isinstance(score, float | int) for score in scores.values()):
        raise UserError(f"{path}: {UNFIT}")


def same_form(weights: Any, own: dict[str, Tensor]) -> bool:  # noqa: ANN401
    """Do these weights have the names, shapes and types of a model's own?"""
    if not isinstance(weights, dict) or weights.keys() != own.keys():
        return False
    return all(
        isinstance(weight, Tensor) and (weight.shape, weight.dtype) == (own[name].shape, own[name].dtype)
        for name, weight in weights.items()
    )


def load_runs(
    runs: Sequence[RunDirectory], configs: Sequence[schema.TrainConfig], checkpoint: str
) -> tuple[Seq2Seq | Ensemble, Tokenizers]:
    """The model of one run, or the ensemble of several, from their "best" or "last" checkpoints.

    Raises UserError unless all runs have the same tokenizers.
    """
    for run in runs:
        if run.is_archive and checkpoint != "best":
            raise UserError(
                f"checkpoint={checkpoint}: {run.source} is an archive, which has one checkpoint; leave it out"
            )
    tokenizers = [
        Tokenizers.load(run.path, config.tokenizer.lowercase) for run, config in zip(runs, configs, strict=True)
    ]
    for run, others in zip(runs, tokenizers, strict=True):
        _refuse_other_tokenizers(runs[0], tokenizers[0], run, others)
    models = [
        load_model(config, tokenizers[0], run.checkpoints / FILES.get(checkpoint, f"{checkpoint}.pt"))[0]
        for run, config in zip(runs, configs, strict=True)
    ]
    return models[0] if len(models) == 1 else Ensemble(models), tokenizers[0]


def _refuse_other_tokenizers(first: RunDirectory, own: Tokenizers, run: RunDirectory, others: Tokenizers) -> None:
    for side, mine, other in zip(Tokenizers._fields, own, others, strict=True):
        if not mine.same_as(other):
            raise UserError(
                f"run=[{first.source},{run.source}]: the runs have different {side} tokenizers; an ensemble needs "
                "runs of the same corpus and tokenizer"
            )
