"""nmt-translate: a filter from standard input to standard output."""

import logging
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, cast

from nmt.cli.app import run_command, write
from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.launch import shared_by_processes
from nmt.config.errors import UserError, format_value
from nmt.config.overrides import user_path
from nmt.config.schema import TranslateConfig
from nmt.data.text import is_blank, open_text, user_lines

if TYPE_CHECKING:
    from nmt.system.distributed import ProcessGroup
    from nmt.translate.guidance import Controls
    from nmt.translate.translator import Translator

log = logging.getLogger(__name__)

MAX_CHARACTERS = 10_000_000  # in a buffer, regardless of buffer_lines
CHUNK = 65_536  # bytes per read: the capacity of a pipe
PAUSE = 0.02  # seconds to wait for a further line before translating those that have arrived
Text = TypeVar("Text", str, tuple[str, ...])
Item = tuple[str, ...]  # a line of the input, its constraints, its prefix
TAB = "\t"


def main() -> None:
    """Entry point."""
    run_command("translate", TranslateConfig, shared_by_processes("translate", _translate))


def _translate(config: TranslateConfig, overrides: list[str]) -> None:
    with exit_at_ctrl_c("translate"):
        from nmt.system.distributed import ProcessGroup
        from nmt.system.machine import fair_waiting, tune_memory
        from nmt.translate.translator import Translator

    for key in ("constraints", "prefix"):
        if _is_interactive(config) and (name := getattr(config, key)) is not None:
            raise UserError(f"{key}={name}: belongs to the lines of a file; give the input with < FILE")
    tune_memory()
    with ExitStack() as files:
        group = files.enter_context(ProcessGroup.join())
        translator = group.everywhere(partial(Translator.load, config.run, **config.load_arguments, group=group))
        files.enter_context(fair_waiting())
        common = group.everywhere(partial(read_controls, config.glossary, config.forbidden))
        if not group.is_main:
            _translate_shares(translator, config, common)
            return
        alignments, references = None, None
        if config.references is not None:
            references = files.enter_context(_opened("references", config.references, "rb"))
        if config.alignments is not None:
            _check_alignments(config, config.alignments, translator, references)  # before the file is emptied
            alignments = files.enter_context(_opened("alignments", config.alignments, "wb"))
        if references is not None:
            _score(translator, references, config.buffer_lines, alignments)
        else:
            named = {key: getattr(config, key) for key in ("constraints", "prefix")}
            given = {
                key: files.enter_context(_opened(key, name, "rb")) for key, name in named.items() if name is not None
            }
            _filter(translator, config, alignments, given, common)


def _check_alignments(
    config: TranslateConfig, name: str, translator: "Translator", references: BinaryIO | None
) -> None:
    """Raises UserError if there will be no alignments, or if they would overwrite what the command reads or writes."""
    if not translator.model.attends:
        raise UserError(f"alignments={name}: the run has no attention to align with")
    translator.method.check_nbest(config.nbest)
    if _is_open(user_path(name), (sys.stdin, sys.stdout, references)):
        raise UserError(f"alignments={name}: is also the input or the output; name another file")
    for key in ("constraints", "prefix", "glossary", "forbidden"):
        if _is_same(name, getattr(config, key)):
            raise UserError(f"alignments={name}: is also {key}=; name another file")


def _translate_shares(translator: "Translator", config: TranslateConfig, common: "Controls") -> None:
    """Translate or score this process's share of what rank 0 reads."""
    done = 0
    nothing: Iterator[list[Any]] = iter(())
    for buffer in translator.group.from_main(nothing):
        if config.references is None:
            controls = controls_of(buffer, common)
            translator.translate_nbest([item[0] for item in buffer], config.nbest, first_line=done + 1, **controls)
        else:
            sources, targets = ([pair[side] for pair in buffer] for side in (0, 1))
            translator.score(sources, targets, first_line=done + 1)
        done += len(buffer)


