"""Updates a model's parameters: the `Trainer`, then its moving average and memory limit."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.batching import Batch, Batches, Indices
from nmt.model.seq2seq import Seq2Seq
from nmt.system.distributed import GradientSum, Interrupted, ProcessGroup, seed_draws
from nmt.system.machine import Machine, is_out_of_memory, release_memory
from nmt.training.checkpoint import StopSignals, use_weights
from nmt.training.graphs import GraphedPasses
from nmt.training.losses import Objective, Value
from nmt.training.optimizer import make_optimizer, make_schedule

log = logging.getLogger(__name__)


class Update(NamedTuple):
    """The outcome of an update."""

    terms: dict[str, Tensor]  # loss terms by name, each () in nats: the sum over the target tokens
    tokens: int  # target tokens of the batch, on all processes
    gradient_norm: Tensor  # () before clipping, without the parameters of a hard attention's policy
    applied: bool  # False if the objective or a gradient was not finite; the parameters are then unchanged
    stop: bool = False  # has any process received a signal to stop?
    seconds: float = 0.0  # wall time of the update


class Trainer:
    """Updates a model on one batch after another; holds the optimizer, the schedule and the moving average."""

    def __init__(
        self,
        config: schema.TrainConfig,
        model: Seq2Seq,
        objective: Objective,
        batches: Batches,
        machine: Machine,
        group: ProcessGroup | None = None,
    ) -> None:
        """group: the processes that train together; by default, this process trains alone."""
        self.config, self.model, self.objective, self.batches = config, model, objective, batches
        self.machine, self.group = machine, group or ProcessGroup()
        self.signals = StopSignals()

        self.plan = batches.epoch(0)
        all_epochs = config.training.max_epochs * len(self.plan)
        self.total_steps = min(config.training.max_steps or all_epochs, all_epochs)
        self.step = 0  # number of updates made
        self.epoch, self.batch_index = 0, 0  # epoch in progress, and how many of its batches are done
        self.seconds, self.tokens = 0.0, 0  # wall time and target tokens of all updates since the run first started
        # Seconds spent on three things since the run first started. `seconds` above includes loading batches and
        # recording CUDA graphs, but not validation.
        self.seconds_of = dict.fromkeys(("loading", "recording", "validation"), 0.0)

        self.optimizer = make_optimizer(config.optimizer, model)
        self.schedule = make_schedule(config.schedule, self.total_steps)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.precision == "fp16")
        self.max_grad_norm = torch.inf if config.training.max_grad_norm is None else config.training.max_grad_norm
        # The learned baseline of a policy has a separate loss. Its gradient is clipped separately too, because in a
        # common norm, a large gradient of the baseline would shrink the gradients of the other parameters.
        self.policy_parameters = [] if model.policy is None else list(model.policy.parameters())
        policy = set(map(id, self.policy_parameters))
        self.parameters = [parameter for parameter in model.parameters() if id(parameter) not in policy]

        self.gradient_sum: GradientSum | None = None
        if self.group.size > 1:
            self.gradient_sum = GradientSum([*model.parameters()])
        self.graphed: GraphedPasses | None = None
        if config.training.cuda_graphs and machine.device.type == "cuda":
            pads = int(model.source_embedding.padding_idx or 0), objective.token_loss.pad
            parameters, limit = [*model.parameters()], config.training.cuda_graphs
            timed = partial(self.timed, "recording")
            self.graphed = GraphedPasses(self.forward_backward, parameters, pads, machine.device, limit, timed=timed)

        self.moving_average = MovingAverage(model, config.training.ema_decay)
        self.memory = MemoryLimit(config.training.accumulate, self.release_graphs)
        self.bad = BadUpdates(config.training.max_bad_steps, self.scaler)

    def next_update(self) -> Update:
        """Update the model on the next batch. A batch that does not fit in memory is split into parts.

        Raises UserError if a single sentence pair does not fit in memory, or if too many updates in a row were skipped.
        """
        start = time.perf_counter()
        if self.batch_index == len(self.plan):
            self.epoch, self.batch_index = self.epoch + 1, 0
            self.plan = self.batches.epoch(self.epoch)
        indices = self.plan[self.batch_index]
        self.batch_index += 1
        update = self._update_or_retry(indices)
        if update.applied:
            self.bad.in_a_row = 0
        else:
            self.bad.add(indices, self.step)
        update = update._replace(seconds=time.perf_counter() - start)
        self.seconds += update.seconds
        self.tokens += update.tokens
        return update

    def _update_or_retry(self, indices: Indices) -> Update:
        """Update the model once on these training pairs. Repeat the update only if it runs out of memory.

        Before each repetition, MemoryLimit either gives up the CUDA graphs or doubles the number of parts.
        """
        processes, share = self.group.size, self.group.share(indices)
        counts = len(share) > 0
        tokens = self.batches.target_tokens(indices, self.epoch) if processes > 1 else None
        size = self.batches.padded_size(indices) / processes
        attempts = self.memory.attempts(-(-len(indices) // processes), size, f"step {self.step + 1}")
        # The body usually runs once and returns. It runs again only after `suppress` has caught OutOfMemory.
        while True:
            with self.timed("loading"):
                count = next(attempts)
                parts = self.batches.load(share if counts else indices[:1], self.epoch, count)
            with suppress(OutOfMemory):
                return self.update(parts, tokens, counts)

    def update(self, batches: Sequence[Batch], tokens: int | None = None, counts: bool = True) -> Update:
        """Update the parameters on one batch, given in parts: forward, objective, backward, clip, step.

        tokens: number of target tokens of the batch on all processes, which divides the gradients; by default that of
        `batches`. counts: False if this process has no share of the batch, because there are fewer sentences than
        processes. It then computes a sentence of another process, and its gradient is left out. Raises OutOfMemory on
        all processes if a part does not fit on one of them; the parameters are then unchanged.
        """
        step = self.step + 1
        tokens = sum(batch.target_tokens for batch in batches) if tokens is None else tokens
        seed_draws(self.config.seed, step, self.group.rank)
        self.set_rate(step)
        self._clear_gradients()

        graphed = self.graphed if self.objective.can_be_recorded(step) else None
        total, terms, fits = torch.zeros((), device=self.machine.device), dict[str, Tensor](), True
        try:
            for batch in batches:
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

        self.scaler.unscale_(self.optimizer)  # before clipping, which needs the norm of the unscaled gradient
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        policy_norm = nn.utils.clip_grad_norm_(self.policy_parameters, self.max_grad_norm)
        finite = bool((norm + policy_norm + total).isfinite())  # bool() waits for the device
        if finite:
            self.scaler.step(self.optimizer)
            self.objective.after_update(terms, tokens)
            self.moving_average.update(step)
        self.scaler.update()
        self.step = step
        return Update(terms, tokens, norm.detach(), finite, stop)

    def forward_backward(self, batch: Batch, tokens: Tensor | int, step: int) -> Value:
        """Compute the objective of a batch on the device.

        Adds its gradient, divided by `tokens`, to the gradients of the parameters.
        """
        with self.machine.autocast():
            value = self.objective(batch, step)
        torch.autograd.backward(self.scaler.scale(value.total / tokens))
        return value._replace(total=value.total.detach())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of this context to `seconds_of[name]`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_of[name] += time.perf_counter() - began

    def _clear_gradients(self) -> None:
        if self.graphed is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.graphed.clear_gradients()

    def _sum_over_processes(
        self, total: Tensor, terms: dict[str, Tensor], fits: bool, stop: bool, counts: bool
    ) -> tuple[Tensor, dict[str, Tensor], bool, bool]:
        """Sum gradients, the objective `total` and loss terms over all processes.

        Returns the sums of total and terms, whether the parts of all processes fit in memory, and whether any process
        was signalled to stop. A process with `fits` or `counts` False adds nothing to the sums.
        """
        assert self.gradient_sum is not None
        flags = [float(not fits), float(stop)]
        counted = [total, *terms.values()] if fits and counts else []
        failed, stopped, total, *sums = self.gradient_sum([*flags, *counted], fits and counts).unbind()
        any_failed, any_stopped = torch.stack([failed, stopped]).cpu().tolist()
        return total, dict(zip(terms, sums, strict=False)), not any_failed, bool(any_stopped)

    def set_rate(self, step: int) -> None:
        """Set the learning rate for update number `step`."""
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
        """Return the number of epochs done, including the finished fraction of the epoch in progress."""
        return self.epoch + self.batch_index / len(self.plan)

    @property
    def at_end_of_epoch(self) -> bool:
        """Are all batches of the epoch in progress done?"""
        return self.batch_index == len(self.plan)

    def state_dict(self) -> dict[str, Any]:
        """Return all state that later updates depend on, and the counts and times so far.

        Random generators are left out, because each update seeds them.
        """
        return {
            **self.moving_average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "batch_index": self.batch_index,
            "too_many": self.memory.too_many,
            "total_steps": self.total_steps,
            "bad": [self.bad.count, self.bad.in_a_row],
            "spent": [self.seconds, self.tokens],
            "seconds_of": self.seconds_of,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of state_dict. Raises ValueError if the epoch now has fewer batches than were done."""
        self.moving_average.load_state_dict(state)
        # Options such as weight decay come from the configuration, not from the checkpoint.
        options = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": options})
        if state["scaler"]:  # empty if the checkpoint was written without fp16
            self.scaler.load_state_dict(state["scaler"])
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.epoch, self.batch_index = state["step"], state["epoch"], state["batch_index"]
        self.set_rate(self.step)
        self.memory.too_many = float(state["too_many"])
        self.bad.count, self.bad.in_a_row = state["bad"]
        self.seconds, self.tokens = state["spent"]
        self.seconds_of |= {name: float(seconds) for name, seconds in state["seconds_of"].items()}
        self.plan = self.batches.epoch(self.epoch)
        if self.batch_index > len(self.plan):
            raise ValueError(f"batch {self.batch_index} of {len(self.plan)}")


