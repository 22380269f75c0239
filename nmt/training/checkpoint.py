"""Checkpoints: written whole or not at all, loaded as data, with the state of every random generator."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nmt.config.errors import UserError
from nmt.files import write_atomically
from nmt.model.load import same_form
from nmt.model.stored import read_checkpoint

MT19937 = 624  # words of state, of which the position is one


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint: a kill leaves the old one or the new."""
    write_atomically(path, lambda file: torch.save(state, file))


def load(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: nothing in the file is executed. Raises UserError if it is broken."""
    try:
        return read_checkpoint(path)
    except ValueError:
        raise UserError(f"{path}: is corrupt; delete it to train from the start, or restore a copy") from None


def check(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError (or nearly anything) unless what is to go on is of this model's and this optimizer's sizes, and
    what is counted is a number."""
    own = model.state_dict()
    if not all(same_form(state[name], own) for name in ("model", "updated") if name in state):
        raise ValueError("the weights are another model's")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, known in state["optimizer"]["state"].items():
        shapes = {parameters[number].shape, torch.Size([])}
        if any(isinstance(value, Tensor) and value.shape not in shapes for value in known.values()):
            raise ValueError("the optimizer's state is another model's")
    stopping, (seconds, tokens), (updates, more_tokens, more_seconds) = (
        state[name] for name in ("stopping", "spent", "window")
    )
    counts = [state[name] for name in ("step", "epoch", "position", "validated", "total_steps")]
    counts += [*state["bad"], state["logged_step"] + 1, tokens, more_tokens, stopping["best_step"], stopping["waited"]]
    if any(type(count) is not int or count < 0 for count in counts) or min(seconds, more_seconds) < 0:
        raise ValueError("a count is none")
    if not isinstance(stopping["best"], float | int | None):
        raise ValueError("the best score is no number")
    if any(term.dim() or update.keys() != updates[0].keys() for update in updates for term in update.values()):
        raise ValueError("a sum is no number")


def random_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's generators, as plain values and tensors."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "mps": [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """What random_state returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    if keys.shape != (MT19937,) or not 0 <= position <= MT19937:
        raise ValueError("a random generator of another size")  # NumPy would read beyond it
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if state["mps"] and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"][0])


def seed_everything(seed: int) -> None:
    """Start every generator from one seed."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
