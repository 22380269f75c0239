"""Checkpoints: written whole or not at all, loaded as data, with the state of every random generator."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nmt.config.errors import UserError
from nmt.files import write_atomically


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint: a kill leaves the old one or the new."""
    write_atomically(path, lambda file: torch.save(state, file))


def load(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: nothing in the file is executed. Raises UserError if it is broken."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a broken file can raise nearly anything
        raise UserError(f"{path}: is corrupt; delete it to train from the start, or restore a copy") from None
    return state


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