class MovingAverage:
    """Averages the parameters w_t after each update t   (Polyak and Juditsky 1992).

    The average is exponential, as in Junczys-Dowmunt et al. (2018): a_t = d_t a_{t-1} + (1 - d_t) w_t, with
    d_t = min(decay, (1 + t) / (10 + t)). d_t is small in the first updates, so that a_t forgets the initial parameters
    a_0. Buffers are not averaged. With a decay of 0, nothing is averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        # A tied parameter is listed once. Parameters are float32, whatever the precision of matrix products.
        self.parameters: list[Tensor] = list(model.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.parameters] if decay else []

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters to the average after update number `step` (the first update is 1)."""
        if self.decay:
            torch._foreach_lerp_(self.averages, self.parameters, 1 - min(self.decay, (1 + step) / (10 + step)))

    def in_model(self) -> AbstractContextManager[None]:
        """Give the model the averaged parameters within this context; without a decay, change nothing."""
        return use_weights(self.model, self._weights()) if self.decay else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return entries of a checkpoint: "model" holds the parameters to translate with. If these are averages,
        "updated" holds the parameters that training continues from."""
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
        """Make the model's state_dict with averages in place of parameters. Tied parameters share one average."""
        averages: dict[Tensor, Tensor] = dict(zip(self.parameters, self.averages, strict=True))
        return {name: averages.get(tensor, tensor) for name, tensor in self.model.state_dict(keep_vars=True).items()}


