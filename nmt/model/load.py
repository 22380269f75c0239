"""A configuration's model for its tokenizers, its weights from a checkpoint, and the model of one run or several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.tokenizer import Tokenizers
from nmt.model.build import build_model
from nmt.model.ensemble import Ensemble
from nmt.model.seq2seq import Seq2Seq
from nmt.run import RunDirectory


def new_model(config: schema.TrainConfig, tokenizers: Tokenizers) -> Seq2Seq:
    """A model for these vocabularies, with random weights."""
    source, target = tokenizers
    return build_model(config, source.vocab_size, target.vocab_size, (source.pad, target.pad))


def load_weights(model: Seq2Seq, path: Path) -> dict[str, Any]:
    """Fill a model from a checkpoint; returns all that the checkpoint holds. Raises UserError if it does not fit."""
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; has the run reached its first validation?")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
    except Exception:  # a broken file can raise nearly anything
        raise UserError(f"{path}: is corrupt, or the checkpoint of another model") from None
    return checkpoint


def load_runs(
    runs: Sequence[RunDirectory], configs: Sequence[schema.TrainConfig], checkpoint: str
) -> tuple[Seq2Seq | Ensemble, Tokenizers]:
    """The model of a run, or of several the ensemble. Raises UserError unless all have the same tokenizers."""
    tokenizers = [
        Tokenizers.load(run.path, config.tokenizer.lowercase) for run, config in zip(runs, configs, strict=True)
    ]
    for run, others in zip(runs, tokenizers, strict=True):
        _refuse_others(runs[0], tokenizers[0], run, others)
    models = [new_model(config, tokenizers[0]) for config in configs]
    for run, model in zip(runs, models, strict=True):
        load_weights(model, run.checkpoints / f"{checkpoint}.pt")
    return models[0] if len(models) == 1 else Ensemble(models), tokenizers[0]


def _refuse_others(first: RunDirectory, own: Tokenizers, run: RunDirectory, others: Tokenizers) -> None:
    for side, mine, its in zip(Tokenizers._fields, own, others, strict=True):
        if (mine.model, mine.lowercase) != (its.model, its.lowercase):
            raise UserError(
                f"run=[{first.path},{run.path}]: the runs have different {side} tokenizers; an ensemble needs runs of "
                "one corpus and one tokenizer"
            )
