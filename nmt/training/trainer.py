"""The training loop."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.batching import make_batches
from nmt.data.prepared import Prepared
from nmt.evaluate.bleu import perplexity
from nmt.model.checkpoints import LAST
from nmt.system.distributed import GradientSum, Interrupted, seed_draws
from nmt.system.machine import DTYPES
from nmt.system.run import RunDirectory
from nmt.training import checkpoint
from nmt.training.best import BestCheckpoints, EarlyStopping, MovingAverage
from nmt.training.journal import Journal
from nmt.training.losses.objective import Objective
from nmt.training.optimizer import Schedule, make_optimizer
from nmt.training.signals import StopSignals
from nmt.training.step import BadUpdates, GlobalBatch, LogWindow, MicroBatcher, Update, Updater
from nmt.training.validation import Scoring, Validator
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)


class Pruned(Exception):  # noqa: N818
    """A sweep's search ended this run early; the last checkpoint has everything."""


Observer = Callable[[float, float], bool]
"""Called after each validation with the epochs done and the monitored score; True prunes the run."""


class Trainer:
    """Updates, validations and checkpoints, from the first step or from a checkpoint."""

    def __init__(
        self,
        config: schema.TrainConfig,
        prepared: Prepared,
        translator: Translator,
        scoring: Scoring,
        run: RunDirectory,
        objective: Objective,
        observer: Observer | None = None,
    ) -> None:
        """The translator's group of processes trains together."""
        self.group = translator.group
        self.objective, self.observer = objective, observer or (lambda *_: False)
        self.config, self.prepared, self.translator, self.run = config, prepared, translator, run
        self.model = translator.single
        training, validation = config.training, config.validation
        self.train_batches = make_batches(prepared, "train", config, config.tokenizer.sampling_by_side)
        split, batches = prepared.splits["validation"], make_batches(prepared, "validation", config)
        self.signals = StopSignals()
        self.validator = Validator(split, batches, translator, scoring, validation, self.signals.check)
        self.optimizer = make_optimizer(config.optimizer, self.model)
        self.updater = Updater(
            self.model, objective, self.optimizer, training.max_grad_norm, translator.machine, training.cuda_graphs
        )
        if self.group.size > 1:
            self.updater.gradient_sum = GradientSum([*self.model.parameters()], DTYPES[training.reduce_dtype])
        self.micro_batcher = MicroBatcher(training.accumulate, self.updater.release_graphs)
        self.moving_average = MovingAverage(self.model, training.ema_decay)
        self.plan = self.train_batches.epoch(0)
        all_epochs = training.max_epochs * len(self.plan)
        self.total_steps = min(training.max_steps or all_epochs, all_epochs)
        self.schedule = Schedule(config.schedule, self.total_steps)
        self.stopping = EarlyStopping(validation.monitor, validation.patience)
        self.best = BestCheckpoints(run.checkpoints, validation.monitor, training.average_best, self.group)
        self.step, self.epoch, self.position = 0, 0, 0  # position: batches of this epoch processed
        self.bad = BadUpdates(training.max_bad_steps, self.updater.scaler)
        self.validated = 0  # the step of the last validation
        self.logged_step = -1  # the journal is complete up to this step; later lines of a killed run are removed
        self.seconds, self.tokens = 0.0, 0  # of updates, over all starts of the run
        self.window, self.saved_at = LogWindow(), time.monotonic()
        self.schedule_has_moved = False  # resumed with another number of updates than before

    def fit(self, open_journal: Callable[[int, int, int, int], Journal]) -> None:
        """Train to the end. open_journal is called with the last four arguments of Journal.

        Raises Interrupted at a signal, Pruned if the observer says so, UserError after too many bad gradients.
        """
        self.journal = open_journal(self.logged_step, self.validated, self.step, self.total_steps)
        if first := self.logged_step < 0:
            self.journal.config(self.config.model_dump(mode="json"))
        try:
            with self.signals.saving(self._save):
                if first and self.config.training.start_from is not None:
                    self._validate()  # the start is the best checkpoint until a better one is found
                    self.logged_step = 0
                    self._save()
                if self.validated < self.step or self._finished():  # stopped before a validation, or the end has moved
                    self._after_update()
                while not self._finished():
                    stop = self.update()
                    self.journal.advance()
                    if stop:
                        self.stop_if_signalled()
                    self._after_update()
                self.stop_if_signalled()
            if self.stopping.exhausted:
                waited = f"{self.stopping.monitor} has not improved in {self.stopping.waited} validations"
                log.info("stopped early: %s (validation.patience); best at step %d", waited, self.stopping.best_step)
        finally:
            self.updater.release_graphs()
            self.journal.close()

    def resume(self) -> bool:
        """Continue from the last checkpoint, if there is one. Raises UserError if it does not fit the run."""
        path = self.run.checkpoints / LAST
        if not path.exists():
            return False
        state = checkpoint.load(path)
        try:
            self._load_state(state)
        except Exception as error:  # a damaged file can raise nearly anything
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{path}: does not fit this run ({reason})") from None
        self.best.remove_superseded()  # the run may have been killed before it did
        return True

    def _finished(self) -> bool:
        return self.step >= self.total_steps or self.stopping.exhausted

    def update(self) -> bool:
        """The next update. Returns whether any process was signalled to stop."""
        start = time.perf_counter()
        if self.position == len(self.plan):
            self.epoch, self.position = self.epoch + 1, 0
            self.plan = self.train_batches.epoch(self.epoch)
        indices = self.plan[self.position]
        self.step += 1
        self.position += 1

        processes, own, global_batch = self.group.size, self.group.share(indices), None
        if processes > 1:
            tokens = self.train_batches.target_tokens(indices, self.epoch)
            global_batch = GlobalBatch(tokens, counts=len(own) > 0)

        def attempt(parts: int) -> Update:
            seed_draws(self.config.seed, self.step, self.group.rank)
            batches = self.train_batches.load(own if len(own) else indices[:1], self.epoch, parts)
            return self.updater(batches, self._rate(self.step), self.step, global_batch, self.signals.is_set)

        padded_size = self.train_batches.padded_size(indices) / processes
        update = self.micro_batcher(attempt, -(-len(indices) // processes), padded_size, f"step {self.step}")
        if update.applied:
            self.bad.in_a_row = 0
            self.moving_average.update(self.step)
            self.window.add(update)
        else:
            self.bad.add(indices, self.step)
        seconds = time.perf_counter() - start
        self.window.seconds += seconds
        self.seconds += seconds
        self.tokens += update.tokens
        return update.stop

    def _rate(self, step: int) -> float:
        return self.config.optimizer.lr * self.schedule.factor(step)

    def _after_update(self) -> None:
        """Log, validate and save after an update, as configured.

        The checkpoint comes last: a run that is killed before it repeats all of this.
        """
        self.run.check_present()
        training = self.config.training
        if self.step % training.log_every == 0 or self._finished():
            self._log()
        self.logged_step = self.step  # a signal during the validation saves a checkpoint
        score = self._validate() if self._validation_due() else None
        average = None
        if self._finished():
            self._log()  # the rest, if patience has just ended the run
            if average := self.best.average_at(self.step, self.model, self.validator):
                self.journal.average(self.step, self._progress(), *average)
        pruned = score is not None and self.group.on_main(partial(self.observer, self._progress(), score))
        if score is not None or average or self._checkpoint_due():
            self._save()
        if pruned and not self._finished():
            raise Pruned

    def _checkpoint_due(self) -> bool:
        """Is a checkpoint due by the updates, or by this process's clock?"""
        training = self.config.training
        if training.checkpoint_every is None:
            return False
        if training.checkpoint_unit == "minutes":
            return time.monotonic() - self.saved_at >= 60 * training.checkpoint_every
        return self.step % training.checkpoint_every == 0

    def _validation_due(self) -> bool:
        validation = self.config.validation
        if self.validated == self.step:
            return False
        if self._finished():
            return True
        if validation.unit == "steps":
            return self.step % validation.every == 0
        return self.position == len(self.plan) and (self.epoch + 1) % validation.every == 0

    def stop_if_signalled(self) -> None:
        """Raises Interrupted on all processes if any of them was signalled."""
        if signum := self.group.largest(self.signals.received or 0):
            raise Interrupted(signum)

    def _log(self) -> None:
        window, self.window = self.window, LogWindow()
        if not window.updates:
            return
        means = window.means()
        self.journal.training(
            self.step,
            self._progress(),
            {
                **means,
                # The negative bound of variational attention is its expected loss and the divergence.
                "perplexity": perplexity(means["loss"] + means.get("kl_loss", 0.0), 1),
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                "tokens_per_second": window.tokens / max(window.seconds, 1e-9),
                "bad_steps": self.bad.count,
                "seconds_left": self.seconds / self.step * (self.total_steps - self.step),
            },
        )

    def _progress(self) -> float:
        """Epochs done."""
        return self.epoch + self.position / len(self.plan)

    def _validate(self) -> float:
        """Validate, keep the checkpoint if it is among the best, and return the monitored score."""
        with self.moving_average.in_model():
            scores, samples, positions = self.validator()
            self.run.check_present()
            scores = self.group.on_main(lambda: scores)  # other processes may compute with other rounding
            best = self.stopping.update(scores, self.step)
            self.best.add({"model": self.model.state_dict(), "step": self.step, "scores": scores}, best)
        self.schedule.observe(best)
        self.validated = self.step
        self.journal.validation(self.step, self._progress(), scores, best)
        self.journal.samples(self.step, samples)
        self.journal.positions(self.step, positions)
        return scores[self.stopping.monitor]

    def _save(self) -> None:
        if not self.group.is_main:
            return
        self.run.check_present()
        self.saved_at = time.monotonic()
        self.journal.flush()  # lines up to logged_step must be on disk before the checkpoint that says so
        checkpoint.save(self.run.checkpoints / LAST, self._state())
        self.best.remove_superseded()

    def _state(self) -> dict[str, Any]:
        return {
            **self.moving_average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.updater.scaler.state_dict(),
            "schedule": self.schedule.state_dict(),
            "stopping": self.stopping.state_dict(),
            "best": self.best.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "validated": self.validated,
            "logged_step": self.logged_step,
            "too_many": self.micro_batcher.too_many,
            "total_steps": self.total_steps,
            "bad": [self.bad.count, self.bad.in_a_row],
            "spent": [self.seconds, self.tokens],
            "window": self.window.state(),
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        checkpoint.check(state, self.model, self.optimizer)
        self.moving_average.load_state_dict(state)
        options = self.optimizer.state_dict()["param_groups"]  # of the configuration, not of the file
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": options})
        if state["scaler"]:  # empty if the run had another precision so far
            self.updater.scaler.load_state_dict(state["scaler"])
        self.schedule.load_state_dict(state["schedule"])
        self.updater.set_rate(self._rate(state["step"]))
        self.stopping.load_state_dict(state["stopping"])
        self.best.load_state_dict(state["best"])
        self.step, self.epoch, self.position = state["step"], state["epoch"], state["position"]
        self.validated, self.logged_step = state["validated"], state["logged_step"]
        self.micro_batcher.too_many = float(state["too_many"])
        self.schedule_has_moved = state["total_steps"] != self.total_steps
        self.bad.count, self.bad.in_a_row = state["bad"]
        self.seconds, self.tokens = state["spent"]
        self.window = LogWindow.load(state["window"], self.translator.machine.device)
        self.plan = self.train_batches.epoch(self.epoch)
        if self.position > len(self.plan):
            raise ValueError(f"batch {self.position} of {len(self.plan)}")
