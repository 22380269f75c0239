"""Updates a model's parameters on one batch after another, and splits batches that do not fit in memory."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.batching import Batch, Batches
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.draws import seed_draws
from nmt.system.distributed import GradientSum, Interrupted, ProcessGroup
from nmt.system.machine import Machine, is_out_of_memory, release_memory
from nmt.training.cuda_graphs import GraphedPasses
from nmt.training.losses import Objective, Value
from nmt.training.optimizer import BadUpdates, MovingAverage, make_optimizer, make_schedule
from nmt.training.stopping import StopSignals

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
        """Update the model on the next batch. A batch that does not fit in memory is split into parts. Raises UserError
        if a single sentence pair does not fit in memory, or if too many updates in a row were skipped."""
        began = time.perf_counter()
        if self.batch_index == len(self.plan):
            self.epoch, self.batch_index = self.epoch + 1, 0
            self.plan = self.batches.epoch(self.epoch)
        indices = self.plan[self.batch_index]
        self.batch_index += 1
        processes, share, global_tokens = self.group.size, indices, None
        if processes > 1:
            share, global_tokens = self.group.share(indices), self.batches.target_tokens(indices, self.epoch)
        contributes = len(share) > 0
        if not contributes:
            # There are fewer sentences than processes. This process computes another one's sentence, so that it joins
            # the collective operations of all; its gradient is left out.
            share = indices[:1]
        size = self.batches.padded_size(indices) / processes

        update: Update | None = None
        for n_parts in self.memory.attempts(-(-len(indices) // processes), size, f"step {self.step + 1}"):
            with self.timed("loading"):
                parts = self.batches.load(share, self.epoch, n_parts)
            with suppress(OutOfMemory):  # then the loop goes on with another number of parts
                update = self.update(parts, global_tokens, contributes)
                break
        assert update is not None
        self.bad.add(update.applied, indices, self.step)
        update = update._replace(seconds=time.perf_counter() - began)
        self.seconds += update.seconds
        self.tokens += update.tokens
        return update

    def update(self, parts: Sequence[Batch], global_tokens: int | None = None, contributes: bool = True) -> Update:
        """Update the parameters on one batch, given in parts: forward, objective, backward, clip, step.

        global_tokens: number of target tokens of the batch on all processes, which divides the gradients; by default
        that of the parts. contributes: False leaves the gradient of this process out, because the parts belong to
        another process (see `next_update`). Raises OutOfMemory on all processes if a part does not fit on one of them;
        the parameters are then unchanged.
        """
        step = self.step + 1
        tokens = sum(part.target_tokens for part in parts) if global_tokens is None else global_tokens
        seed_draws(self.config.seed, step, self.group.rank)
        self._set_rate(step)
        if self.graphed is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.graphed.clear_gradients()

        graphed = self.graphed if self.graphed is not None and self.objective.can_be_recorded(step) else None
        total, terms, fits = torch.zeros((), device=self.machine.device), dict[str, Tensor](), True
        try:
            for part in parts:
                if graphed is None:
                    value = self.forward_backward(part.to(self.machine.device), tokens, step)
                else:
                    value = graphed(part, tokens, step)
                total += value.total
                terms = {name: terms[name] + term if terms else term for name, term in value.terms.items()}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        stop = self.signals.received is not None
        if self.gradient_sum is not None:
            total, terms, fits, stop = self._sum_over_processes(total, terms, fits, stop, contributes)
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
        """Compute the objective of a batch on the device. Adds its gradient, divided by `tokens`, to the gradients of
        the parameters."""
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

    def _sum_over_processes(
        self, total: Tensor, terms: dict[str, Tensor], fits: bool, stop: bool, contributes: bool
    ) -> tuple[Tensor, dict[str, Tensor], bool, bool]:
        """Sum gradients, the objective `total` and loss terms over all processes.

        Returns the sums of total and terms, whether the parts of all processes fit in memory, and whether any process
        was signalled to stop. A process with `fits` or `contributes` False adds nothing to the sums.
        """
        assert self.gradient_sum is not None
        flags = [float(not fits), float(stop)]
        contributes = fits and contributes
        own = [total, *terms.values()] if contributes else []
        failed, stopped, total, *sums = self.gradient_sum([*flags, *own], contributes).unbind()
        any_failed, any_stopped = torch.stack([failed, stopped]).cpu().tolist()
        return total, dict(zip(terms, sums, strict=False)), not any_failed, bool(any_stopped)

    def _set_rate(self, step: int) -> None:
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
        """Return all state that later updates depend on, and the counts and times so far. Random generators are left
        out, because each update seeds them."""
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
        self._set_rate(self.step)  # the rate of the last update, which a log without a further update would show
        self.memory.too_many = float(state["too_many"])
        self.bad.count, self.bad.in_a_row = state["bad"]
        self.seconds, self.tokens = state["spent"]
        self.seconds_of |= {name: float(seconds) for name, seconds in state["seconds_of"].items()}
        self.plan = self.batches.epoch(self.epoch)
        if self.batch_index > len(self.plan):
            raise ValueError(f"batch {self.batch_index} of {len(self.plan)}")


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
