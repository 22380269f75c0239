"""Progress of training: metrics.jsonl, TensorBoard, trackers, the log, the progress bar."""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from tqdm import tqdm

from nmt.explain.attention_statistics import Positions
from nmt.explain.heatmap import draw_alignment, save, to_array
from nmt.system.files import to_json, write_atomically
from nmt.system.run import RunDirectory
from nmt.training.best import Average
from nmt.training.logs.tensorboard import TensorBoard
from nmt.training.logs.trackers import Tracker
from nmt.training.validation import Sample

log = logging.getLogger(__name__)
SHOWN = {"chrf": "chrF {:.2f}", "ter": "TER {:.2f}", "comet": "COMET {:.4f}"}  # where they are monitored


class Journal:
    """Writes every number to metrics.jsonl, TensorBoard and trackers, and the most important ones to the log and the
    bar."""

    def __init__(
        self,
        run: RunDirectory,
        tensorboard: bool,
        trackers: Sequence[Tracker],
        logged_step: int,
        validated: int,
        step: int,
        total_steps: int,
    ) -> None:
        """Continue at `step`. Lines that a killed run wrote after `logged_step` (-1: all lines) are removed, and those
        of validations after the step `validated`."""
        self._metrics, self._choices = run.metrics, run.recorded_choices()
        _truncate_after(self._metrics, logged_step, validated)
        self._board = None
        if tensorboard:
            self._board = TensorBoard(run.tensorboard, resume_step=logged_step if logged_step >= 0 else None)
        self._trackers = trackers
        self._bar = tqdm(
            total=total_steps, initial=step, unit=" steps", disable=None, dynamic_ncols=True, smoothing=0.05
        )

    def advance(self) -> None:
        """Count one update."""
        self._bar.update()

    def training(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Record means since the last call: loss, smoothed_loss, perplexity, learning_rate, tokens_per_second, ..."""
        self._record(step, epoch, "train", values)
        self._bar.set_postfix_str(
            f"loss {values['loss']:.3f}, ppl {values['perplexity']:.2f}, {values['tokens_per_second']:,.0f} tok/s"
        )
        # With a progress bar on the terminal, the line goes to the log file only.
        log.log(
            logging.INFO if self._bar.disable else logging.DEBUG,
            "step %d/%s  epoch %.2f  loss %.3f  ppl %.2f  lr %.2e  %s target tokens/s  ETA %s",
            step,
            self._bar.total,
            epoch,
            values["loss"],
            values["perplexity"],
            values["learning_rate"],
            f"{values['tokens_per_second']:,.0f}",
            tqdm.format_interval(values["seconds_left"]),
        )

    def validation(self, step: int, epoch: float, values: Mapping[str, float], best: bool) -> None:
        """Record loss, perplexity, bleu, the monitored score, and statistics of the attention."""
        self._record(step, epoch, "validation", values)
        name = "bleu_"
        parts = [f"{key.removeprefix(name)} {value:.2f}" for key, value in values.items() if key.startswith(name)]
        log.info(
            "validation at step %d (epoch %.2f): loss %.3f  ppl %.2f  BLEU %.2f%s%s%s%s",
            step,
            epoch,
            values["loss"],
            values["perplexity"],
            values["bleu"],
            f" ({', '.join(parts)})" if parts else "",
            "".join(f"  {SHOWN[name].format(values[name])}" for name in SHOWN if name in values),
            f"  AER {100 * values['aer']:.1f} %" if "aer" in values else "",
            "  *best*" if best else "",
        )

    def average(self, step: int, epoch: float, values: Mapping[str, float], average: Average) -> None:
        """Record the validation of the best checkpoints' average, and the outcome."""
        outcome = {"average/steps": average.steps, "average/taken": average.taken}
        self._record(step, epoch, "average", values, outcome)
        log.info(
            "average of the best validations (steps %s): loss %.3f  ppl %.2f  BLEU %.2f; best single one: %s %.4g; "
            "the best checkpoint is %s",
            ", ".join(map(str, average.steps)),
            values["loss"],
            values["perplexity"],
            values["bleu"],
            average.monitor,
            average.single,
            "the average" if average.taken else "the single one",
        )

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Record source, reference and translation as text, attention and saliency as pictures, in TensorBoard."""
        if not (self._board and rows):
            return
        table = [(row.source, row.reference, row.translation.text) for row in rows]
        self._board.samples("validation/samples", table, step)
        for number, row in enumerate(rows, 1):
            for kind, figure in sample_figures(row, f"step {step}").items():
                self._board.image(f"{kind}/{number}", to_array(figure), step)

    def positions(self, step: int, positions: Positions | None) -> None:
        """Record histograms of the positions that a hard attention selected, and of their steps, in TensorBoard."""
        if positions is not None and self._board:
            self._board.histogram("attention/positions", positions.positions, step)
            self._board.histogram("attention/jumps", positions.jumps, step)

    def config(self, values: Mapping[str, Any]) -> None:
        """Record the resolved configuration as text, and the overrides as hyperparameters, in TensorBoard."""
        if not self._board:
            return
        self._board.choices({"seed": values["seed"], **self._choices})
        text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
        self._board.text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)

    def flush(self) -> None:
        """Write everything to disk."""
        if self._board:
            self._board.flush()
        if self._metrics.exists():
            with self._metrics.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Flush and close everything but the trackers."""
        self._bar.close()
        if self._board:
            self._board.close()

    def _record(
        self, step: int, epoch: float, kind: str, values: Mapping[str, float], extra: Mapping[str, Any] | None = None
    ) -> None:
        """`extra`: values for metrics.jsonl only, with their full names."""
        named = {f"{kind}/{name}": value for name, value in values.items() if name != "seconds_left"}
        if self._board:
            self._board.scalars(step, named)
        for tracker in self._trackers:
            tracker.scalars(step, named)
        line = {"step": step, "epoch": round(epoch, 4), "time": round(time.time(), 3), **named, **(extra or {})}
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")


def record_outcome(
    run: RunDirectory, tensorboard: bool, trackers: Sequence[Tracker], step: int, scores: Mapping[str, float]
) -> None:
    """Record the scores of a run that has ended at `step`."""
    # At a step after all others, so that a run that is made longer removes its old results.
    if tensorboard:
        with TensorBoard(run.tensorboard, resume_step=step) as board:
            board.outcome(step + 1, scores)
    for tracker in trackers:
        tracker.scalars(step + 1, scores)


class SilentJournal(Journal):
    """The journal of a process that writes nothing."""

    def __init__(self, *_: object) -> None: ...

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401
        return lambda *_: None


def sample_figures(sample: Sample, title: str = "") -> dict[str, Figure]:
    """Heatmaps "alignment", if the model has an attention, and "saliency", if it was computed."""
    figures, (translation, saliency) = {}, sample[2:]
    if translation.alignment is not None:
        figures["alignment"] = draw_alignment(
            translation.alignment, translation.source_tokens, translation.tokens, title
        )
    if saliency is not None:
        figures["saliency"] = draw_alignment(
            saliency.shares, saliency.source_tokens, saliency.tokens, title, "share of the gradient"
        )
    return figures


def save_figures(directory: Path, samples: Sequence[Sample]) -> None:
    """Write 1.png, 2.png, ... and 1.saliency.png, ..."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(samples, 1):
        for kind, figure in sample_figures(sample).items():
            save(figure, directory / (f"{number}.png" if kind == "alignment" else f"{number}.{kind}.png"))


def _truncate_after(path: Path, step: int, validated: int) -> None:
    """Remove the lines after a step, those of validations after the step `validated`, and an incomplete last line of a
    killed run. Warns of other lines that cannot be read."""
    if not path.exists():
        return
    lines, damaged = [], 0
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in whole:
        try:
            values = json.loads(line)
            last = validated if "validation/loss" in values else step
            if values["step"] <= min(last, step):
                lines.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged += 1
    if damaged:
        log.warning("%s: damaged; %d lines that cannot be read are removed", path, damaged)
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode("utf-8"))
