"""Command lines drawn at random, and the laws that every one of them is held to."""

import contextlib
import io
import logging
import os
import random
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from nmt.cli import app, sweep
from nmt.config.compose import config_dir, flatten

COMMANDS = ("train", "evaluate", "translate", "compare")
NUMBERS = "0 1 -1 3 7.5 -0.0 1e5 1e-05 1e308 -1e308 5e-324 1e-400 1e400 nan inf -inf NaN 9223372036854775808 4294967296"
NUMBERS += f" 1180591620717411303424 {10**400} {'9' * 5000} 1_000 010 0x10 0o17 0b1 1e 1. .5 +3 --3 1:30 12,5"
WORDS = "yes no on off true False NULL null ~ None auto cpu best y gru dot x abc 2026-01-31 2026-13-45 a.b ../x /x . - ! é 日本"
ODD = [
    *("", "''", '""', "' '", "'a b'", '"a', "'", "a'b", "'a=b'", r"a\=b", "a=b", "==", "a b", " 3", "3 ", "a:b", "a@b"),
    *(
        "[]",
        "[1]",
        "[1,2]",
        "[[1,[2]],3]",
        "[0.9,0.98]",
        "[0.9,nan]",
        "[a",
        "]",
        "[a,b]",
        "[null]",
        "{}",
        "{a:1}",
        "{a",
    ),
    *(
        "{kind:none}",
        "{kind:{a:1}}",
        "{a:{b:{c:[1,{d:2}]}}}",
        "{kind:[1]}",
        "{1:2}",
        "{hidden:3,hiden:4}",
        "(1)",
        "f(x)",
    ),
    *("${x}", "${", "${}", "${seed}", "${oc.env:HOME}", "${oc.env:NMT_NOT_THERE}", "${now:%s}", "${.x}", "${..x}"),
    *(
        "${encoder}",
        "${nope:1}",
        "${oc.decode:'['}",
        "${run_dir:1}",
        "${hydra:runtime.cwd}",
        r"\${x}",
        "$x",
        "???",
        "%s",
    ),
    *(
        "1,2",
        "choice(1,2)",
        "range(1,3)",
        "range(3)",
        "range(1,10000000000)",
        "range(0,1,0)",
        "glob(*)",
        "interval(0,1)",
    ),
    *("sort(2,1)", "shuffle(1,2)", "tag(a,1,2)", "int(3)", "str(3)", "bool(yes)", "float(x)", "extend_list(1)", "a,b,"),
    *("x" * 5_000, "x" * 1_000_000, "[" * 1_000 + "]" * 1_000, "[" * 20 + "]" * 20, "1," * 3_000, "(" * 25, "${" * 200),
    *(
        "a\nb",
        "a\tb",
        "\x1b[31m",
        "\x07",
        "a\rb",
        "\udcff",
        "\u202e",
        "\u2028",
        "'\n'",
        "'\x00'",
        "🙂",
        "'🙂'",
        "'日本'",
    ),
    *(
        "!!python/object:os.system",
        "*a",
        "&a",
        "- a",
        "a: b",
        "# a",
        "|",
        ">",
        "@x",
        "`x`",
        "\\",
        "\\\\",
        "'\\'",
        "a#b",
    ),
]
VALUES = [*NUMBERS.split(), *WORDS.split(), *ODD]
HYDRA = [
    "hydra.run.dir=new",
    "hydra.run.dir=",
    "hydra.run.dir=../beside",
    "hydra.run.dir=a/b/c",
    "hydra.run.dir=/proc/x",
    "hydra.run.dir=.",
    "hydra.run.dir=${hydra.run.dir}",
    "hydra.sweep.dir=s",
    "hydra.sweep.subdir=x",
    "hydra.launcher.n_jobs=2",
    "hydra/launcher=parallel",
    "hydra/launcher=nope",
    "hydra/sweeper=optuna",
    "hydra.job.name=",
    "hydra.job.name=x",
    "hydra.job.num=3",
    "hydra.job.id=1",
    "hydra.mode=RUN",
    "hydra.job.chdir=maybe",
    "hydra.job.env_set={A:1}",
    "hydra.callbacks=null",
    "hydra.callbacks.sweep._target_=os.system",
    "hydra=x",
    "hydra.callbacks.sweep._target_=nope",
    "hydra.runtime.cwd=/",
    "hydra.overrides.task=[]",
    "hydra.nope=1",
    "hydra.verbose=maybe",
    "hydra.",
    "hydra.output_subdir=x",
    "hydra.searchpath=[file:///nope]",
    "hydra.searchpath=3",
    "hydra/help=nope",
    "hydra.help.template=x",
    "hydra.sweeper.params={seed:3}",
    "+hydra.x=1",
    "~hydra.run",
    "~hydra.run.dir",
    "hydra/job_logging=nope",
    "hydra.version_base=9",
]
FLAGS = [
    *("--cfg", "--cfg=job", "--cfg=jop", "--info=config", "--info=x", "--config-dir=nope", "--config-name=nope", "-p"),
    *("--config-name=", "--config-path=nope", "--config-dir=", "--nope", "-x", "--resolve", "-m=3", "--help=3", "--"),
    *("--package=nope", "--experimental-rerun=x", "-", "--run", "-c", "--cfg=all", "--multirun=x", "-i", "--info=all"),
]
BROKEN = [
    "",
    " ",
    "seed",
    "=3",
    "=",
    "==",
    "~",
    "+",
    "++",
    "+=1",
    "~~seed",
    "@",
    "@=1",
    "a@",
    ".=1",
    "a..b=1",
    ".a=1",
    "a.=1",
]


