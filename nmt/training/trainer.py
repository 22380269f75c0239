"""Updates of a model's parameters: Trainer makes them, batch after batch; below it what an update needs."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.config.schema import training
from nmt.data.batching import Batch, Batches, Indices
from nmt.model.seq2seq import Seq2Seq
from nmt.system.distributed import GradientSum, Interrupted, ProcessGroup, seed_draws
from nmt.system.machine import Machine, is_out_of_memory, release_memory
from nmt.training.checkpoint import StopSignals, swapped_weights
from nmt.training.graphs import GraphedPasses
from nmt.training.losses import Objective, Value

log = logging.getLogger(__name__)


class Update(NamedTuple):
    """The outcome of an update."""

    terms: dict[str, Tensor]  # () each, of the objective: sums over target tokens, in nats
    tokens: int  # target tokens
    gradient_norm: Tensor  # () before clipping
    applied: bool  # False: the loss or the gradient was not finite, and the parameters stay as they were
    stop: bool = False  # was any process signalled to stop?
    seconds: float = 0.0  # wall time


class Trainer:
    """Updates a model, with batches, objective, optimizer, schedule and moving average."""

    def __init__(
        self,
        config: schema.TrainConfig,
        model: Seq2Seq,
        objective: Objective,
        batches: Batches,
        machine: Machine,
        group: ProcessGroup | None = None,
    ) -> None:
        """group: the processes that train together, by default this one alone."""
        self.config, self.model, self.objective, self.batches = config, model, objective, batches
        self.machine, self.group = machine, group or ProcessGroup()
        self.signals = StopSignals()

        self.plan = batches.epoch(0)
        all_epochs = config.training.max_epochs * len(self.plan)
        self.total_steps = min(config.training.max_steps or all_epochs, all_epochs)
        self.step = 0  # updates made
        self.epoch, self.batch_index = 0, 0  # the epoch in progress, and the batches of it that are done
        self.seconds, self.tokens = 0.0, 0  # of all updates, over all starts of the run

        self.optimizer = make_optimizer(config.optimizer, model)
        self.schedule = Schedule(config.schedule, self.total_steps)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.precision == "fp16")
        self.max_grad_norm = torch.inf if config.training.max_grad_norm is None else config.training.max_grad_norm
        # A policy's baseline has a loss of its own: its gradient must not use up the limit of the others.
        self.policy_parameters = [] if model.policy is None else list(model.policy.parameters())
        policy = set(map(id, self.policy_parameters))
        self.parameters = [parameter for parameter in model.parameters() if id(parameter) not in policy]

        self.gradient_sum: GradientSum | None = None
        if self.group.size > 1:
            self.gradient_sum = GradientSum([*model.parameters()])
        self.graphed: GraphedPasses | None = None
        if config.training.cuda_graphs and machine.device.type == "cuda":
            pads = int(model.source_embedding.padding_idx or 0), objective.loss.pad
            parameters = [*model.parameters()]
            self.graphed = GraphedPasses(
                self.forward_backward, parameters, pads, machine.device, config.training.cuda_graphs
            )

        self.moving_average = MovingAverage(model, config.training.ema_decay)
        self.memory = MemoryLimit(config.training.accumulate, self.release_graphs)
        self.bad = BadUpdates(config.training.max_bad_steps, self.scaler)

    def next_update(self) -> Update:
        """Update the model on the next batch, in as many parts as memory needs.

        Raises UserError if a single sentence pair does not fit in memory, or if too many updates in a row were skipped.
        """
        start = time.perf_counter()
        if self.batch_index == len(self.plan):
            self.epoch, self.batch_index = self.epoch + 1, 0
            self.plan = self.batches.epoch(self.epoch)
        indices = self.plan[self.batch_index]
        self.batch_index += 1
        update = self._fitting_update(indices)
        if update.applied:
            self.bad.in_a_row = 0
        else:
            self.bad.add(indices, self.step)
        update = update._replace(seconds=time.perf_counter() - start)
        self.seconds += update.seconds
        self.tokens += update.tokens
        return update

    def _fitting_update(self, indices: Indices) -> Update:
        """Update on these training pairs, in more and more parts until each fits in memory."""
        processes, share = self.group.size, self.group.share(indices)
        counts = len(share) > 0
        tokens = self.batches.target_tokens(indices, self.epoch) if processes > 1 else None
        size = self.batches.padded_size(indices) / processes
        attempts = self.memory.attempts(-(-len(indices) // processes), size, f"step {self.step + 1}")
        while True:
            batches = self.batches.load(share if counts else indices[:1], self.epoch, next(attempts))
            with suppress(OutOfMemory):
                return self.update(batches, tokens, counts)

    def update(self, batches: Sequence[Batch], tokens: int | None = None, counts: bool = True) -> Update:
        """Update the parameters on one batch, given in parts: forward, loss, backward, clip, step.

        tokens: target tokens of the batch on all processes, by which gradients are divided; by default those of
        `batches`. counts=False: there are fewer sentences than processes; this process repeats one, whose gradient is
        left out. Raises OutOfMemory on all processes if a part does not fit on one of them; nothing has changed then.
        """
        step = self.step + 1
        tokens = sum(batch.target_tokens for batch in batches) if tokens is None else tokens
        seed_draws(self.config.seed, step, self.group.rank)
        self.set_rate(step)
        self._clear_gradients()

        graphed = self.graphed if self.objective.can_be_recorded(step) else None
        total, terms, fits = torch.zeros((), device=self.machine.device), dict[str, Tensor](), True
        try:
            for batch in batches:  # forward, loss, backward
                if graphed is None:
                    value = self.forward_backward(batch.to(self.machine.device), tokens, step)
                else:
                    value = graphed(batch, tokens, step)
                total += value.total
                terms = {name: terms[name] + term if terms else term for name, term in value.terms.items()}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        stop = self.signals.received is not None
        if self.gradient_sum is not None:
            total, terms, fits, stop = self._sum_over_processes(total, terms, fits, stop, counts)
        if not fits:
            raise OutOfMemory

        self.scaler.unscale_(self.optimizer)  # before clipping, so that the norm is that of the true gradient
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        policy_norm = nn.utils.clip_grad_norm_(self.policy_parameters, self.max_grad_norm)
        finite = bool((norm + policy_norm + total).isfinite())  # here the update waits for the device
        if finite:
            self.scaler.step(self.optimizer)
            self.objective.after_update(terms, tokens)
            self.moving_average.update(step)
        self.scaler.update()
        self.step = step
        return Update(terms, tokens, norm.detach(), finite, stop)

    def forward_backward(self, batch: Batch, tokens: Tensor | int, step: int) -> Value:
        """Compute the objective for a batch on the device; add its gradient, divided by `tokens`."""
        with self.machine.autocast():
            value = self.objective(batch, step)
        torch.autograd.backward(self.scaler.scale(value.total / tokens))
        return value._replace(total=value.total.detach())

    def _clear_gradients(self) -> None:
        if self.graphed is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.graphed.clear_gradients()

    def _sum_over_processes(
        self, total: Tensor, terms: dict[str, Tensor], fits: bool, stop: bool, counts: bool
    ) -> tuple[Tensor, dict[str, Tensor], bool, bool]:
        """Sum gradients, total and terms over all processes; find whether all fit in memory and whether any stops.

        Leaves out gradients that are incomplete or do not count.
        """
        assert self.gradient_sum is not None
        flags = [float(not fits), float(stop)]
        counted = [total, *terms.values()] if fits and counts else []
        failed, stopped, total, *sums = self.gradient_sum([*flags, *counted], fits and counts).unbind()
        any_failed, any_stopped = torch.stack([failed, stopped]).cpu().tolist()
        return total, dict(zip(terms, sums, strict=False)), not any_failed, bool(any_stopped)

    def set_rate(self, step: int) -> None:
        """Set the learning rate of an update."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * self.schedule.factor(step)

    def release_graphs(self) -> bool:
        """Stop using CUDA graphs, to free their memory. Returns whether they were in use."""
        released, self.graphed = self.graphed is not None, None
        return released

    def stop_if_signalled(self) -> None:
        """Raise Interrupted on all processes if one of them was signalled."""
        if signum := self.group.largest(self.signals.received or 0):
            raise Interrupted(signum)

    @property
    def epochs(self) -> float:
        """The epochs done, with the share of the one in progress."""
        return self.epoch + self.batch_index / len(self.plan)

    @property
    def at_end_of_epoch(self) -> bool:
        """Are all batches of the epoch done?"""
        return self.batch_index == len(self.plan)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next updates depend on. Draws depend on seed, step and rank alone."""
        return {
            **self.moving_average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "position": self.batch_index,  # so named since the first version
            "too_many": self.memory.too_many,
            "total_steps": self.total_steps,
            "bad": [self.bad.count, self.bad.in_a_row],
            "spent": [self.seconds, self.tokens],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of state_dict. Raises ValueError if the epoch has fewer batches now."""
        self.moving_average.load_state_dict(state)
        options = self.optimizer.state_dict()["param_groups"]  # those of the configuration, not of the file
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": options})
        if state["scaler"]:  # empty if the run had another precision so far
            self.scaler.load_state_dict(state["scaler"])
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.epoch, self.batch_index = state["step"], state["epoch"], state["position"]
        self.set_rate(self.step)
        self.memory.too_many = float(state["too_many"])
        self.bad.count, self.bad.in_a_row = state["bad"]
        self.seconds, self.tokens = state["spent"]
        self.plan = self.batches.epoch(self.epoch)
        if self.batch_index > len(self.plan):
            raise ValueError(f"batch {self.batch_index} of {len(self.plan)}")


