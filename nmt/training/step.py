"""One update of the weights."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import schema
from nmt.data.batching import Batch
from nmt.machine import Machine, is_out_of_memory
from nmt.model.seq2seq import Seq2Seq
from nmt.training.objective import Objective


class Update(NamedTuple):
    """What an update saw."""

    terms: dict[str, Tensor]  # () each, of the objective: sums over target tokens, in nats
    tokens: int
    gradient_norm: Tensor  # () before clipping
    applied: bool  # False: a non-finite loss or gradient, nothing was changed


class Sums:
    """Sums since the last line of the log, kept on the device until they are read."""

    def __init__(self) -> None:
        self.updates: list[dict[str, torch.Tensor]] = []  # of each: the objective's terms and the gradient norm
        self.tokens = 0
        self.seconds = 0.0

    def add(self, update: Update) -> None:
        self.updates.append({**update.terms, "gradient_norm": update.gradient_norm})
        self.tokens += update.tokens

    def means(self) -> dict[str, float]:
        """Of at least one update: terms by target token, the gradient norm by update."""
        names = list(self.updates[0])
        columns = [torch.stack([update[name].float() for update in self.updates]) for name in names]
        totals = torch.stack(columns).cpu().double().sum(1).tolist()
        counts = [len(self.updates) if name == "gradient_norm" else self.tokens for name in names]
        return {name: total / count for name, total, count in zip(names, totals, counts, strict=True)}


class DoesNotFit(Exception):  # noqa: N818
    """Memory does not suffice for a part of a batch."""


class Updater:
    """Forward, backward, clip, step."""

    def __init__(
        self,
        model: Seq2Seq,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        machine: Machine,
    ) -> None:
        self.objective, self.optimizer, self.machine = objective, optimizer, machine
        self.max_grad_norm = torch.inf if max_grad_norm is None else max_grad_norm
        # A policy's baseline learns on its own: its gradient must not use up the limit of the others.
        self.apart = [] if model.policy is None else list(model.policy.parameters())
        self.parameters = [p for p in model.parameters() if not any(p is other for other in self.apart)]
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.precision == "fp16")

    def __call__(self, batches: Sequence[Batch], learning_rate: float, step: int) -> Update:
        """One update from the parts of one batch: each part's gradient is divided by the tokens of all of them.

        Raises DoesNotFit if memory does not suffice for a part; nothing has been changed then but the moving mean of
        rewards that a policy may have as its baseline.
        """
        tokens = sum(batch.target_tokens for batch in batches)
        sentences = sum(len(batch.indices) for batch in batches)
        terms: dict[str, Tensor] = {}
        total = torch.zeros((), device=self.machine.device)
        self.optimizer.zero_grad(set_to_none=True)
        self.set_rate(learning_rate)
        for batch in batches:
            try:
                with self.machine.autocast():
                    part = self.objective(batch.to(self.machine.device), step, tokens / sentences)
                torch.autograd.backward(self.scaler.scale(part.total / tokens))
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    raise DoesNotFit from None
                raise
            total += part.total.detach()
            terms = {name: terms[name] + term if terms else term for name, term in part.terms.items()}
        self.scaler.unscale_(self.optimizer)  # before clipping, so that the norm is the gradient's own
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        nn.utils.clip_grad_norm_(self.apart, self.max_grad_norm)
        applied = bool((norm + total).isfinite())  # one question to the device for both
        if applied:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return Update(terms, tokens, norm.detach(), applied)

    def set_rate(self, learning_rate: float) -> None:
        """Of the next update, applied or not."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate


def make_optimizer(config: schema.Optimizer, model: Seq2Seq) -> torch.optim.Optimizer:
    """The configured optimizer over all parameters.

    Weight decay is for matrices alone: gains, biases and single numbers say how large something is to be, and are too
    few to overfit.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    parameters: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
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
