"""The training loop."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.batching import Batches
from nmt.data.prepared import Prepared
from nmt.evaluation import evaluate
from nmt.metrics.bleu import ScoreSettings
from nmt.run import RunDirectory
from nmt.training import checkpoint
from nmt.training.journal import Journal, perplexity
from nmt.training.schedule import Schedule
from nmt.training.step import Update, Updater, make_optimizer
from nmt.training.stopping import Stopping
from nmt.translator import Translator

log = logging.getLogger(__name__)


class Interrupted(Exception):  # noqa: N818
    """A signal asked the run to stop; the last checkpoint holds everything."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Window:
    """Sums since the last line of the log, kept on the device until they are read."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []  # (3,) of each update: smoothed loss, nll, gradient norm
        self.tokens = 0
        self.seconds = 0.0

    def add(self, update: Update) -> None:
        self.sums.append(torch.stack([update.loss, update.nll, update.gradient_norm.to(update.loss.dtype)]))
        self.tokens += update.tokens

    def totals(self) -> torch.Tensor:
        """(3,) float64 on the CPU."""
        return torch.stack(self.sums).double().cpu().sum(0) if self.sums else torch.zeros(3).double()


class Trainer:
    """Updates, validations and checkpoints, from the first step or from where a checkpoint stands."""

    def __init__(
        self,
        config: schema.TrainConfig,
        prepared: Prepared,
        translator: Translator,
        scoring: ScoreSettings,
        run: RunDirectory,
    ) -> None:
        self.config, self.prepared, self.translator, self.scoring, self.run = (
            config,
            prepared,
            translator,
            scoring,
            run,
        )
        self.model = translator.model
        self.train_batches = self._batches("train", config.tokenizer.sampling)
        self.validation_batches = self._batches("validation", 0.0)
        self.optimizer = make_optimizer(config.optimizer, self.model)
        pad = translator.tokenizers.target.pad
        self.updater = Updater(self.model, self.optimizer, config.training, translator.machine, pad)
        self.plan = self.train_batches.epoch(0)
        limit = config.training.max_steps or config.training.max_epochs * len(self.plan)
        self.total_steps = min(limit, config.training.max_epochs * len(self.plan))
        self.schedule = Schedule(config.schedule, self.total_steps)
        self.stopping = Stopping(config.validation.monitor, config.validation.patience)
        self.step, self.epoch, self.position = 0, 0, 0  # position: batches of this epoch that are done
        self.bad_steps, self.bad_in_a_row = 0, 0
        self.validated = 0  # the step of the last validation
        self.seconds, self.tokens = 0.0, 0  # of updates alone, over all starts
        self.window = Window()
        self.signal: int | None = None

    def fit(self) -> None:
        """Train to the end. Raises Interrupted after a signal, UserError if the gradients stay non-finite."""
        self.journal = Journal(self.run, self.step, self.total_steps)
        if not self.step:
            self.journal.config(self.config.model_dump(mode="json"))
        try:
            with self._signals():
                while not self._finished():
                    self._update()
                    self._after_update()
                if self.validated < self.step:
                    self._validate()
                    self._save()
        finally:
            self.journal.close()

    def resume(self) -> bool:
        """Continue from checkpoints/last.pt, if there is one."""
        path = self.run.checkpoints / "last.pt"
        if not path.exists():
            return False
        state = checkpoint.load(path)
        try:
            self._load_state(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{path}: does not fit this run ({str(error).splitlines()[0]})") from None
        return True

    def _finished(self) -> bool:
        return self.step >= self.total_steps or self.stopping.exhausted

    def _update(self) -> None:
        began = time.perf_counter()
        if self.position == len(self.plan):
            self.epoch, self.position = self.epoch + 1, 0
            self.plan = self.train_batches.epoch(self.epoch)
        indices = self.plan[self.position]
        parts = [part for part in np.array_split(indices, self.config.training.accumulate) if len(part)]
        batches = [self.train_batches.load(part, self.epoch) for part in parts]
        self.step += 1
        self.position += 1
        update = self.updater(batches, self.config.optimizer.lr * self.schedule.factor(self.step))
        if update.applied:
            self.bad_in_a_row = 0
            self.window.add(update)
        else:
            self._count_bad(indices)
        seconds = time.perf_counter() - began
        self.window.seconds += seconds
        self.seconds += seconds
        self.tokens += update.tokens

    def _count_bad(self, indices: np.ndarray[Any, Any]) -> None:
        self.bad_steps += 1
        self.bad_in_a_row += 1
        shown = ", ".join(map(str, indices[:8]))
        log.warning("step %d: non-finite gradient, skipped (training pairs %s, ...)", self.step, shown)
        if self.bad_in_a_row >= self.config.training.max_bad_steps:
            raise UserError(
                f"{self.bad_in_a_row} non-finite gradients in a row (training.max_bad_steps); the last checkpoint is "
                "whole: try a smaller optimizer.lr, training.max_grad_norm, or precision=fp32"
            )

    def _after_update(self) -> None:
        self.journal.advance()
        training, validation = self.config.training, self.config.validation
        if self.step % training.log_every == 0 or self._finished():
            self._log()
        epoch_done = self.position == len(self.plan)
        if validation.unit == "steps":
            due = self.step % validation.every == 0
        else:
            due = epoch_done and (self.epoch + 1) % validation.every == 0
        if due:
            self._validate()
        if due or (training.checkpoint_every and self.step % training.checkpoint_every == 0):
            self._save()
        if self.signal is not None:
            self._save()
            raise Interrupted(self.signal)

    def _log(self) -> None:
        window, self.window = self.window, Window()
        if not window.sums:
            return
        loss, nll, norms = window.totals().tolist()
        per_step = self.seconds / self.step
        self.journal.training(
            self.step,
            self._progress(),
            {
                "loss": loss / window.tokens,
                "perplexity": perplexity(nll, window.tokens),
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                "gradient_norm": norms / len(window.sums),
                "tokens_per_second": window.tokens / max(window.seconds, 1e-9),
                "bad_steps": self.bad_steps,
                "seconds_left": per_step * (self.total_steps - self.step),
            },
        )

    def _progress(self) -> float:
        """Epochs done."""
        return self.epoch + self.position / len(self.plan)

    def _validate(self) -> None:
        split = self.prepared.splits["validation"]
        sources, references = split.source.lines(), split.target.lines()
        nll, tokens = self._validation_loss()
        found = evaluate(self.translator, sources, references, self.scoring, ("bleu",))
        values = {"loss": nll / tokens, "perplexity": perplexity(nll, tokens), "bleu": found.scores.bleu}
        best = self.stopping.update(values, self.step)
        self.schedule.observe(best)
        self.validated = self.step
        self.journal.validation(self.step, self._progress(), values, best)
        shown = sample_indices(len(sources), self.config.validation.samples)
        self.journal.samples(self.step, [(sources[i], references[i], found.translations[i]) for i in shown])
        if best:
            weights = {"model": self.model.state_dict(), "step": self.step, "scores": values}
            checkpoint.save(self.run.checkpoints / "best.pt", weights)

    @torch.no_grad()
    def _validation_loss(self) -> tuple[float, int]:
        """Negative log-likelihood of the references, in nats, and their tokens."""
        machine = self.translator.machine
        self.model.eval()
        nll, tokens = torch.zeros((), dtype=torch.float64), 0
        for indices in self.validation_batches.epoch(0):
            batch = self.validation_batches.load(indices, 0).to(machine.device)
            with machine.autocast():
                decoded = self.model(batch.source, batch.lengths, batch.target_in)
                nll += self.model.loss(decoded.readouts, batch.target_out, self.updater.pad).nll.cpu()
            tokens += batch.target_tokens
        self.model.train()
        return float(nll), tokens

    def _batches(self, split: str, sampling: float) -> Batches:
        training = self.config.training
        return Batches(
            self.prepared.splits[split],
            self.prepared.tokenizers,
            batch_tokens=training.batch_tokens,
            batch_sentences=training.batch_sentences,
            seed=self.config.seed,
            sampling=sampling,
        )

    def _save(self) -> None:
        checkpoint.save(self.run.checkpoints / "last.pt", self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.updater.scaler.state_dict(),
            "schedule": self.schedule.state_dict(),
            "stopping": self.stopping.state_dict(),
            "random": checkpoint.random_state(),
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "validated": self.validated,
            "bad": [self.bad_steps, self.bad_in_a_row],
            "spent": [self.seconds, self.tokens],
            "window": [
                torch.stack(self.window.sums).cpu() if self.window.sums else torch.zeros(0, 3),
                self.window.tokens,
                self.window.seconds,
            ],
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updater.scaler.load_state_dict(state["scaler"])
        self.schedule.load_state_dict(state["schedule"])
        self.stopping.load_state_dict(state["stopping"])
        self.step, self.epoch, self.position = state["step"], state["epoch"], state["position"]
        self.validated = state["validated"]
        self.bad_steps, self.bad_in_a_row = state["bad"]
        self.seconds, self.tokens = state["spent"]
        sums, self.window.tokens, self.window.seconds = state["window"]
        self.window.sums = list(sums.to(self.translator.machine.device).unbind(0))
        self.plan = self.train_batches.epoch(self.epoch)
        checkpoint.restore_random_state(state["random"])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM are noted, and acted on after the update that is under way."""

        def note(signum: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt  # asked twice: now
            self.signal = signum
            log.warning("%s: saving a checkpoint, then stopping", signal.Signals(signum).name)

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def sample_indices(size: int, count: int) -> list[int]:
    """`count` indices spread evenly over `size` sentences."""
    return sorted({int(i) for i in np.linspace(0, size - 1, min(count, size))})