def _opened(key: str, path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
    try:
        return open_text(user_path(path)) if mode == "rb" else user_path(path).open(mode)
    except OSError as error:
        verb = "read" if mode == "rb" else "written"
        raise UserError(f"{key}={path}: cannot be {verb} ({error.strerror})") from None


def _is_same(name: str, other: str | None) -> bool:
    one, two = user_path(name), None if other is None else user_path(other)
    return two is not None and one.exists() and two.exists() and one.samefile(two)


def _is_open(path: Path, files: Iterable[IO[str] | BinaryIO | None]) -> bool:
    if not path.exists():
        return False
    return any(os.path.samestat(path.stat(), os.fstat(file.fileno())) for file in files if file is not None)


def _score(translator: "Translator", references: BinaryIO, buffer_lines: int, alignments: BinaryIO | None) -> None:
    """Write the log-probability of each reference, and its alignment."""
    done = 0
    reader = LineReader(sys.stdin.buffer)
    pairs = _pairs(user_lines("input", reader, strict=False), references)
    for buffer in translator.group.from_main(_buffers(pairs, buffer_lines, reader.has_line)):
        sources, targets = ([pair[side] for pair in buffer] for side in (0, 1))
        results = translator.score(sources, targets, first_line=done + 1)
        links = [result.word_alignment() for result in results] if alignments is not None else []
        _write(translator.group, [f"{result.log_prob:.4f}" for result in results], links, alignments)
        done += len(buffer)


def _pairs(sources: Iterator[str], references: BinaryIO) -> Iterator[tuple[str, str]]:
    """Pair sources with their references. Raises UserError if one of the two files is shorter."""
    pairs = zip_longest(sources, user_lines(f"references={references.name}", references, strict=False))
    for number, (source, target) in enumerate(pairs, 1):
        if source is None or target is None:
            raise UserError(
                f"references={references.name}: line {number} is missing there or in the input; line N of one must be "
                "the translation of line N of the other"
            )
        yield source, target


def _is_interactive(config: TranslateConfig) -> bool:
    return config.interactive and sys.stdin.isatty()


def _filter(
    translator: "Translator",
    config: TranslateConfig,
    alignments: BinaryIO | None,
    given: Mapping[str, BinaryIO],
    common: "Controls",
) -> None:
    """Read, translate and write, one buffer of lines at a time.

    given: the open files of constraints and prefixes. common: the controls of all lines.
    """
    interactive = _is_interactive(config)
    reader = LineReader(sys.stdin.buffer)
    done = 0
    lines_read = _lines(reader, interactive)
    items = from_terminal(lines_read) if interactive else with_controls(lines_read, given)
    buffers = _buffers(items, 1 if interactive else config.buffer_lines, reader.has_line)
    for buffer in translator.group.from_main(buffers):
        lines: list[str] = []
        links: list[str] = []
        sources, controls = [item[0] for item in buffer], controls_of(buffer, common)
        for hypotheses in translator.translate_nbest(sources, config.nbest, first_line=done + 1, **controls):
            for hypothesis in hypotheses:
                text, score = hypothesis.text, hypothesis.score
                lines.append(text if config.nbest == 1 else f"{done} ||| {text} ||| {score:.4f}")
                if alignments is not None:
                    links.append(f"{'' if config.nbest == 1 else f'{done} ||| '}{hypothesis.word_alignment()}")
            done += 1
        _write(translator.group, lines, links, alignments)


class LineReader:
    """The lines of a stream, such as a pipe to which another program still writes. Only newlines end a line."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = cast(BufferedReader, stream)
        with suppress(OSError, ValueError):
            os.set_blocking(stream.fileno(), True)  # otherwise nothing to read yet would look like the end
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
            chunk = self._stream.read1(CHUNK)
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


def _buffers(items: Iterable[Text], size: int, has_next: Callable[[], bool]) -> Iterator[list[Text]]:
    """Group `size` lines or pairs, fewer if lines are very long or the next line has not arrived yet."""
    buffer: list[Text] = []
    characters = 0
    for item in items:
        buffer.append(item)
        characters += len(item) if isinstance(item, str) else sum(map(len, item))
        if len(buffer) == size or characters > MAX_CHARACTERS or not has_next():
            yield buffer
            buffer, characters = [], 0
    if buffer:
        yield buffer


def _lines(reader: LineReader, interactive: bool) -> Iterator[str]:
    """Yield the lines of the input, with a prompt on a terminal."""
    prompt = "> " if interactive else ""
    print(prompt, end="", file=sys.stderr, flush=True)
    for line in user_lines("input", reader, strict=False):
        yield line
        print(prompt, end="", file=sys.stderr, flush=True)
    print(end="\n" if interactive else "", file=sys.stderr)


def _write(group: "ProcessGroup", lines: list[str], links: list[str], alignments: BinaryIO | None) -> None:
    """Write alignments, then translations: a reader of a translation finds its alignment already written.

    The other processes wait for the next lines, and learn of an error.
    """
    outputs: list[tuple[BinaryIO, str, list[str]]] = [(sys.stdout.buffer, "standard output", lines)]
    if alignments is not None:
        outputs.insert(0, (alignments, alignments.name, links))
    for stream, name, written in outputs:
        if error := write(stream, "".join(f"{line}\n" for line in written).encode(), name):
            group.fail(error)


def read_controls(glossary: str | None, forbidden: str | None) -> "Controls":
    """Read the controls of all lines. Raises UserError for files that cannot be read, or are not in their format."""
    controls: Controls = {}
    if glossary is not None:
        controls["glossary"] = _glossary(f"glossary={glossary}", _lines_of_file("glossary", glossary))
    if forbidden is not None:
        phrases = _lines_of_file("forbidden", forbidden)
        for number, phrase in enumerate(phrases, 1):
            if is_blank(phrase) or TAB in phrase:
                problem = "holds a tab" if TAB in phrase else "is empty"
                raise UserError(f"forbidden={forbidden}: line {number} {problem}; give one phrase per line")
        controls["forbidden"] = phrases
    return controls


def with_controls(sources: Iterable[str], files: Mapping[str, BinaryIO]) -> Iterator[Item]:
    """Yield each line of the input with its constraints and its prefix, "" where there is no file.

    files: the open files, by their keys. Raises UserError if a file has more or fewer lines than the input, or is not
    in its format.
    """
    columns = [user_lines(f"{key}={file.name}", file) for key, file in files.items()]
    for number, (source, *values) in enumerate(zip_longest(sources, *columns), 1):
        for (key, file), value in zip(files.items(), values, strict=True):
            name = f"{key}={file.name}"
            if source is None or value is None:
                missing = "the input" if source is None else "this file"
                raise UserError(
                    f"{name}: line {number} is missing in {missing}; line N of this file belongs to line N of the "
                    "input, and may be empty"
                )
            if key == "prefix" and TAB in value:
                raise UserError(f"{name}: line {number} holds a tab; give the start of translation {number} alone")
            if key == "constraints" and value and any(map(is_blank, value.split(TAB))):
                raise UserError(
                    f"{name}: line {number} has an empty phrase; separate phrases by one tab, and leave the lines of "
                    "translations without constraints empty"
                )
        if source is not None:
            controls = dict(zip(files, values, strict=True))
            yield source, controls.get("constraints", ""), controls.get("prefix", "")


def from_terminal(lines: Iterable[str]) -> Iterator[Item]:
    """Yield lines from a terminal: what follows a tab starts the translation."""
    for line in lines:
        source, _, prefix = line.partition(TAB)
        yield source, "", prefix.replace(TAB, " ")


def controls_of(items: Iterable[Item], common: "Controls") -> "Controls":
    """Join the controls of some lines."""
    constraints, prefixes = ([item[part] for item in items] for part in (1, 2))
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
    try:
        with open_text(user_path(path)) as file:
            return list(user_lines(f"{key}={path}", file))
    except OSError as error:
        raise UserError(f"{key}={path}: cannot be read ({error.strerror})") from None
