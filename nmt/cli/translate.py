"""nmt-translate: a filter from standard input to standard output."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO, TypeVar

from nmt.cli.app import run
from nmt.config.errors import UserError
from nmt.config.schema import TranslateConfig

if TYPE_CHECKING:
    from nmt.translation import Translation
    from nmt.translator import Translator

log = logging.getLogger(__name__)

MOST_CHARACTERS = 10_000_000  # read ahead, whatever buffer_lines says
Text = TypeVar("Text", str, tuple[str, str])


def main() -> None:
    """Entry point."""
    run("translate", TranslateConfig, _translate)


def _translate(config: TranslateConfig, overrides: list[str]) -> None:
    from nmt.machine import keep_freed_memory
    from nmt.translator import Translator

    keep_freed_memory()
    translator = Translator.load(config.run, **config.loading)
    with ExitStack() as files:
        alignments, references = None, None
        if config.references is not None:
            try:
                references = files.enter_context(Path(config.references).expanduser().open("rb"))
            except OSError as error:
                raise UserError(f"references={config.references}: cannot be read ({error.strerror})") from None
        if config.alignments is not None:
            if not translator.model.attends:
                raise UserError(f"alignments={config.alignments}: the run has no attention to align with")
            translator.check_nbest(config.nbest)  # before the file is emptied
            path = Path(config.alignments).expanduser()
            if path.exists() and any(
                os.path.samestat(path.stat(), os.fstat(file.fileno()))
                for file in (sys.stdin, sys.stdout, *filter(None, [references]))
            ):
                raise UserError(f"alignments={config.alignments}: is also the input or the output; name another file")
            try:
                alignments = files.enter_context(path.open("w", encoding="utf-8"))
            except OSError as error:
                raise UserError(f"alignments={config.alignments}: cannot be written ({error.strerror})") from None
        if references is not None:
            _score(translator, references, config.buffer_lines, alignments)
            return
        talking = config.interactive and sys.stdin.isatty()
        _filter(translator, config.nbest, 1 if talking else config.buffer_lines, alignments, talking)


def _score(translator: "Translator", references: BinaryIO, buffer_lines: int, alignments: TextIO | None) -> None:
    """Write the log-probability of each reference, and align it."""
    done = 0
    for buffer in _buffers(_pairs(_decoded(sys.stdin.buffer, "input"), references), buffer_lines):
        sources, targets = ([pair[side] for pair in buffer] for side in (0, 1))
        for translation in translator.score(sources, targets, first_line=done + 1):
            sys.stdout.buffer.write(f"{translation.log_prob:.4f}\n".encode())
            if alignments is not None:
                print(translation.word_alignment(), file=alignments)
        sys.stdout.buffer.flush()
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


def _filter(translator: "Translator", nbest: int, buffer_lines: int, alignments: TextIO | None, talking: bool) -> None:
    """Read, translate and write, `buffer_lines` lines at a time."""
    done = 0
    for buffer in _buffers(_lines(talking), buffer_lines):
        for found in translator.translate_nbest(buffer, nbest, first_line=done + 1):
            _write(found, done, nbest, alignments)
            done += 1
        sys.stdout.buffer.flush()


def _buffers(items: Iterable[Text], most: int) -> Iterator[list[Text]]:
    """Lines, or pairs of them, read ahead: so many, or fewer that are very long."""
    buffer: list[Text] = []
    characters = 0
    for item in items:
        buffer.append(item)
        characters += len(item) if isinstance(item, str) else sum(map(len, item))
        if len(buffer) == most or characters > MOST_CHARACTERS:
            yield buffer
            buffer, characters = [], 0
    if buffer:
        yield buffer


def _lines(talking: bool) -> Iterator[str]:
    """The input's lines, asked for on a terminal."""
    prompt = "> " if talking else ""
    print(prompt, end="", file=sys.stderr, flush=True)
    for line in _decoded(sys.stdin.buffer, "input"):
        yield line
        print(prompt, end="", file=sys.stderr, flush=True)
    print(end="\n" if talking else "", file=sys.stderr)


def _decoded(file: BinaryIO, name: str) -> Iterator[str]:
    """Lines end at newlines alone; bytes that are not UTF-8 are read as U+FFFD, with a warning."""
    for number, raw in enumerate(file, 1):
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError:
            log.warning("%s, line %d: not valid UTF-8, the broken bytes are read as U+FFFD", name, number)
            yield line.decode("utf-8", errors="replace")


def _write(found: "list[Translation]", index: int, nbest: int, alignments: TextIO | None) -> None:
    for translation in found:
        text = translation.text
        line = text if nbest == 1 else f"{index} ||| {text} ||| {translation.score:.4f}"
        sys.stdout.buffer.write(f"{line}\n".encode())
        if alignments is not None:
            links = translation.word_alignment()
            print(links if nbest == 1 else f"{index} ||| {links}", file=alignments)
