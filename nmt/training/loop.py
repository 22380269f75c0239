"""The training loop: makes updates, and between them logs, validates, saves checkpoints, and ends a run early.

It also checks the checkpoint that a run resumes from.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.evaluate.metrics import perplexity
from nmt.model.checkpoints import BEST, LAST, read_checkpoint, same_form, save_checkpoint
from nmt.system.run import RunDirectory
from nmt.training.journal import Journal
from nmt.training.stopping import EarlyStopping
from nmt.training.trainer import Trainer, Update
from nmt.training.validation import Validator

log = logging.getLogger(__name__)


class Pruned(Exception):  # noqa: N818
    """Raised when a sweep's search ends this run early, after the last checkpoint has been saved."""


Observer = Callable[[float, float], bool]
"""Called after each validation with the epochs done and the monitored score; returns True to prune the run."""


class TrainingLoop:
    """Trains from the first step, or from the last checkpoint, to the end of a run."""

    def __init__(
        self,
        config: schema.TrainConfig,
        trainer: Trainer,
        validator: Validator,
        run: RunDirectory,
        journal: Journal,
        observer: Observer | None = None,
        *,
        ideal_seconds: float,
    ) -> None:
        """ideal_seconds: the seconds per target token from `nmt.training.utilisation.ideal_seconds`."""
        self.ideal_seconds = ideal_seconds
        self.config, self.trainer, self.validator, self.run, self.journal = config, trainer, validator, run, journal
        self.observer = observer or (lambda *_: False)
        self.stopping = EarlyStopping(config.validation.monitor, config.validation.patience)
        self.validated = 0  # step of the last validation
        self.logged_step = -1  # last step whose lines in the journal are complete; a resumed run removes later lines
        self.window = LogWindow()
        self.resumed_at = 0, 0.0  # step and seconds spent when this process took up the run

    def resume(self) -> None:
        """Load the last checkpoint, if there is one. Raises UserError if it does not fit the run."""
        path = self.run.checkpoints / LAST
        if not path.exists():
            return
        try:
            state = read_checkpoint(path)
        except ValueError:
            raise UserError(f"{path}: is corrupt; delete it to train from the start, or restore a copy") from None
        try:
            self._load_state(state)
        except Exception as error:  # a damaged file can raise nearly anything
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{path}: does not fit this run ({reason})") from None
        trainer = self.trainer
        log.info("resumed at step %d of %d", trainer.step, trainer.total_steps)
        moved = state["total_steps"] != trainer.total_steps
        if moved and self.config.schedule.kind == "cosine" and trainer.step < trainer.total_steps:
            log.warning("the number of updates has changed, and the cosine schedule with it: the learning rate jumps")

    def fit(self) -> None:
        """Train to the end. Raises Interrupted at a signal, and Pruned if the observer returns True. Raises UserError
        if W&B refuses the run, after too many skipped updates, or if a single sentence pair does not fit in memory."""
        trainer = self.trainer
        begin = partial(self.journal.begin, self.logged_step, self.validated, trainer.step, trainer.total_steps)
        trainer.group.on_main(begin)
        if first := self.logged_step < 0:
            self.journal.config(self.config.model_dump(mode="json"))
        try:
            with trainer.signals.saving(self._save):
                if first and self.config.training.start_from is not None:
                    self._validate()  # the loaded parameters are the best checkpoint until a validation is better
                    self.logged_step = 0
                    self._save()
                # The run may have been interrupted before the work that follows an update, or a changed max_steps may
                # end it here.
                if self.validated < trainer.step or self._finished():
                    self._after_update()
                while not self._finished():
                    update = trainer.next_update()
                    self.window.add(update)
                    self.journal.advance()
                    if update.stop:
                        trainer.stop_if_signalled()
                    self._after_update()
                trainer.stop_if_signalled()
            if self.stopping.exhausted:
                waited = f"{self.stopping.monitor} has not improved in {self.stopping.waited} validations"
                log.info("stopped early: %s (validation.patience); best at step %d", waited, self.stopping.best_step)
        finally:
            trainer.release_graphs()
            self.journal.end_of_updates()

    def summary(self) -> dict[str, Any]:
        """Return what the manifest records of the training so far. "time_fractions" are the fractions of all seconds
        that went to loading batches, recording CUDA graphs, and validation."""
        trainer, spent = self.trainer, max(self._seconds_spent(), 1e-9)
        return {
            "steps": trainer.step,
            "epochs": round(trainer.epochs, 3),
            "seconds": round(trainer.seconds, 1),
            "target_tokens": trainer.tokens,
            "target_tokens_per_second": round(trainer.tokens / max(trainer.seconds, 1e-9), 1),
            "utilisation": round(self._utilisation(trainer.tokens, trainer.seconds), 4),
            "time_fractions": {name: round(seconds / spent, 4) for name, seconds in trainer.seconds_of.items()},
            "bad_steps": trainer.bad.count,
            "best_step": self.stopping.best_step,
            f"best_{self.stopping.monitor}": self.stopping.best,
        }

    def _utilisation(self, tokens: int, seconds: float) -> float:
        """Compute the mean utilisation of the devices by some updates (see `nmt.training.utilisation`)."""
        return tokens * self.ideal_seconds / (max(seconds, 1e-9) * self.trainer.group.size)

    def _finished(self) -> bool:
        return self.trainer.step >= self.trainer.total_steps or self.stopping.exhausted

    def _after_update(self) -> None:
        """Log, validate and save after an update, as configured. The checkpoint is saved last. If the run is killed
        before that, it resumes from an earlier checkpoint, and logs and validates again. Raises Pruned if the observer
        prunes the run."""
        self.run.check_present()
        step, epochs = self.trainer.step, self.trainer.epochs
        if step % self.config.training.log_every == 0 or self._finished():
            self._log()
        self.logged_step = step  # set before the validation, during which a signal may save a checkpoint
        score = self._validate() if self._validation_due() else None
        if self._finished():
            self._log()  # what is not logged yet, if this validation has exhausted the patience
        pruned = score is not None and self.trainer.group.on_main(partial(self.observer, epochs, score))
        every = self.config.training.checkpoint_every
        if score is not None or (every is not None and step % every == 0):
            self._save()
        if pruned and not self._finished():
            raise Pruned

    def _validation_due(self) -> bool:
        """Is a validation due after this update: as configured, and after the last one?"""
        validation, trainer = self.config.validation, self.trainer
        if self.validated == trainer.step:
            return False
        if self._finished():
            return True
        if validation.unit == "steps":
            return trainer.step % validation.every == 0
        return trainer.at_end_of_epoch and (trainer.epoch + 1) % validation.every == 0

    def _log(self) -> None:
        """Hand the means of the updates since the last call to the journal, and begin a new window."""
        window, self.window = self.window, LogWindow()
        if not window.updates:
            return
        trainer, means, (step, seconds) = self.trainer, window.means(), self.resumed_at
        # Only what this process has done tells the time left, since the machine may have changed.
        seconds_per_step = (self._seconds_spent() - seconds) / max(trainer.step - step, 1)
        self.journal.training(
            trainer.step,
            trainer.epochs,
            {
                **means,
                # With variational attention, the perplexity is computed from the negative evidence lower bound, which
                # is the expected "loss" plus the KL divergence.
                "perplexity": perplexity(means["loss"] + means.get("kl_loss", 0.0), 1),
                "learning_rate": trainer.optimizer.param_groups[0]["lr"],
                "tokens_per_second": window.tokens / max(window.seconds, 1e-9),
                "utilisation": self._utilisation(window.tokens, window.seconds),
                "bad_steps": trainer.bad.count,
                "seconds_left": seconds_per_step * (trainer.total_steps - trainer.step),
            },
        )

    def _seconds_spent(self) -> float:
        """Return the seconds of all updates and validations since the run first started."""
        return self.trainer.seconds + self.trainer.seconds_of["validation"]

    def _validate(self) -> float:
        """Validate, save the parameters if they are the best so far, and return the monitored score."""
        trainer = self.trainer
        with trainer.moving_average.in_model(), trainer.timed("validation"):
            scores, samples = self.validator()
            self.run.check_present()
            scores = trainer.group.on_main(lambda: scores)  # all processes use those of rank 0: rounding may differ
            best = self.stopping.update(scores, trainer.step)
            if best and trainer.group.is_main:
                weights = {"model": trainer.model.state_dict(), "step": trainer.step, "scores": scores}
                self.run.results.unlink(missing_ok=True)  # scores of the parameters that this checkpoint replaces
                save_checkpoint(self.run.checkpoints / BEST, weights)
        trainer.schedule.observe(best)
        self.validated = trainer.step
        self.journal.validation(trainer.step, trainer.epochs, scores, best)
        self.journal.samples(trainer.step, samples)
        return scores[self.stopping.monitor]

    def _save(self) -> None:
        """Write the last checkpoint, on rank 0."""
        if not self.trainer.group.is_main:
            return
        self.run.check_present()
        self.journal.flush()  # lines up to logged_step must be on disk before the checkpoint that records it
        save_checkpoint(self.run.checkpoints / LAST, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            **self.trainer.state_dict(),
            "stopping": self.stopping.state_dict(),
            "validated": self.validated,
            "logged_step": self.logged_step,
            "window": self.window.state(),
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        check_shapes(state, self.trainer.model, self.trainer.optimizer)
        self.trainer.load_state_dict(state)
        self.stopping.load_state_dict(state["stopping"])
        self.validated, self.logged_step = state["validated"], state["logged_step"]
        self.window = LogWindow.load(state["window"], self.trainer.machine.device)
        self.resumed_at = self.trainer.step, self._seconds_spent()


class LogWindow:
    """Collects the updates since the last line of the log. Their tensors stay on the device until `means` is called."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Tensor]] = []  # loss terms and gradient norm, each (), of every applied update
        self.tokens = 0
        self.seconds = 0.0

    def add(self, update: Update) -> None:
        """Add an update. A skipped update adds only its time."""
        self.seconds += update.seconds
        if update.applied:
            self.updates.append({**update.terms, "gradient_norm": update.gradient_norm})
            self.tokens += update.tokens

    def state(self) -> list[Any]:
        """Return the window as a checkpoint stores it."""
        return [self.updates, self.tokens, self.seconds]

    @classmethod
    def load(cls, state: list[Any], device: torch.device) -> Self:
        """Restore the result of `state` on a device."""
        window = cls()
        updates, window.tokens, window.seconds = state
        window.updates = [{name: term.to(device) for name, term in update.items()} for update in updates]
        return window

    def means(self) -> dict[str, float]:
        """Average loss terms over target tokens, and the gradient norm over updates. Needs at least one update."""
        names = list(self.updates[0])
        columns = [torch.stack([update[name].float() for update in self.updates]) for name in names]
        totals = torch.stack(columns).cpu().double().sum(1).tolist()
        counts = [len(self.updates) if name == "gradient_norm" else self.tokens for name in names]
        return {name: total / count for name, total, count in zip(names, totals, counts, strict=True)}


def check_shapes(state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a checkpoint has weights or an optimizer's state of other shapes than this run. A checkpoint
    with another structure can raise any other exception, such as KeyError."""
    weights = model.state_dict()
    if not all(same_form(state[name], weights) for name in ("model", "updated") if name in state):
        raise ValueError("the weights of another model")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state["optimizer"]["state"].items():
        shapes = {parameters[number].shape, torch.Size([])}
        if any(isinstance(value, Tensor) and value.shape not in shapes for value in values.values()):
            raise ValueError("the optimizer's state is that of another model")
