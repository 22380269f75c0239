"""Writes the numbers and pictures of a run to metrics.jsonl, train.log, TensorBoard, W&B and a progress bar."""

import json
import logging
import os
import string
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import yaml
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm.auto import tqdm

from nmt.config.errors import UserError, format_value
from nmt.config.schema import TrainConfig
from nmt.config.schema.commands import NO_EFFECT_KEYS
from nmt.evaluate.metrics import shown
from nmt.system.files import named_errors, to_json, write_atomically
from nmt.system.run import SWEEP, RunDirectory, read_json
from nmt.training.validation import Sample
from nmt.translate.heatmap import draw_alignment, save, to_array

WANDB = "wandb.json"  # in the run directory: the identifier of the run in W&B
PROJECT = "nmt"  # W&B's project, unless its environment variable names another
MAX_TAG = 64  # W&B's limit of a tag's characters
# Punctuation as character references, which have no meaning in Markdown or HTML.
ESCAPES = {ord(character): f"&#{ord(character)};" for character in string.punctuation}
log = logging.getLogger(__name__)


class Journal:
    """Writes every number to metrics.jsonl, TensorBoard and W&B, and the main ones to the log and the progress bar. Use
    it in a `with` statement."""

    def __init__(self, run: RunDirectory, config: TrainConfig) -> None:
        self._run, self._config = run, config
        self._events: Any = None  # TensorBoard's writer, whose methods are untyped
        self._wandb: Any = None  # the run of W&B
        self._bar = tqdm(disable=True)
        self._scores = ""  # metrics of the last validation, for the progress bar

    def begin(self, logged_step: int, validated: int, step: int, total_steps: int) -> None:
        """Open W&B, TensorBoard's file and the progress bar of a run that continues at `step`.

        Removes what a killed run wrote after its last checkpoint: lines after step `logged_step` (with -1, all lines),
        and the lines of validations after step `validated`. Raises UserError if W&B refuses the run.
        """
        if "wandb" in self._config.logger:
            # W&B begins before the SummaryWriter, because it sees only TensorBoard files that are opened later.
            self._wandb = start_wandb(self._run, self._config)
        truncate_after(self._run.metrics, logged_step, validated)
        if self._config.logger:
            # purge_step hides the events that a killed run wrote after logged_step, so that no curve runs back.
            self._events = SummaryWriter(str(self._run.tensorboard), purge_step=logged_step + 1)
        self._bar = tqdm(
            total=total_steps, initial=step, unit=" steps", disable=None, dynamic_ncols=True, smoothing=0.05
        )

    def advance(self) -> None:
        """Count one update."""
        self._bar.update()

    def training(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Record values of the updates since the last call (mean loss terms, perplexity, ...); show the main ones."""
        self._record(step, epoch, "train", values)
        self._bar.set_postfix_str(
            f"loss {values['loss']:.3f}, ppl {values['perplexity']:.2f}, {values['tokens_per_second']:,.0f} tok/s"
            f"{self._scores}"
        )
        # With a progress bar on the terminal, this line goes to the log file only.
        log.log(
            logging.INFO if self._bar.disable else logging.DEBUG,
            "step %d/%s  epoch %.2f  loss %.3f  ppl %.2f  lr %.2e  %s target tokens/s  utilisation %.0f %%  ETA %s",
            step,
            self._bar.total,
            epoch,
            values["loss"],
            values["perplexity"],
            values["learning_rate"],
            f"{values['tokens_per_second']:,.0f}",
            100 * values["utilisation"],
            tqdm.format_interval(values["seconds_left"]),
        )

    def validation(self, step: int, epoch: float, values: Mapping[str, float], best: bool) -> None:
        """Record loss, perplexity, the metrics, and statistics of the attention; log the scores."""
        self._record(step, epoch, "validation", values)
        self._scores = f", {shown(values)}"
        log.info(
            "validation at step %d (epoch %.2f): loss %.3f  ppl %.2f  %s%s%s",
            step,
            epoch,
            values["loss"],
            values["perplexity"],
            shown(values),
            f"  AER {100 * values['aer']:.1f} %" if "aer" in values else "",
            "  *best*" if best else "",
        )

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record source, reference and translation as text, attention and saliency as pictures, in TensorBoard."""
        if self._events is None or not samples:
            return
        rows: list[Iterable[str]] = [("source", "reference", "hypothesis"), ("---",) * 3]
        rows += [map(literal, (sample.source, sample.reference, sample.translation.text)) for sample in samples]
        self._write("add_text", "validation/samples", "\n".join(f"| {' | '.join(row)} |" for row in rows), step)
        for number, sample in enumerate(samples, 1):
            for kind, figure in sample_figures(sample, f"step {step}").items():
                self._write("add_image", f"{kind}/{number}", to_array(figure), step, dataformats="HWC")

    def config(self, values: Mapping[str, Any]) -> None:
        """Record the resolved configuration as text, and the overrides as hyperparameters, in TensorBoard. Numbers stay
        numbers. Other values are written as a user types them, since TensorBoard would show true as 1.0."""
        if self._events is None:
            return
        words = {None: "null", True: "true", False: "false"}
        choices = {"seed": values["seed"], **self._run.recorded_choices()}
        named = {
            key: words[value] if value is None or isinstance(value, bool) else value for key, value in choices.items()
        }
        # Part 0 of `hparams` lists columns of TensorBoard's table. It is left out, because it would restrict the table
        # to the hyperparameters of this run.
        self._add_summary(1, named)
        text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
        self._write("add_text", "config", "\n".join(f"    {line}" for line in text.splitlines()), 0)

    def flush(self) -> None:
        """Write all buffered values to disk."""
        self._write("flush")
        if self._run.metrics.exists():
            with self._run.metrics.open("rb") as file:
                os.fsync(file.fileno())

    def end_of_updates(self) -> None:
        """Close the progress bar, so that another one can be shown."""
        self._bar.close()

    def outcome(self, step: int, scores: Mapping[str, float]) -> None:
        """Record the scores of a run that has ended at `step`. The scores are recorded at step + 1. If the run is
        extended later, TensorBoard hides them, as it hides all events after the last checkpoint."""
        if self._events is not None:
            self._add_summary(2, {})
        self._scalars(step + 1, scores)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close everything. After an error, W&B shows the run as resumable. If W&B fails now, only warn, because the
        run's own files are complete."""
        self._bar.close()
        try:
            self._write("close")
        finally:
            if self._wandb is not None:
                try:
                    self._wandb.finish(exit_code=0 if kind is None else 1)  # 1: resumable
                except (Exception, SystemExit) as error:
                    log.warning("logger=wandb: does not have the whole run (%s)", _reason(error))

    def _record(self, step: int, epoch: float, kind: str, values: Mapping[str, float]) -> None:
        named = {f"{kind}/{name}": value for name, value in values.items() if name != "seconds_left"}
        self._scalars(step, named)
        line = {"step": step, "epoch": round(epoch, 4), "time": round(time.time(), 3), **named}
        with self._run.metrics.open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._write("add_scalar", name, value, step)

    def _add_summary(self, part: int, values: Mapping[str, Any]) -> None:
        """Add to TensorBoard's HPARAMS tab: part 1 begins a run with its hyperparameters, part 2 ends it."""
        with named_errors(self._run.tensorboard):
            self._events.file_writer.add_summary(hparams(values, {})[part])  # type: ignore[no-untyped-call]

    def _write(self, method: str, *values: Any, **options: Any) -> None:  # noqa: ANN401
        if self._events is not None:
            with named_errors(self._run.tensorboard):
                getattr(self._events, method)(*values, **options)


class NullJournal(Journal):
    """A journal that writes nothing, for all processes but rank 0."""

    def _do_nothing(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Take the place of a method that writes."""

    __init__ = begin = advance = training = validation = samples = _do_nothing
    config = flush = end_of_updates = outcome = __exit__ = _do_nothing


def _excepthook(args: threading.ExceptHookArgs) -> None:
    """Keep TensorBoard's writing thread from printing its errors, because the writer raises them at its next call."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)


threading.excepthook = _excepthook


def literal(text: str) -> str:
    """Escape a text for a cell of a Markdown table, and join its words by single spaces."""
    return " ".join(text.translate(ESCAPES).split())


def sample_figures(sample: Sample, title: str = "") -> dict[str, Figure]:
    """Draw the heatmaps of a sample by kind: "alignment" if the model has an attention, "saliency" if computed."""
    figures, (translation, explanation) = {}, sample[2:]
    if translation.alignment is not None:
        figures["alignment"] = draw_alignment(
            translation.alignment, translation.source_tokens, translation.tokens, title
        )
    if explanation is not None and explanation.saliency is not None:
        figures["saliency"] = draw_alignment(
            explanation.saliency, explanation.source_tokens, explanation.tokens, title, "share of the gradient"
        )
    return figures


def save_figures(directory: Path, samples: Sequence[Sample]) -> None:
    """Write the heatmaps of each sample: alignments as 1.png, 2.png, ..., saliency as 1.saliency.png, ..."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(samples, 1):
        for kind, figure in sample_figures(sample).items():
            save(figure, directory / (f"{number}.png" if kind == "alignment" else f"{number}.{kind}.png"))


def truncate_after(path: Path, step: int, validated: int) -> None:
    """Remove lines of metrics.jsonl: lines after `step`, validations after step `validated`, and damaged lines."""
    if not path.exists():
        return
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # a killed run may leave a damaged line
            values = json.loads(line)
            last = validated if "validation/loss" in values else step
            if values["step"] <= min(last, step):
                lines.append(line)
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode("utf-8"))


def check_packages(loggers: Iterable[str]) -> None:
    """Check that the package of each logger is installed. Raises UserError if one is missing."""
    for name in loggers:
        if find_spec(name) is None:  # a logger is named after its package
            raise UserError(f"logger={name}: needs another package: pip install {name}")


def start_wandb(run: RunDirectory, config: TrainConfig) -> Any:  # noqa: ANN401
    """Start the run of Weights & Biases (W&B), which reads its values from TensorBoard's files, or continue it.

    Its name is the last two parts of the run's path, or in a sweep, the path relative to the sweep, whose name is the
    group; its tags are the overrides that affect results. Raises UserError if W&B refuses the run.
    """
    import wandb

    path = run.path.resolve()
    sweep = next((folder for folder in path.parents if (folder / SWEEP).is_file()), None)
    choices = {key: value for key, value in run.overrides().items() if key not in NO_EFFECT_KEYS}
    try:
        started = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name="/".join(path.parts[-2:]) if sweep is None else str(path.relative_to(sweep)),
            group=None if sweep is None else "/".join(sweep.parts[-2:]),
            tags=[f"{key}={format_value(value)}"[:MAX_TAG] for key, value in choices.items()],
            config=config.model_dump(mode="json"),
            allow_val_change=True,
            id=read_json(run.path / WANDB).get("id"),
            resume="allow",
            sync_tensorboard=True,
            settings=wandb.Settings(console="off", silent=True),
        )
    except (Exception, SystemExit) as error:
        raise UserError(f"logger=wandb: cannot be used ({_reason(error)}); train without it") from None
    run.update_json(run.path / WANDB, {"id": str(started.id)})
    return started


def _reason(error: BaseException) -> str:
    return format_value(next(iter(str(error).splitlines()), "") or type(error).__name__, 300)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Raise the error, for example of a full disk, because logging would only print a traceback."""
        raise  # noqa: PLE0704


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Copy all log messages within this context, with their time, to the run's train.log."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("nmt")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
