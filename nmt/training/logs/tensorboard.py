"""Writes curves, texts, images and hyperparameters of a run for TensorBoard."""

import string
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from nmt.system.files import named_errors


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
