"""Where the numbers and pictures of a run go: metrics.jsonl, train.log, TensorBoard, W&B, MLflow, the progress bar."""

import json
import logging
import os
import string
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from nmt.config import schema
from nmt.config.compose import flatten
from nmt.config.errors import UserError, format_value
from nmt.explain.attention_statistics import Positions
from nmt.explain.heatmap import draw_alignment, save, to_array
from nmt.system.distributed import OtherProcessFailed, ProcessGroup
from nmt.system.files import named_errors, to_json, write_atomically
from nmt.system.run import SWEEP, RunDirectory, read_json
from nmt.training.checkpoint import Average
from nmt.training.validation import Sample

SHOWN = {"chrf": "chrF {:.2f}", "ter": "TER {:.2f}", "comet": "COMET {:.4f}"}  # where they are monitored
TENSORBOARD, WANDB, MLFLOW = "tensorboard", "wandb", "mlflow"
IDS = "trackers.json"  # in the run directory: the identifiers of the run in W&B and MLflow
MAX_TAG = 64  # characters of a tag of W&B
MAX_PARAMS = 100  # of MLflow, in a request
log = logging.getLogger(__name__)


class Journal:
    """Writes every number to metrics.jsonl, TensorBoard, W&B and MLflow, and the most important ones to the log and the
    progress bar. Use it in a `with` statement."""

    def __init__(self, run: RunDirectory, config: schema.TrainConfig) -> None:
        self._run, self._trackers = run, Trackers(run, config)
        self._writes_events = TENSORBOARD in config.logger or WANDB in config.logger  # W&B reads TensorBoard's files
        self._board: TensorBoard | None = None
        self._bar = tqdm(disable=True)

    def begin(self, logged_step: int, validated: int, step: int, total_steps: int) -> None:
        """Open all files at `step`. Removes the lines that a killed run wrote after `logged_step` (-1: all lines), and
        those of validations after the step `validated`. Raises UserError if W&B or MLflow refuses the run."""
        self._trackers.open()  # W&B watches for TensorBoard's files from here on
        truncate_after(self._run.metrics, logged_step, validated)
        if self._writes_events:
            self._board = TensorBoard(self._run.tensorboard, resume_step=logged_step if logged_step >= 0 else None)
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
        self._board.choices({"seed": values["seed"], **self._run.recorded_choices()})
        text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
        self._board.text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)

    def flush(self) -> None:
        """Write everything to disk."""
        if self._board:
            self._board.flush()
        if self._run.metrics.exists():
            with self._run.metrics.open("rb") as file:
                os.fsync(file.fileno())

    def end_of_updates(self) -> None:
        """Close the progress bar, so that another one can be shown."""
        self._bar.close()

    def outcome(self, step: int, scores: Mapping[str, float]) -> None:
        """Record the scores of a run that has ended at `step`.

        They are logged at step + 1: extending the run later hides all events after its last checkpoint, and so them.
        """
        if self._board:
            self._board.outcome(step + 1, scores)
        self._trackers.scalars(step + 1, scores)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close everything. After an error, W&B and MLflow show the run as one that can be resumed."""
        self._bar.close()
        try:
            if self._board:
                self._board.close()
        finally:
            self._trackers.close(finished=kind is None)

    def _record(
        self, step: int, epoch: float, kind: str, values: Mapping[str, float], extra: Mapping[str, Any] | None = None
    ) -> None:
        """`extra`: values for metrics.jsonl only, with their full names."""
        named = {f"{kind}/{name}": value for name, value in values.items() if name != "seconds_left"}
        if self._board:
            self._board.scalars(step, named)
        self._trackers.scalars(step, named)
        line = {"step": step, "epoch": round(epoch, 4), "time": round(time.time(), 3), **named, **(extra or {})}
        with self._run.metrics.open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")


class NullJournal(Journal):
    """The journal of a process that writes nothing: all but rank 0."""

    def _do_nothing(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Take the place of a method that writes."""

    __init__ = begin = advance = training = validation = average = samples = positions = _do_nothing
    config = flush = end_of_updates = outcome = __exit__ = _do_nothing


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


def truncate_after(path: Path, step: int, validated: int) -> None:
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


