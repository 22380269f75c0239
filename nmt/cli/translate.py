"""nmt-translate: translate lines from standard input to standard output."""

import os
import select
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.launch import in_processes
from nmt.cli.run_command import run_configured
from nmt.config.errors import UserError, format_value, user_path
from nmt.config.schema import TranslateConfig
from nmt.data.text import is_blank, open_text, user_lines
from nmt.system.files import write

if TYPE_CHECKING:
    from nmt.system.distributed import ProcessGroup
    from nmt.translate.guidance import Controls
    from nmt.translate.translator import Translator

MAX_CHARACTERS = 10_000_000  # a buffer of more characters is translated, even if it has fewer than buffer_lines lines
PIPE_BYTES = 65_536  # bytes per read: the capacity of a pipe
PAUSE = 0.02  # seconds to wait for a further line before translating those that have arrived
BY_LINE = ("references", "constraints", "prefix")  # files whose line N belongs to line N of the input
Item = tuple[str, Mapping[str, str]]  # a line of the input, and its lines in the files of BY_LINE, by key
TAB = "\t"


def main() -> None:
    run_configured(
        "translate", TranslateConfig, lambda config: in_processes(config.processes, "translate", translate, config)
    )


def translate(config: TranslateConfig) -> None:
    """Translate standard input to standard output."""
    with exit_at_ctrl_c("translate"):
        from nmt.system.distributed import ProcessGroup
        from nmt.system.machine import fair_waiting, tune_memory
        from nmt.translate.translator import Translator

    interactive = config.interactive and sys.stdin.isatty()
    paths = {key: path for key in BY_LINE if (path := getattr(config, key)) is not None}
    if interactive and (key := next((key for key in paths if key != "references"), None)):
        raise UserError(f"{key}={paths[key]}: belongs to the lines of a file; give the input with < FILE")
    tune_memory()
    with ExitStack() as stack:
        group = stack.enter_context(ProcessGroup.join())
        translator = group.everywhere(partial(Translator.load, config.run, **config.load_arguments, group=group))
        stack.enter_context(fair_waiting())
        common = group.everywhere(partial(read_controls, config.glossary, config.forbidden))
        buffers: Iterator[list[Item]] = iter(())
        alignments = None
        if group.is_main:
            files = {key: stack.enter_context(_opened(key, path, "rb")) for key, path in paths.items()}
            if config.alignments is not None:
                _check_alignments(config, config.alignments, translator)  # before opening the file empties it
                alignments = stack.enter_context(_opened("alignments", config.alignments, "wb"))
            buffers = read_buffers(sys.stdin.buffer, files, config.buffer_lines, interactive)
        answer(translator, config, buffers, alignments, common)


def _check_alignments(config: TranslateConfig, name: str, translator: "Translator") -> None:
    """Raises UserError if the run has no attention, if the search method cannot return nbest translations, or if the
    file for the alignments is also the output or a file to read."""
    from nmt.system.run import RunDirectory

    if not translator.model.attends:
        raise UserError(f"alignments={name}: the run has no attention to align with")
    translator.method.check_nbest(config.nbest)
    path = user_path(name)
    if any(RunDirectory(user_path(run)).owns(path) for run in config.run):
        raise UserError(f"alignments={name}: lies among the run's own files; name another file")
    others: dict[str, Path | int] = {"the input": sys.stdin.fileno(), "the output": sys.stdout.fileno()}
    for key in (*BY_LINE, "glossary", "forbidden"):
        if (other := getattr(config, key)) is not None:
            others[f"{key}="] = user_path(other)
    for meaning, other in others.items() if path.exists() else ():
        if os.path.samestat(path.stat(), os.stat(other)):
            raise UserError(f"alignments={name}: is also {meaning}; name another file")