class Outcome(NamedTuple):
    """What a command left behind."""

    status: Any
    out: str
    err: str
    warned: list[str]
    left: list[str]  # files and folders that were not there before
    config: Mapping[str, Any] | None  # the job's values, where it came to its work


def _sensible_values() -> dict[str, list[str]]:
    """What the YAML files have for each name: mostly right, if not for every choice."""
    found: dict[str, list[str]] = {}
    for path in sorted(config_dir().rglob("*.yaml")):
        for key, value in flatten(yaml.safe_load(path.read_text(encoding="utf-8")) or {}):
            text = "null" if value is None else str(value).replace(" ", "")
            found.setdefault(key.rpartition(".")[2], []).append(text)
    return found


SENSIBLE = _sensible_values()


def drawn(rng: random.Random, run: str) -> tuple[str, list[str]]:
    """A command and its words; `run` is a run directory."""
    command = rng.choices(COMMANDS, (5, 2, 2, 2))[0]
    words = [_word(rng, command) for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]
    if rng.random() < 0.03:
        words.insert(0, "-m")
    needed = {"train": [], "evaluate": [f"run={run}"], "translate": [f"run={run}"], "compare": [f"runs={run}"]}[command]
    return command, [*(needed if rng.random() < 0.95 else []), *words]


def _word(rng: random.Random, command: str) -> str:
    kind = rng.random()
    if kind < 0.03:
        return rng.choice(BROKEN)
    if kind < 0.07:
        return rng.choice(FLAGS)
    if kind < 0.13:
        return rng.choice(HYDRA)
    key = rng.choice(app._known_keys(command))
    folder = config_dir() / key.replace(".", "/")
    if folder.is_dir() and rng.random() < 0.7:
        return f"{key}={rng.choice([path.stem for path in folder.glob('*.yaml')])}"
    name = key.rpartition(".")[2]
    if rng.random() < 0.5 and name in SENSIBLE:
        small = rng.choice(("1", "2", "7", "0.1"))
        return f"{rng.choice(('', '', '', '++'))}{key}={rng.choice([*SENSIBLE[name], small])}"
    return f"{_changed(rng, key)}{rng.choice(('=', '=', '=', '=', '=', '=', '=', '= ', ' =', ''))}{rng.choice(VALUES)}"


def _changed(rng: random.Random, key: str) -> str:
    """Mostly the key itself, else one that is nearly it."""
    changes: list[Callable[[], str]] = [
        lambda: f"+{key}",
        lambda: f"++{key}",
        lambda: f"~{key}",
        lambda: f"{key}@{rng.choice(('x', '_global_', '_here_', 'a.b', ''))}",
        lambda: f"{key}.x",
        lambda: f"{key}[0]",
        lambda: key.replace(".", "/"),
        key.upper,
        key.capitalize,
        lambda: key[:-1],
        lambda: f"{key} ",
        lambda: key + rng.choice("xé.-:'\n"),
        lambda: key.rpartition(".")[2],
    ]
    return key if rng.random() < 0.75 else rng.choice(changes)()


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
    sweep.NameJobs.directory, sweep.NameJobs.made = None, False
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
    lines = outcome.err.split("\n")[:-1]
    errors = [line for line in lines if line.startswith(f"nmt-{command}: error: ")]
    several = "-m" in words or any("MULTIRUN" in word or word.startswith("experiment=") for word in words)
    if outcome.status not in (0, 2):
        return f"ends with {outcome.status!r}"
    if "Traceback" in outcome.err:
        return "a traceback"
    if outcome.warned:
        return f"a warning: {outcome.warned[0]}"
    if any(len(line) > 600 for line in lines):
        return "a line of more than 600 characters"
    if outcome.status == 2 and not errors:
        return "no error is told"
    if outcome.status == 2 and not several:
        others = [line for line in lines if line not in errors and "which counts" not in line]
        if others:
            return f"a line that is no error: {others[0]}"
        if outcome.left:
            return f"leaves {outcome.left}"
        if not any(_names(errors, word) for word in words):
            return "names none of the keys"
    if outcome.status == 0 and outcome.config is not None and not several:
        return ignored(outcome.config, words)
    return None


def _names(errors: list[str], word: str) -> bool:
    key = word.lstrip("+~-").partition("=")[0].partition("@")[0].strip().partition("\n")[0].rstrip(".:'[]0")
    short = ascii(key[:20])[1:-1]
    return any(name in line for line in errors for name in (key[:40], short, ascii(word[:10])[1:-1]))


def ignored(config: Mapping[str, Any], words: list[str]) -> str | None:
    """Which plain assignment is not what the job's values hold?"""
    last = {}
    for override in OverridesParser.create().parse_overrides([word for word in words if not word.startswith("-")]):
        key = override.get_key_element().lstrip("+")
        group = (config_dir() / key).is_dir() and not isinstance(override.value(), dict)
        if not (override.is_delete() or override.is_sweep_override() or group or key.startswith(("hydra", "run"))):
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
