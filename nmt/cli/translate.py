"""nmt-translate: a filter from standard input to standard output."""

import logging
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from io import BufferedReader
from itertools import zip_longest
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

from nmt.cli.app import run_command
from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.output import write
from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import TranslateConfig

if TYPE_CHECKING:
    from nmt.translator import Translator

log = logging.getLogger(__name__)

MOST_CHARACTERS = 10_000_000  # read ahead, whatever buffer_lines says
CHUNK = 65_536  # bytes that are read at once, as many as a pipe holds
PAUSE = 0.02  # seconds without a further line after which those that have arrived are translated
Text = TypeVar("Text", str, tuple[str, str])


def main() -> None:
    """Entry point."""
    run_command("translate", TranslateConfig, _translate)


def _translate(config: TranslateConfig, overrides: list[str]) -> None:
    with exit_at_ctrl_c("translate"):
        from nmt.machine import tune_memory
        from nmt.translator import Translator

    tune_memory()
    translator = Translator.load(config.run, **config.loading)
    with ExitStack() as files:
        alignments, references = None, None
        if config.references is not None:
            try:
                references = files.enter_context(user_path(config.references).open("rb"))
            except OSError as error:
                raise UserError(f"references={config.references}: cannot be read ({error.strerror})") from None
        if config.alignments is not None:
            if not translator.model.attends:
                raise UserError(f"alignments={config.alignments}: the run has no attention to align with")
            translator.check_nbest(config.nbest)  # before the file is emptied
            path = user_path(config.alignments)
            if path.exists() and any(
                os.path.samestat(path.stat(), os.fstat(file.fileno()))
                for file in (sys.stdin, sys.stdout, *filter(None, [references]))
            ):
                raise UserError(f"alignments={config.alignments}: is also the input or the output; name another file")
            try:
                alignments = files.enter_context(path.open("wb"))
            except OSError as error:
                raise UserError(f"alignments={config.alignments}: cannot be written ({error.strerror})") from None
        if references is not None:
            _score(translator, references, config.buffer_lines, alignments)
        else:
            _filter(translator, config, alignments)


def _score(translator: "Translator", references: BinaryIO, most: int, alignments: BinaryIO | None) -> None:
    """Write the log-probability of each reference, and align it."""
    done = 0
    arriving = Arriving(sys.stdin.buffer)
    pairs = _pairs(_decoded(arriving, "input"), references)
    for buffer in _buffers(pairs, most, arriving.has_line):
        sources, targets = ([pair[side] for pair in buffer] for side in (0, 1))
        found = translator.score(sources, targets, first_line=done + 1)
        links = [each.word_alignment() for each in found] if alignments is not None else []
        _write([f"{each.log_prob:.4f}" for each in found], links, alignments)
        done += len(buffer)


def _pairs(sources: Iterator[str], references: BinaryIO) -> Iterator[tuple[str, str]]:
    """Raises UserError where one of the two has ended."""
    pairs = zip_longest(sources, _decoded(references, references.name))
    for number, (source, target) in enumerate(pairs, 1):
        if source is None or target is None:
            raise UserError(
                f"references={references.name}: line {number} is missing in it or in the input; line N of one must be "
                "the translation of line N of the other"
            )
        yield source, target


def _filter(translator: "Translator", config: TranslateConfig, alignments: BinaryIO | None) -> None:
    """Read, translate and write, some lines at a time."""
    talking = config.interactive and sys.stdin.isatty()
    arriving = Arriving(sys.stdin.buffer)
    sampling = translator.search.kind == "sampling"  # what is drawn depends on the lines that are translated together
    has_line = (lambda: True) if sampling else arriving.has_line
    done = 0
    for buffer in _buffers(_lines(arriving, talking), 1 if talking else config.buffer_lines, has_line):
        lines: list[str] = []
        links: list[str] = []
        for found in translator.translate_nbest(buffer, config.nbest, first_line=done + 1):
            for each in found:
                text, score = each.text, each.score
                lines.append(text if config.nbest == 1 else f"{done} ||| {text} ||| {score:.4f}")
                if alignments is not None:
                    links.append(f"{'' if config.nbest == 1 else f'{done} ||| '}{each.word_alignment()}")
            done += 1
        _write(lines, links, alignments)


class Arriving:
    """The lines of a stream, which may be a pipe that another program still writes to. They end at newlines alone."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = cast(BufferedReader, stream)
        self._lines: deque[bytes] = deque()
        self._rest: list[bytes] = []  # of a line whose end has not arrived
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        while self._lines or self._read():
            if self._lines:
                yield self._lines.popleft()

    def has_line(self) -> bool:
        """Whether another line has arrived, or arrives within PAUSE: a fast writer needs some time to be scheduled."""
        while not self._lines and not self._ended and select.select([self._stream], [], [], PAUSE)[0]:
            self._read()
        return bool(self._lines)

    def _read(self) -> bool:
        """Read what has arrived, or wait for it. Returns False at the end."""
        if self._ended:
            return False
        try:
            chunk = self._stream.read1(CHUNK)
        except OSError as error:  # such as after `nohup`, whose standard input cannot be read
            raise UserError(f"standard input: cannot be read ({error.strerror})") from None
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._lines.append(b"".join([*self._rest, end]))
            self._rest.clear()
        self._rest += [rest] if rest else []
        if not chunk:
            self._ended = True
            self._lines += [b"".join(self._rest)] if self._rest else []
        return bool(chunk or self._lines)


def _buffers(items: Iterable[Text], most: int, has_next: Callable[[], bool]) -> Iterator[list[Text]]:
    """Lines, or pairs of them, read ahead: `most`, or fewer that are very long or after which none has arrived yet."""
    buffer: list[Text] = []
    characters = 0
    for item in items:
        buffer.append(item)
        characters += len(item) if isinstance(item, str) else sum(map(len, item))
        if len(buffer) == most or characters > MOST_CHARACTERS or not has_next():
            yield buffer
            buffer, characters = [], 0
    if buffer:
        yield buffer


def _lines(arriving: Arriving, talking: bool) -> Iterator[str]:
    """The input's lines, asked for on a terminal."""
    prompt = "> " if talking else ""
    print(prompt, end="", file=sys.stderr, flush=True)
    for line in _decoded(arriving, "input"):
        yield line
        print(prompt, end="", file=sys.stderr, flush=True)
    print(end="\n" if talking else "", file=sys.stderr)


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Text without the ends of its lines; bytes that are not UTF-8 are read as U+FFFD, with a warning."""
    for number, raw in enumerate(lines, 1):
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError:
            log.warning("%s, line %d: not valid UTF-8, the broken bytes are read as U+FFFD", name, number)
            yield line.decode("utf-8", errors="replace")


def _write(lines: list[str], links: list[str], alignments: BinaryIO | None) -> None:
    """Write translations, after their alignments: who reads an answer finds its alignment too."""
    outputs: list[tuple[BinaryIO, str, list[str]]] = [(sys.stdout.buffer, "standard output", lines)]
    if alignments is not None:
        outputs.insert(0, (alignments, alignments.name, links))
    for stream, name, written in outputs:
        if error := write(stream, "".join(f"{line}\n" for line in written).encode(), name):
            raise error
