"""A command called in this process, and the laws that it is held to whatever its words are."""

import contextlib
import io
import logging
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from nmt.cli import sweep
from nmt.config.compose import config_dir


class Outcome(NamedTuple):
    """What a command left behind."""

    status: Any
    out: str
    err: str
    warned: list[str]
    left: list[str]  # files and folders that were not there before
    config: Mapping[str, Any] | None  # the job's values, where it came to its work


def call(
    main: Callable[[], None], command: str, words: list[str], place: Path, seen: list[Mapping[str, Any]]
) -> Outcome:
    """The command's own main(), in a folder of its own; it leaves the values it would work with in `seen`."""
    shutil.rmtree(place, ignore_errors=True)
    inner = place / "inner"
    inner.mkdir(parents=True)
    os.chdir(inner)
    sys.argv = [f"nmt-{command}", *words]
    os.environ["HYDRA_FULL_ERROR"] = ""
    os.environ.pop(sweep.COUNT, None)
    sweep.NameJobs.directory, sweep.NameJobs.created = None, False
    seen.clear()
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO(), errors="backslashreplace")
    status: Any = None
    with (
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        warnings.simplefilter("always")
        try:
            main()
        except SystemExit as exit_:
            status = exit_.code or 0
        except BaseException as error:
            status = error
        finally:
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None
            logging.getLogger("nmt").handlers = []
            for stream in (out, err):
                stream.flush()
    left = [str(path.relative_to(place)) for path in place.rglob("*") if path != inner]
    told = [stream.buffer.getvalue().decode(errors="replace") for stream in (out, err)]  # type: ignore[attr-defined]
    return Outcome(status, *told, [str(each.message) for each in warned], left, seen[-1] if seen else None)


def repeat(command: str, words: list[str]) -> str:
    """How to see it again."""
    return f"nmt-{command} {shlex.join(words)}"[:2000]


def broken_law(outcome: Outcome, command: str, words: list[str]) -> str | None:
    """Which law does this command break? None if it keeps them all."""
    several = "-m" in words or any("MULTIRUN" in word or word.startswith("experiment=") for word in words)
    lines = outcome.err.split("\n")[:-1]
    broken = {
        f"ends with {outcome.status!r}": outcome.status not in (0, 2),
        "a traceback": "Traceback" in outcome.err,
        f"warnings: {outcome.warned}": outcome.warned,
        "a line of more than 600 characters": any(len(line) > 600 for line in lines),
    }
    found = next((law for law, is_broken in broken.items() if is_broken), None)
    if found is None and not several:  # the jobs of a sweep fail one by one
        found = _refused_badly(outcome, command, words) if outcome.status else ignored(outcome.config, words)
    return found


def _refused_badly(outcome: Outcome, command: str, words: list[str]) -> str | None:
    lines = outcome.err.split("\n")[:-1]
    errors = [line for line in lines if line.startswith(f"nmt-{command}: error: ")]
    others = [line for line in lines if line not in errors and "overridden by" not in line and line[:6] != "size: "]
    if not errors or others:
        return f"tells {others} beside the errors {errors}"
    if outcome.left:
        return f"leaves {outcome.left}"
    named = any(_names(errors, word) for word in [*words, "run", "runs"])
    return None if named else "names none of the keys"


def _names(errors: list[str], word: str) -> bool:
    """Does an error tell of this word? By its key, or as it begins."""
    key = word.lstrip("+~-").partition("=")[0].partition("@")[0].strip().partition("\n")[0].rstrip(".:'[]0")
    parts = {key[:40], ascii(key[:20])[1:-1], ascii(word[:10])[1:-1], *(["config"] if word.startswith("--c") else [])}
    sections = {key.rpartition(".")[0][:40]} - {""}  # where the section is unknown, what is in it is not told
    places = {word.partition("=")[2]} - {""} if key.startswith("hydra") else set()  # a folder that cannot be made
    return any(part in line for line in errors for part in parts | sections | places)


def ignored(config: Mapping[str, Any] | None, words: list[str]) -> str | None:
    """Which plain assignment is not what the job's values hold?"""
    last = {}
    if config is None:  # it only told something, as --cfg does
        return None
    for override in OverridesParser.create().parse_overrides([word for word in words if not word.startswith("-")]):
        key = override.get_key_element().lstrip("+")
        group = (config_dir() / key).is_dir() and not isinstance(override.value(), dict)
        if not (
            override.is_delete()
            or override.is_sweep_override()
            or group
            or key.startswith(("hydra", "run", "size.thresholds"))
        ):
            last[key] = override
    for key, override in last.items():
        wanted, value = override.value(), config
        for part in key.split("."):
            value = value[part]
        if not holds(value, wanted):
            return f"{key} is {value!r}, not {wanted!r}"
    return None


def holds(value: Any, wanted: Any) -> bool:  # noqa: ANN401
    """Is this the value that was asked for, if need be as text, in a list, or looked up?"""
    if isinstance(wanted, Mapping):
        return all(holds(value[key], each) for key, each in wanted.items())
    if isinstance(wanted, str) and "${" in wanted:
        return True
    if isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(holds, value, wanted))
    if isinstance(value, list | tuple):
        return len(value) == 1 and holds(value[0], wanted)
    return bool(value == wanted or str(value) == str(wanted)) and (isinstance(value, bool) == isinstance(wanted, bool))
