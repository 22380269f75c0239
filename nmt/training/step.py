"""One update of the weights.

Shapes: as in nmt.model.seq2seq.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import schema
from nmt.data.batching import Batch
from nmt.machine import Machine
from nmt.model.seq2seq import Seq2Seq


class Update(NamedTuple):
    """What an update saw. Sums over target tokens, in nats."""

    loss: Tensor  # () smoothed
    nll: Tensor  # ()
    tokens: int
    gradient_norm: Tensor  # () before clipping
    applied: bool  # False: a non-finite gradient, nothing was changed


class Updater:
    """Forward, backward, clip, step."""

    def __init__(
        self,
        model: Seq2Seq,
        optimizer: torch.optim.Optimizer,
        config: schema.Training,
        machine: Machine,
        pad: int,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.machine, self.pad = machine, pad
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.precision == "fp16")

    def __call__(self, batches: Sequence[Batch], learning_rate: float) -> Update:
        """One update from the parts of one batch: each part's gradient is divided by the tokens of all of them."""
        tokens = sum(batch.target_tokens for batch in batches)
        loss, nll = (torch.zeros((), device=self.machine.device) for _ in range(2))
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            moved = batch.to(self.machine.device)
            with self.machine.autocast():
                decoded = self.model(moved.source, moved.lengths, moved.target_in)
                part = self.model.loss(decoded.readouts, moved.target_out, self.pad, self.config.label_smoothing)
            torch.autograd.backward(self.scaler.scale(part.smoothed / tokens))
            loss += part.smoothed.detach()
            nll += part.nll
        self.scaler.unscale_(self.optimizer)  # before clipping, so that the norm is the gradient's own
        limit = self.config.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.parameters, torch.inf if limit is None else limit)
        applied = bool(norm.isfinite())
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return Update(loss, nll, tokens, norm.detach(), applied)


def make_optimizer(config: schema.Optimizer, model: Seq2Seq) -> torch.optim.Optimizer:
    """The configured optimizer over all parameters."""
    parameters = list(model.parameters())
    match config:
        case schema.Adam():
            kind = torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
            return kind(
                parameters,
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=True,
            )
        case schema.SGD():
            return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
        case schema.Adadelta():
            return torch.optim.Adadelta(
                parameters, lr=config.lr, rho=config.rho, eps=config.eps, weight_decay=config.weight_decay
            )