def _opened(key: str, path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
    try:
        return open_text(user_path(path)) if mode == "rb" else user_path(path).open(mode)
    except OSError as error:
        verb = "read" if mode == "rb" else "written"
        raise UserError(f"{key}={path}: cannot be {verb} ({error.strerror})") from None


def answer(
    translator: "Translator",
    config: TranslateConfig,
    buffers: Iterator[list[Item]],
    alignments: BinaryIO | None,
    common: "Controls",
) -> None:
    """Translate the lines of each buffer, or score their references.

    All processes share the work; only rank 0 reads and writes. `common` holds the controls that apply to all lines.
    """
    done = 0
    for buffer in translator.group.from_main(buffers):
        sources, first_line = [source for source, _ in buffer], done + 1
        if config.references is not None:
            targets = [values["references"] for _, values in buffer]
            nbests = [[result] for result in translator.score(sources, targets, first_line=first_line)]
        else:
            controls = controls_of(buffer, common)
            nbests = translator.translate_nbest(sources, config.nbest, first_line=first_line, **controls)
        if translator.group.is_main:
            lines, links = [], []
            for number, nbest in enumerate(nbests, done):
                start = f"{number} ||| " if config.nbest > 1 else ""
                for result in nbest:
                    text = f"{result.log_prob:.4f}" if config.references is not None else result.text
                    lines.append(f"{start}{text} ||| {result.score:.4f}" if start else text)
                    if alignments is not None:
                        links.append(f"{start}{result.word_alignment()}")
            _write(translator.group, lines, links, alignments)
        done += len(buffer)


class LineReader:
    """Reads lines from a stream, such as a pipe to which another program still writes. Only newlines end a line."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = cast(BufferedReader, stream)
        with suppress(OSError, ValueError):
            os.set_blocking(stream.fileno(), True)  # in a non-blocking stream, a pause would look like the end
        self._lines: deque[bytes] = deque()
        self._rest: list[bytes] = []  # the start of an incomplete line
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        while self._lines or self._read():
            if self._lines:
                yield self._lines.popleft()

    def has_line(self) -> bool:
        """Is a line available, now or within PAUSE? Even a fast writer needs time to be scheduled."""
        while not self._lines and not self._ended and select.select([self._stream], [], [], PAUSE)[0]:
            self._read()
        return bool(self._lines)

    def _read(self) -> bool:
        """Read what is available, or wait for it. Returns False at the end."""
        if self._ended:
            return False
        try:
            chunk = self._stream.read1(PIPE_BYTES)
        except OSError as error:  # e.g. after `nohup`, whose standard input cannot be read
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


def read_buffers(stream: BinaryIO, files: Mapping[str, BinaryIO], size: int, interactive: bool) -> Iterator[list[Item]]:
    """Yield buffers of `size` lines of the input, with their lines in the open files of BY_LINE.

    A buffer has fewer lines if they are very long or if the next line has not arrived yet; on a terminal it has one.
    """
    reader = LineReader(stream)
    lines = _lines(reader, interactive)
    buffer: list[Item] = []
    characters = 0
    for item in from_terminal(lines) if interactive and not files else zip_with_files(lines, files):
        buffer.append(item)
        characters += len(item[0]) + sum(map(len, item[1].values()))
        if interactive or len(buffer) == size or characters > MAX_CHARACTERS or not reader.has_line():
            yield buffer
            buffer, characters = [], 0
    if buffer:
        yield buffer


def _lines(reader: LineReader, interactive: bool) -> Iterator[str]:
    """Yield the lines of the input; on a terminal, print a prompt before each."""
    prompt = "> " if interactive else ""
    print(prompt, end="", file=sys.stderr, flush=True)
    for line in user_lines("input", reader, strict=False):
        yield line
        print(prompt, end="", file=sys.stderr, flush=True)
    print(end="\n" if interactive else "", file=sys.stderr)


def _write(group: "ProcessGroup", lines: list[str], links: list[str], alignments: BinaryIO | None) -> None:
    """Write alignments, then translations: who reads a translation finds its alignment already written.

    Only rank 0 calls this. Meanwhile the other ranks wait for the next buffer; `group.fail` tells them of an error.
    """
    outputs: list[tuple[BinaryIO, str, list[str]]] = [(sys.stdout.buffer, "standard output", lines)]
    if alignments is not None:
        outputs.insert(0, (alignments, alignments.name, links))
    for stream, name, written in outputs:
        if error := write(stream, "".join(f"{line}\n" for line in written).encode(), name):
            group.fail(error)


def read_controls(glossary: str | None, forbidden: str | None) -> "Controls":
    """Read the controls that apply to all lines. Raises UserError if a file cannot be read or is malformed."""
    controls: Controls = {}
    if glossary is not None:
        controls["glossary"] = _glossary(f"glossary={glossary}", _lines_of_file("glossary", glossary))
    if forbidden is not None:
        controls["forbidden"] = _lines_of_file("forbidden", forbidden)
        for number, phrase in enumerate(controls["forbidden"], 1):
            _check_control("forbidden", f"forbidden={forbidden}", number, phrase)
    return controls


def _check_control(key: str, name: str, number: int, line: str) -> None:
    """Raise UserError if a line of a control's file, called `name` in the message, is malformed."""
    problem = ""
    if key == "prefix" and TAB in line:
        problem = f"holds a tab; give the start of translation {number} alone"
    elif key == "forbidden" and (is_blank(line) or TAB in line):
        problem = f"{'holds a tab' if TAB in line else 'is empty'}; give one phrase per line"
    elif key == "constraints" and line and any(map(is_blank, line.split(TAB))):
        problem = "has an empty phrase; separate phrases by one tab, and leave lines without constraints empty"
    if problem:
        raise UserError(f"{name}: line {number} {problem}")


def zip_with_files(sources: Iterable[str], files: Mapping[str, BinaryIO]) -> Iterator[Item]:
    """Yield each line of the input with the same line of each open file, by the file's key.

    Raises UserError if a file has more or fewer lines than the input, or is malformed.
    """
    columns = [user_lines(f"{key}={file.name}", file, strict=key != "references") for key, file in files.items()]
    for number, (source, *values) in enumerate(zip_longest(sources, *columns), 1):
        for (key, file), value in zip(files.items(), values, strict=True):
            name = f"{key}={file.name}"
            if source is None or value is None:
                missing = "the input" if source is None else "this file"
                raise UserError(
                    f"{name}: line {number} is missing in {missing}; line N of this file belongs to line N of the "
                    "input, and may be empty"
                )
            _check_control(key, name, number, value)
        if source is not None:
            yield source, dict(zip(files, values, strict=True))


def from_terminal(lines: Iterable[str]) -> Iterator[Item]:
    """Yield lines from a terminal: the text after a tab is the prefix of the translation."""
    for line in lines:
        source, _, prefix = line.partition(TAB)
        yield source, {"prefix": prefix.replace(TAB, " ")}


def controls_of(items: Iterable[Item], common: "Controls") -> "Controls":
    """Join the controls that apply to all lines with the constraints and prefixes of these items."""
    constraints, prefixes = ([values.get(key, "") for _, values in items] for key in ("constraints", "prefix"))
    controls: Controls = {**common}
    if any(constraints):
        controls["constraints"] = [line.split(TAB) if line else [] for line in constraints]
    if any(prefixes):
        controls["prefixes"] = prefixes
    return controls


def _glossary(name: str, lines: list[str]) -> dict[str, str]:
    entries: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(lines, 1):
        pair = [side.strip() for side in line.split(TAB)]
        if len(pair) != 2 or any(map(is_blank, pair)):  # noqa: PLR2004
            raise UserError(
                f"{name}: line {number} is {format_value(line)!r}; write a source phrase, one tab and a target phrase"
            )
        source, target = pair
        if entries.setdefault(source, (target, number))[0] != target:
            raise UserError(
                f"{name}: line {number} translates {format_value(source)!r} in another way than line "
                f"{entries[source][1]}; keep one of them"
            )
    return {source: target for source, (target, _) in entries.items()}


def _lines_of_file(key: str, path: str) -> list[str]:
    with _opened(key, path, "rb") as file:
        return list(user_lines(f"{key}={path}", file))