class MovingAverage:
    """a_t = d_t a_{t-1} + (1 - d_t) w_t, d_t = min(decay, (1 + t) / (10 + t)), t the number of the update
    (Polyak and Juditsky 1992; exponential, as in Junczys-Dowmunt et al. 2018). The small d_t of the first updates
    forget the random initial weights a_0.

    Averages parameters; buffers are the model's. With a decay of 0, nothing is averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        # Each tied parameter once; in float32, whatever the precision of the matrix products.
        self.parameters: list[Tensor] = list(model.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.parameters] if decay else []

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after update number `step`, from 1."""
        if self.decay:
            torch._foreach_lerp_(self.averages, self.parameters, 1 - min(self.decay, (1 + step) / (10 + step)))

    def in_model(self) -> AbstractContextManager[None]:
        """Give the model the averaged weights within this context."""
        return swapped_weights(self.model, self._weights()) if self.decay else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return entries of a checkpoint: "model", the weights to translate with, and "updated", those to train on."""
        weights = self.model.state_dict()
        return {"model": self._weights(), "updated": weights} if self.decay else {"model": weights}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore model and average from a checkpoint with the entries of state_dict."""
        self.model.load_state_dict(state["model"])
        if self.decay:
            torch._foreach_copy_(self.averages, self.parameters)
            self.model.load_state_dict(state["updated"])

    def _weights(self) -> dict[str, Tensor]:
        """Make the model's state_dict with averaged parameters; tied names share a tensor, as in the model."""
        averages: dict[Tensor, Tensor] = dict(zip(self.parameters, self.averages, strict=True))
        return {name: averages.get(tensor, tensor) for name, tensor in self.model.state_dict(keep_vars=True).items()}