class OutOfMemory(Exception):  # noqa: N818
    """Raised when a part of a batch does not fit in memory."""


class MemoryLimit:
    """Decides into how many parts a batch is split.

    Remembers the size of the smallest part that did not fit in memory, and splits later batches into smaller parts from
    the start. The gradients of the parts add up to the gradient of the batch; only random noise differs, such as
    dropout masks. With several processes, each process splits its share of the batch, and all use the same number of
    parts.
    """

    def __init__(self, parts: int, release: Callable[[], bool] = lambda: False) -> None:
        """parts: the smallest number of parts (training.accumulate); release: frees memory that training can do
        without, and returns whether it freed any."""
        self.parts, self.release = parts, release
        self.too_many = math.inf  # size in padded tokens of the smallest part that did not fit

    def attempts(self, sentences: int, tokens: float, name: str) -> Iterator[int]:
        """Yield the number of parts to try for a batch of this many sentences and padded tokens.

        The caller asks for another number only after an attempt has run out of memory. The new number is the same as
        before if `release` freed memory, else twice as large. name: names the update in messages. Raises UserError if a
        single sentence pair did not fit.
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
    """Counts updates that were skipped because the objective or a gradient was not finite."""

    def __init__(self, most: int, scaler: torch.amp.GradScaler) -> None:
        """most: number of skipped updates in a row that ends the run.

        With fp16, a skipped update does not count while the scaler's scale is above 1, because the next
        updates use a lower scale, which may prevent the overflow.
        """
        self.most, self.scaler = most, scaler
        self.count, self.in_a_row = 0, 0

    def add(self, indices: Indices, step: int) -> None:
        """Count a skipped update on these training pairs. Raises UserError if `most` updates in a row were skipped."""
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
