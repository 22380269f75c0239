"""Checkpoints: saved, loaded, checked."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmt.config.errors import UserError
from nmt.model.checkpoints import read_checkpoint, same_form, save_checkpoint


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: .safetensors for the weights of a validation, .pt for the state of training."""
    save_checkpoint(path, state)


def load(path: Path) -> dict[str, Any]:
    """Load a checkpoint without executing code in it. Raises UserError if it is damaged."""
    try:
        return read_checkpoint(path)
    except ValueError:
        raise UserError(f"{path}: is corrupt; delete it to train from the start, or restore a copy") from None


def check(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError (or nearly anything) unless a state has the sizes of this model and optimizer, and numbers
    where numbers are expected."""
    own = model.state_dict()
    if not all(same_form(state[name], own) for name in ("model", "updated") if name in state):
        raise ValueError("the weights of another model")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state["optimizer"]["state"].items():
        shapes = {parameters[number].shape, torch.Size([])}
        if any(isinstance(value, Tensor) and value.shape not in shapes for value in values.values()):
            raise ValueError("the optimizer's state is that of another model")
    stopping, (seconds, tokens), (updates, window_tokens, window_seconds) = (
        state[name] for name in ("stopping", "spent", "window")
    )
    counts = [state[name] for name in ("step", "epoch", "position", "validated", "total_steps")]
    counts += [*state["bad"], state["logged_step"] + 1, tokens, window_tokens]
    counts += [stopping["best_step"], stopping["waited"]]
    if any(type(count) is not int or count < 0 for count in counts) or min(seconds, window_seconds) < 0:
        raise ValueError("a count is not a natural number")
    if not isinstance(stopping["best"], float | int | None):
        raise ValueError("the best score is not a number")
    if any(term.dim() or update.keys() != updates[0].keys() for update in updates for term in update.values()):
        raise ValueError("a sum is not a number")
