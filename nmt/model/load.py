"""A configuration's model for its tokenizers, and its weights from a checkpoint."""

from pathlib import Path
from typing import Any

import torch

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.tokenizer import Tokenizers
from nmt.model.build import build_model
from nmt.model.seq2seq import Seq2Seq


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