def _excepthook(args: threading.ExceptHookArgs) -> None:
    """Keep TensorBoard's writing thread from printing its errors: the writer's next call raises them."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)


threading.excepthook = _excepthook

# Punctuation as character references, which have no meaning in Markdown or HTML.
_ESCAPES = {ord(character): f"&#{ord(character)};" for character in string.punctuation}


class TensorBoard:
    """Writes events to `directory`; use it in a `with` statement or close it.

    `resume_step` is the step of the checkpoint that the run resumes from, or None for a new run. Events that a killed
    run wrote after that step are hidden, so that every curve stays a single line.
    """

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        purge_step = 0 if resume_step is None else resume_step + 1  # hides older events from this step on
        _backdate(directory)
        self._directory = directory
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge_step)  # its methods are untyped
        self._hparams: Any = hparams

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve, by tag such as "train/loss"."""
        for tag, value in values.items():
            self._write("add_scalar", tag, value, step)

    def histogram(self, tag: str, values: NDArray[np.int64], step: int) -> None:
        """Add a distribution of integers, with a bin for each."""
        if values.size:
            bins = np.arange(values.min(), values.max() + 2) - 0.5
            self._write("add_histogram", tag, values, step, bins=bins.tolist())

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Add a text in Markdown."""
        self._write("add_text", tag, markdown, step)

    def samples(self, tag: str, rows: Sequence[tuple[str, str, str]], step: int) -> None:
        """Add a table of (source, reference, hypothesis), escaped."""
        table: list[Iterable[str]] = [("source", "reference", "hypothesis"), ("---",) * 3]
        table += [map(literal, row) for row in rows]
        self.text(tag, "\n".join(f"| {' | '.join(row)} |" for row in table), step)

    def image(self, tag: str, array: NDArray[np.uint8], step: int) -> None:
        """Add an image of (H, W, 3) RGB pixels."""
        self._write("add_image", tag, array, step, dataformats="HWC")

    def choices(self, values: Mapping[str, str | float | bool | None]) -> None:
        """Add the run's hyperparameters for the HPARAMS tab, which finds their columns from all runs it shows.

        Numbers stay numbers; other values stand as a user types them, since TensorBoard would show true as 1.0.
        """
        words = {None: "null", True: "true", False: "false"}
        named = {
            key: words[value] if value is None or isinstance(value, bool) else value for key, value in values.items()
        }
        _, start, _ = self._hparams(named, {})  # the first part describes the columns by this run alone
        with named_errors(self._directory):
            self._writer.file_writer.add_summary(start)

    def outcome(self, step: int, scores: Mapping[str, float]) -> None:
        """Mark the run as finished, with these scores."""
        _, _, end = self._hparams({}, {})
        with named_errors(self._directory):
            self._writer.file_writer.add_summary(end)
        self.scalars(step, scores)

    def flush(self) -> None:
        """Write all events to disk; call it with every checkpoint."""
        self._write("flush")

    def close(self) -> None:
        """Flush and close the event file; may be called twice."""
        self._write("close")

    def _write(self, method: str, *values: Any, **options: Any) -> None:  # noqa: ANN401
        with named_errors(self._directory):
            getattr(self._writer, method)(*values, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _backdate(directory: Path) -> None:
    """Rename event files with time stamps in the future: TensorBoard reads files in the order of their names."""
    candidates = sorted(directory.glob("events.out.tfevents.*.*"))
    files = [path for path in candidates if path.name.split(".")[3].isdecimal()]
    stamps = [int(path.name.split(".")[3]) for path in files]
    excess = max(stamps, default=0) - int(time.time()) + 1
    for path, stamp in zip(files, stamps, strict=True) if excess > 0 else ():
        parts = path.name.split(".")
        parts[3] = f"{stamp - excess:010d}"
        path.rename(path.with_name(".".join(parts)))


def literal(text: str) -> str:
    """Escape a text for a cell of a Markdown table; runs of white space become one space."""
    return " ".join(text.translate(_ESCAPES).split())


class Trackers:
    """The run in Weights & Biases, which reads TensorBoard's files, and in MLflow. Both packages are extras."""

    def __init__(self, run: RunDirectory, config: schema.TrainConfig) -> None:
        self._run, self._config = run, config
        self._wandb: Any = None  # its run
        self._mlflow: Any = None  # the package, while a run of it is active
        self._sending: Any = None  # the points sent to MLflow last; those before them arrive first

    def open(self) -> None:
        """Begin the run in each tracker of the configuration, or continue it. Raises UserError if one refuses it."""
        ids = read_json(self._run.path / IDS)
        begun = dict[str, str]()
        for name in dict.fromkeys(self._config.logger):
            try:
                if name == WANDB:
                    begun[name] = self._begin_wandb(ids.get(name))
                elif name == MLFLOW:
                    begun[name] = self._begin_mlflow(ids.get(name))
            except (Exception, SystemExit) as error:
                raise UserError(f"logger={name}: cannot be used ({_reason(error)}); train without it") from None
        if begun:
            self._run.update_json(self._run.path / IDS, begun)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve of MLflow, by tag such as "train/loss"; a thread of MLflow sends them."""
        if self._mlflow is not None:
            self._sending = self._mlflow.log_metrics(dict(values), step=step, synchronous=False)

    def close(self, finished: bool) -> None:
        """Send everything. A tracker that fails now is a warning: the run itself is complete.

        finished=False: the run can be resumed.
        """
        for name, end in ((WANDB, self._end_wandb), (MLFLOW, self._end_mlflow)):
            try:
                end(finished)
            except (Exception, SystemExit) as error:
                log.warning("logger=%s: does not have the whole run (%s)", name, _reason(error))

    def _begin_wandb(self, known_id: str | None) -> str:
        import wandb

        name, sweep = self._names()
        self._wandb = wandb.init(
            project=self._config.tracking.project,
            entity=self._config.tracking.wandb_entity,
            name=name,
            group=sweep,
            tags=[f"{key}={value}"[:MAX_TAG] for key, value in self._tags().items()],
            config=self._config.model_dump(mode="json"),
            allow_val_change=True,
            id=known_id,
            resume="allow",
            sync_tensorboard=True,
            settings=wandb.Settings(console="off", silent=True),
        )
        return str(self._wandb.id)

    def _end_wandb(self, finished: bool) -> None:
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if finished else 1)

    def _begin_mlflow(self, known_id: str | None) -> str:
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        if self._config.tracking.mlflow_uri is not None:
            mlflow.set_tracking_uri(self._config.tracking.mlflow_uri)
        mlflow.set_experiment(self._config.tracking.project)
        name, sweep = self._names()
        tags = ({} if sweep is None else {"sweep": sweep}) | self._tags()
        begun = mlflow.start_run(run_id=known_id, run_name=name, tags=tags)
        self._mlflow = mlflow
        params = [] if known_id is not None else [*flatten(self._config.model_dump(mode="json"))]
        for start in range(0, len(params), MAX_PARAMS):
            mlflow.log_params(dict(params[start : start + MAX_PARAMS]))
        return str(begun.info.run_id)

    def _end_mlflow(self, finished: bool) -> None:
        if self._mlflow is None:
            return
        try:
            if self._sending is not None:
                self._sending.wait()
            if finished and self._run.alignments.is_dir():
                self._mlflow.log_artifacts(str(self._run.alignments), self._run.alignments.name)
        finally:
            self._mlflow.end_run("FINISHED" if finished else "KILLED")

    def _names(self) -> tuple[str, str | None]:
        """The run's name, and that of the sweep it belongs to: the last two parts of a path, or a path in the sweep."""
        path = self._run.path.resolve()
        sweep = next((folder for folder in path.parents if (folder / SWEEP).is_file()), None)
        if sweep is None:
            return "/".join(path.parts[-2:]), None
        return str(path.relative_to(sweep)), "/".join(sweep.parts[-2:])

    def _tags(self) -> dict[str, str]:
        """The overrides of the command line that affect results."""
        return {
            key: format_value(value) for key, value in self._run.overrides().items() if key not in schema.NO_EFFECT_KEYS
        }


def check_packages(loggers: Iterable[str]) -> None:
    """Raises UserError if the package of a logger is missing."""
    for name in loggers:
        if find_spec(name) is None:  # a logger is named after its package
            raise UserError(f"logger={name}: needs another package: pip install {name}")


def _reason(error: BaseException) -> str:
    return format_value(next(iter(str(error).splitlines()), "") or type(error).__name__, 300)


@contextmanager
def log_of_others(group: ProcessGroup, path: Path) -> Iterator[None]:
    """Add the error that ends a group to the run's train.log: on the main process all that it knows of, on another one
    what it could not report."""
    try:
        yield
    except Exception as error:
        if group.size > 1 and path.is_file() and not isinstance(error, OtherProcessFailed):
            name = "" if group.is_main else f"process {group.rank}: "
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {name}{error}\n")
        raise


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Let a full disk end the run, as for every other file, instead of printing a traceback for each line."""
        raise  # noqa: PLE0704


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Copy all log messages to the run's train.log, with the time."""
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
