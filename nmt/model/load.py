"""A configuration's model for its tokenizers, its weights from a checkpoint, and the model of one run or several."""

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
from nmt.model.stored import read_checkpoint
from nmt.run import RunDirectory

BEST, LAST = "best.pt", "last.pt"  # names of checkpoints: of the best validation, and to resume from
ANOTHER = "is corrupt, or the checkpoint of another model"


def new_model(config: schema.TrainConfig, tokenizers: Tokenizers) -> Seq2Seq:
    """A model for these vocabularies, with random weights."""
    return build_model(config, *_sizes(tokenizers))


def _sizes(tokenizers: Tokenizers) -> tuple[int, int, tuple[int, int]]:
    source, target = tokenizers
    return source.vocab_size, target.vocab_size, (source.pad, target.pad)


def load_weights(model: Seq2Seq, path: Path) -> None:
    """Fill a model from a checkpoint. Raises UserError if it does not fit."""
    checkpoint = _read(path)
    _refuse_unfit(model, checkpoint, path)
    model.load_state_dict(checkpoint["model"])


def load_model(config: schema.TrainConfig, tokenizers: Tokenizers, path: Path) -> tuple[Seq2Seq, dict[str, Any]]:
    """A model with the weights of a checkpoint, and all that this holds. Raises UserError if the two do not fit.

    Memory is taken only for a model that has the checkpoint's very weights, whatever sizes a configuration asks for.
    """
    checkpoint = _read(path)
    weights = checkpoint.get("model")
    if isinstance(weights, dict) and max(config.encoder.layers, config.decoder.layers) <= len(weights):
        sizes = _sizes(tokenizers)
        with torch.device("meta"):
            outline = build_unfilled(config, *sizes)
        _refuse_unfit(outline, checkpoint, path)
        model = build_unfilled(config, *sizes)
        model.load_state_dict(weights)
        return model, checkpoint
    raise UserError(f"{path}: {ANOTHER}")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; has the run reached its first validation?")
    try:
        return read_checkpoint(path)
    except ValueError:
        raise UserError(f"{path}: {ANOTHER}") from None


def _refuse_unfit(model: Seq2Seq, checkpoint: dict[str, Any], path: Path) -> None:
    """Raises UserError unless a checkpoint has the model's weights, all of them numbers, and tells where it is from."""
    weights = checkpoint.get("model", {})
    if not same_form(weights, model.state_dict()):
        raise UserError(f"{path}: {ANOTHER}")
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise UserError(f"{path}: has weights that are infinite or not a number; take another checkpoint")
    step, scores = checkpoint.get("step"), checkpoint.get("scores", {})  # last.pt has no scores
    numbers = type(step) is int and isinstance(scores, dict)
    if not numbers or not all(isinstance(each, float | int) for each in scores.values()):
        raise UserError(f"{path}: {ANOTHER}")


def same_form(weights: Any, own: dict[str, Tensor]) -> bool:  # noqa: ANN401
    """Are these tensors of the names, shapes and types of a model's own?"""
    if not isinstance(weights, dict) or weights.keys() != own.keys():
        return False
    return all(
        isinstance(theirs, Tensor) and (theirs.shape, theirs.dtype) == (own[name].shape, own[name].dtype)
        for name, theirs in weights.items()
    )


def load_runs(
    runs: Sequence[RunDirectory], configs: Sequence[schema.TrainConfig], checkpoint: str
) -> tuple[Seq2Seq | Ensemble, Tokenizers]:
    """The model of a run, or of several the ensemble. Raises UserError unless all have the same tokenizers."""
    tokenizers = [
        Tokenizers.load(run.path, config.tokenizer.lowercase) for run, config in zip(runs, configs, strict=True)
    ]
    for run, others in zip(runs, tokenizers, strict=True):
        _refuse_others(runs[0], tokenizers[0], run, others)
    models = [
        load_model(config, tokenizers[0], run.checkpoints / f"{checkpoint}.pt")[0]
        for run, config in zip(runs, configs, strict=True)
    ]
    return models[0] if len(models) == 1 else Ensemble(models), tokenizers[0]


def _refuse_others(first: RunDirectory, own: Tokenizers, run: RunDirectory, others: Tokenizers) -> None:
    for side, mine, its in zip(Tokenizers._fields, own, others, strict=True):
        if (mine.model, mine.lowercase) != (its.model, its.lowercase):
            raise UserError(
                f"run=[{first.path},{run.path}]: the runs have different {side} tokenizers; an ensemble needs runs of "
                "one corpus and one tokenizer"
            )
