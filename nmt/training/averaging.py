"""Averages of a model's weights: over its updates, and over several checkpoints.

Updates circle around a minimum; their mean lies nearer to it than any one of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class MovingAverage:
    """a_t = d_t a_{t-1} + (1 - d_t) w_t, d_t = min(decay, (1 + t) / (10 + t)), t the number of the update
    (Polyak and Juditsky 1992; exponential, as in Junczys-Dowmunt et al. 2018). The small d_t of the first updates
    forget the random weights that a_0 is.

    Of parameters; a buffer is taken as it is. With a decay of 0 the average is the weights: nothing is done or kept.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        # Tied ones once; float32, whatever the precision of the matrix products.
        self.parameters: list[Tensor] = list(model.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.parameters] if decay else []

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the update number `step`, from 1, that was applied just now."""
        if self.decay:
            torch._foreach_lerp_(self.averages, self.parameters, 1 - min(self.decay, (1 + step) / (10 + step)))

    def in_model(self) -> AbstractContextManager[None]:
        """Within it the model has the average's weights."""
        return holding(self.model, self._weights()) if self.decay else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint: "model" is what is validated, "updated" what further updates start from."""
        weights = self.model.state_dict()
        return {"model": self._weights(), "updated": weights} if self.decay else {"model": weights}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill model and average from a checkpoint with what state_dict returned."""
        self.model.load_state_dict(state["model"])
        if self.decay:
            torch._foreach_copy_(self.averages, self.parameters)
            self.model.load_state_dict(state["updated"])

    def _weights(self) -> dict[str, Tensor]:
        """The model's state_dict with averages for its parameters; the names of tied ones share a tensor as there."""
        averages: dict[Tensor, Tensor] = dict(zip(self.parameters, self.averages, strict=True))
        return {name: averages.get(own, own) for name, own in self.model.state_dict(keep_vars=True).items()}


@contextmanager
def holding(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it the model has these weights, after it its own again, to the bit.

    Copied, not exchanged: tied parameters stay tied, and cuDNN's recurrent layers stay in one piece of memory.
    """
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(weights)
        yield
    finally:
        model.load_state_dict(own)


def mean(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Of the weights of at least one model (Junczys-Dowmunt et al. 2016; Vaswani et al. 2017, 6.1)."""
    totals: dict[str, Tensor] = {}
    count = 0
    for model in models:  # one at a time in memory
        totals = {name: totals[name] + each if count else each.double() for name, each in model.items()}
        count += 1
    return {name: (total / count).float() for name, total in totals.items()}
