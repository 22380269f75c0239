"""What TensorBoard shows of a run: curves, texts and pictures."""

import string
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from nmt.files import named_errors


def _report(args: threading.ExceptHookArgs) -> None:
    """An error in TensorBoard's writing thread is raised by the next call of its writer: not printed there too."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)


threading.excepthook = _report

# As a character reference no character has a meaning in Markdown or HTML.
_REFERENCES = {ord(character): f"&#{ord(character)};" for character in string.punctuation}


class TensorBoard:
    """Writes events to `directory`; to be used in a `with` statement or closed.

    `resume_step` is the last step whose events count, that of the checkpoint which the run continues from;
    None starts anew. What a killed run wrote to the directory after that step is superseded, so that every
    curve stays a single line.
    """

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        # TensorBoard hides earlier events from this step on, this step included.
        purge_step = 0 if resume_step is None else resume_step + 1
        _date_back(directory)
        self._directory = directory
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge_step)  # its methods are untyped
        self._hparams: Any = hparams

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point on each curve, by tag such as "train/loss"."""
        for tag, value in values.items():
            self._write("add_scalar", tag, value, step)

    def histogram(self, tag: str, values: NDArray[np.int64], step: int) -> None:
        """The distribution of whole numbers, a bin for each."""
        if values.size:
            bins = np.arange(values.min(), values.max() + 2) - 0.5
            self._write("add_histogram", tag, values, step, bins=bins.tolist())

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Markdown as it is."""
        self._write("add_text", tag, markdown, step)

    def samples(self, tag: str, rows: Sequence[tuple[str, str, str]], step: int) -> None:
        """A table of (source, reference, hypothesis), each shown literally."""
        table: list[Iterable[str]] = [("source", "reference", "hypothesis"), ("---",) * 3]
        table += [map(literal, row) for row in rows]
        self.text(tag, "\n".join(f"| {' | '.join(row)} |" for row in table), step)

    def image(self, tag: str, array: NDArray[np.uint8], step: int) -> None:
        """(H, W, 3), red, green and blue."""
        self._write("add_image", tag, array, step, dataformats="HWC")

    def choices(self, values: Mapping[str, str | float | bool | None]) -> None:
        """What the run chose, for the table and the parallel coordinates of HPARAMS.

        TensorBoard finds the columns, and which of them differ, from all runs it is given.
        """
        named = {key: "null" if value is None else value for key, value in values.items()}
        _, start, _ = self._hparams(named, {})  # the first part would describe all runs by this one
        with named_errors(self._directory):
            self._writer.file_writer.add_summary(start)

    def outcome(self, step: int, scores: Mapping[str, float]) -> None:
        """The run has come to its end, with these scores."""
        _, _, end = self._hparams({}, {})
        with named_errors(self._directory):
            self._writer.file_writer.add_summary(end)
        self.scalars(step, scores)

    def flush(self) -> None:
        """Bring everything written so far to the disk, as is due with every checkpoint."""
        self._write("flush")

    def close(self) -> None:
        """Flush and close the event file; closing twice does no harm."""
        self._write("close")

    def _write(self, method: str, *values: Any, **options: Any) -> None:  # noqa: ANN401
        with named_errors(self._directory):
            getattr(self._writer, method)(*values, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _date_back(directory: Path) -> None:
    """Let earlier event files have earlier names, whatever the clock says: TensorBoard reads them in that order."""
    named = sorted(directory.glob("events.out.tfevents.*.*"))
    files = [path for path in named if path.name.split(".")[3].isdecimal()]
    stamps = [int(path.name.split(".")[3]) for path in files]
    back = max(stamps, default=0) - int(time.time()) + 1
    for path, stamp in zip(files, stamps, strict=True) if back > 0 else ():
        parts = path.name.split(".")
        parts[3] = f"{stamp - back:010d}"
        path.rename(path.with_name(".".join(parts)))


def literal(text: str) -> str:
    """The text for a Markdown table's cell, shown as it is but for runs of white space."""
    return " ".join(text.translate(_REFERENCES).split())