class OutOfMemory(Exception):  # noqa: N818
    """A part of a batch does not fit in memory."""


class MemoryLimit:
    """Decides into how many parts a batch is split: more if a part did not fit in memory, also for later batches.

    The gradients of the parts add up to that of the batch; only dropout draws other masks. With several processes, a
    process splits its share of the batch, and all of them split alike.
    """

    def __init__(self, parts: int, release: Callable[[], bool] = lambda: False) -> None:
        """parts: the fewest (training.accumulate); release: frees other memory, returns whether there was any."""
        self.parts, self.release = parts, release
        self.too_many = math.inf  # padded tokens of the smallest part that did not fit

    def attempts(self, sentences: int, tokens: float, name: str) -> Iterator[int]:
        """Yield the number of parts for a batch of this many sentences and padded tokens; after a failure, the next one
        to try.

        Raises UserError if a single sentence pair did not fit.
        """
        parts = self.parts
        while tokens / parts >= self.too_many and parts < sentences:
            parts *= 2
        while True:
            yield parts
            released = self.release()
            release_memory()
            if released:
                log.warning("%s: out of memory: from now on without CUDA graphs", name)
                continue
            self.too_many = min(self.too_many, tokens / parts)
            if parts >= sentences:
                raise UserError(
                    f"{name}: out of memory even with one sentence pair per batch; start a new run with a smaller "
                    "model, a smaller data.max_length or tokenizer.vocab_size, or with precision=bf16"
                )
            parts *= 2
            log.warning(
                "%s: out of memory with %d sentence pairs: from now on, batches of %d or more tokens are processed in "
                "parts (as with training.accumulate)",
                name,
                -(-2 * sentences // parts),
                round(tokens * 2 // parts),
            )


class BadUpdates:
    """Counts updates that were skipped because of a non-finite loss or gradient."""

    def __init__(self, most: int, scaler: torch.amp.GradScaler) -> None:
        """most: how many in a row end the run. With fp16, overflows do not count until the scaler has its scale."""
        self.most, self.scaler = most, scaler
        self.count, self.in_a_row = 0, 0

    def add(self, indices: Indices, step: int) -> None:
        """Count a skipped update on these training pairs. Raises UserError if it is one too many."""
        if self.scaler.is_enabled() and self.scaler.get_scale() > 1:
            return
        self.count += 1
        self.in_a_row += 1
        pairs = ", ".join(map(str, sorted(indices.tolist())))
        log.warning(
            "step %d: non-finite loss or gradient, skipped (pairs %s of the prepared corpus, from 0)", step, pairs
        )
        if self.in_a_row >= self.most:
            raise UserError(
                f"{self.in_a_row} non-finite losses or gradients in a row (training.max_bad_steps): start a new run "
                "with a smaller optimizer.lr or training.max_grad_norm, or with precision=fp32; "
                "training.start_from=DIR takes over the weights of this run's best checkpoint"
            )


def make_optimizer(config: training.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Make the configured optimizer of all parameters.

    Only matrices are decayed: gains, biases and scalars set the size of something and are too few to overfit.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    parameters: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    options = config.model_dump(exclude={"kind"})
    match config:
        case training.Adam():
            kind = torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
            return kind(parameters, **options, fused=True)
        case training.SGD():
            return torch.optim.SGD(parameters, **options)
        case training.Adadelta():
            return torch.optim.Adadelta(parameters, **options)


class Schedule:
    """A factor in [0, 1] of the learning rate for each update: linear warm-up to 1, then as configured."""

    def __init__(self, config: training.Schedule, total_steps: int) -> None:
        """total_steps: the last update, where a cosine ends."""
        self.config, self.total_steps = config, total_steps
        self.reduction = 1.0  # of a plateau schedule so far
        self.waited = 0  # validations without improvement since the last reduction

    def factor(self, step: int) -> float:
        """Return the factor in update number `step`, from 1; 0 before the first."""
        config = self.config
        warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
        since_warmup = max(0, step - config.warmup_steps)
        match config:
            case training.ConstantSchedule():
                return warmup
            case training.InverseSqrtSchedule():
                return warmup * math.sqrt(config.warmup_steps / max(step, config.warmup_steps))
            case training.CosineSchedule():
                progress = min(1.0, since_warmup / max(1, self.total_steps - config.warmup_steps))
                height = 0.5 * (1 + math.cos(math.pi * progress))
                return warmup * (config.min_factor + (1 - config.min_factor) * height)
            case training.StepSchedule():
                drops = 0 if step <= config.start else 1 + (step - config.start - 1) // config.every
                return float(warmup * config.factor**drops)
            case training.PlateauSchedule():
                return warmup * self.reduction

    def observe(self, improved: bool) -> None:
        """Reduce the factor of a plateau schedule if too many validations have not improved."""
        if not isinstance(self.config, training.PlateauSchedule):
            return
        self.waited = 0 if improved else self.waited + 1
        if self.waited > self.config.patience:
            self.reduction = max(self.config.min_factor, self.reduction * self.config.factor)
            self.waited = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return what a checkpoint must store: a plateau's reduction and its validations without improvement."""
        return {"reduction": self.reduction, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore the result of state_dict."""
        self.reduction, self.waited = float(state["reduction"]), int(state["waited"])
