"""The run directory: its paths, its lock, its saved configuration, and the manifest, which records each start.

A saved configuration is read as data, without importing or calling anything that it names.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from nmt import DISTRIBUTION
from nmt.config import schema
from nmt.config.checks import flatten, validated
from nmt.config.errors import UserError, for_shell, format_value, override_values, user_path
from nmt.config.schema.commands import CHANGEABLE_KEYS, LENGTH_KEYS, NO_EFFECT_KEYS
from nmt.system import files
from nmt.system.files import unpacked
from nmt.system.text_table import counted

RUN_SECTIONS = {"attention", "decoder", "encoder", "tokenizer", "training"}  # every run's configuration has them
SET_BY_PRESETS = {"encoder", "decoder"}  # groups whose choice a preset of attention may set
LOCK, SWEEP = ".lock", ".nmt-sweep"  # files that mark a run in progress and the directory of a sweep
ERROR = "error.txt"  # the reason why a job of a sweep failed, and its overrides
EVALUATION = "evaluation.json"  # describes an evaluation whose results are in a folder that is not a run
FINISHED, PRUNED = "finished", "pruned"  # values of "status" in the manifest, which has none until the run ends
DEMO = Path(__file__).with_name("demo.nmt")  # the archive that run=demo opens; scripts/make_demo_model.py made it
PACKAGES = {  # packages whose versions each start records: name -> name of the distribution
    "nmt": DISTRIBUTION,
    **{name: name for name in ("torch", "numpy", "sentencepiece", "sacrebleu", "datasets", "hydra-core")},
}


class RunDirectory:
    """Paths and files of one run. Training calls `claim` before it writes anything."""

    def __init__(self, path: Path | str, source: Path | None = None) -> None:
        """source: the archive that was unpacked to `path`, or None if `path` is a run directory."""
        self.path, self.source = Path(path), source or Path(path)
        self.is_archive = source is not None  # if True, nothing may be written to `path`
        self.config = self.path / "config.yaml"
        self.manifest = self.path / "manifest.json"
        self.log = self.path / "train.log"
        self.metrics = self.path / "metrics.jsonl"
        self.results = self.path / "results.json"
        self.tensorboard = self.path / "tensorboard"
        # Folders; the comments list their files.
        self.checkpoints = self.path / "checkpoints"  # last.pt, best.safetensors
        self.hypotheses = self.path / "hypotheses"  # <split>.txt
        self.data = self.path / "data"  # <split>.{source,target,alignments}
        self.alignments = self.path / "alignments"  # <split>.{translations,references}.pharaoh, <split>.words.jsonl
        self._lock: int | None = None

    @classmethod
    def existing(cls, path: str | Path, key: str = "run") -> "RunDirectory":
        """Open a run, or an archive of one, for reading; "demo" is the model that comes with the package. Raises
        UserError that names the configuration's `key` if there is no run at this path."""
        named = user_path(path)
        if str(path) == "demo" and not named.exists():
            named = DEMO
        run = cls(unpacked(named, f"{key}={path}"), named) if named.is_file() else cls(named)
        if not run.path.is_dir():
            raise UserError(f"{key}={path}: no such directory")
        if not run.config.is_file():
            raise UserError(f"{key}={path}: is not a run directory (it has no config.yaml)")
        return run

    def claim(self, values: Mapping[str, Any]) -> None:
        """Lock the directory for training with the configuration `values`, and remove partly written files.

        The directory may be new, or hold this run, or a run that failed before its first checkpoint. Otherwise, or if
        another process trains there, raises UserError and changes nothing.
        """
        self._check_only_run_files()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written to ({error.strerror})") from None
        if not files.try_lock(self._lock, self.path / LOCK):
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            self._lock = None
            raise UserError(f"{self.path}: process {owner or '?'} is training there; wait for it or stop it")
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        try:
            self._check_same_config(values)
        except UserError:
            self.release()
            raise
        files.remove_leftovers(self.path)

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise UserError if `claim` would refuse the directory because of its files. Changes nothing."""
        self._check_only_run_files()
        self._check_same_config(values)

    def release(self) -> None:
        """Unlock the directory. Removes the lock file if the run has not written its configuration."""
        if self._lock is None:
            return
        if not self.config.exists():
            (self.path / LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None

    def check_present(self) -> None:
        """Raise UserError if the claimed directory was deleted or renamed. Call it before a write, which would create a
        part of the directory again."""
        if self._lock is None:
            return
        held, there = os.fstat(self._lock), None
        with suppress(OSError):
            there = os.stat(self.path / LOCK)
        if there is None or (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            raise UserError(f"{self.path}: was deleted or renamed while the run trained there; the run ends")

    def wait_until_free(self, seconds: float) -> None:
        """Wait until no process trains in the directory, for at most `seconds`. A job that is told to stop
        saves a checkpoint before it ends."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and files.is_locked(self.path / LOCK):
            time.sleep(0.1)

    def begin(self, values: Mapping[str, Any], report: Mapping[str, Any], start: Mapping[str, Any]) -> None:
        """Write the configuration, and add `report` and `start` to the manifest.

        `report` describes the corpus, `start` how the run is started, for example overrides and machine. Raises
        UserError if the corpus or a tokenizer has changed since the first start.
        """
        manifest = self.read_manifest()
        if not self._has_results():
            # Keep from the record of a failed start the overrides and choices: they name the system in comparisons.
            first, manifest = self.first_start(), {}
            if self.config.exists() and not _differences(load_values(self.config), values, CHANGEABLE_KEYS):
                start = {**start, **{key: first[key] for key in ("overrides", "choices") if key in first}}
            self.manifest.unlink(missing_ok=True)
            shutil.rmtree(self.data, ignore_errors=True)  # held-out text of a failed start
        if manifest.get("data", report).get("content") != report["content"]:
            raise UserError(
                f"{self.path}: the corpus (data.*) or its tokenizer (tokenizer.*) has changed since this run began; "
                "restore the files, or start a new run"
            )
        limit, made = values["training"]["max_steps"], manifest.get("training", {}).get("steps", 0)
        if limit is not None and limit < made:
            raise UserError(f"training.max_steps={limit}: the run has already made {made} updates")
        if "status" in manifest:  # the run had ended and now trains further
            manifest = self.update_json(self.manifest, {"status": None})
        save_values(self.config, values)  # before all other files, so that the run can be resumed after a kill
        starts = [*manifest.get("starts", []), {**_software(), **start}]
        self.update_json(self.manifest, {"seed": values["seed"], "data": report, "starts": starts})

    def first_start(self) -> dict[str, Any]:
        """Return the record of the first start: command-line overrides, group choices, environment; {} if unknown."""
        starts = self.read_manifest().get("starts")
        if starts:
            return dict(starts[0])
        # A sweep's job that failed before `begin` has its overrides in ERROR, if that file was completely written.
        with suppress(OSError, ValueError, IndexError):
            return {"overrides": shlex.split(files.read_lines(self.path / ERROR)[1])}
        return {}

    def last_machine(self) -> dict[str, Any]:
        """Return the hardware of the last start (see `Machine.describe`) as the manifest records it; {} if unknown."""
        machine: dict[str, Any] = (self.read_manifest().get("starts") or [{}])[-1].get("machine", {})
        return machine

    def overrides(self) -> dict[str, Any]:
        """Return the command-line overrides of the first start, by key."""
        return override_values(self.first_start().get("overrides", []))

    def recorded_choices(self) -> dict[str, Any]:
        """Return as key -> value the first start's group choices and overrides that affect results, except the seed. A
        length of training, such as training.max_steps, is that of the last start that sets it."""
        later = (self.read_manifest().get("starts") or [])[1:]
        lengths = [override_values(start.get("overrides", [])) for start in later]
        return start_choices(self.first_start()) | {
            key: value for values in lengths for key, value in values.items() if key in LENGTH_KEYS
        }

    def system_digest(self) -> str:
        """Compute a digest that is equal for all runs of one system, whatever their seeds. The seeds of a run's
        teachers and of the run that it starts from do not change the digest either."""
        ignored = CHANGEABLE_KEYS - LENGTH_KEYS | {"seed"}
        saved = dict(flatten(load_values(self.config)))
        values = {key: value for key, value in saved.items() if key not in ignored}
        values["corpus"] = self.read_manifest().get("data", {}).get("content")
        start = self.first_start()
        values["training.start_from"] = start.get("start_from", {}).get("system")
        if teachers := start.get("teachers"):
            values["objective.teachers"] = [teacher.get("system") for teacher in teachers]
        return digest(values)

    def read_manifest(self) -> dict[str, Any]:
        """Read the manifest, or {} if the run has none yet. Raises UserError if the file is damaged."""
        return read_json(self.manifest)

    def status(self) -> str | None:
        """Return FINISHED, PRUNED, or None for a run that has not ended. Raises UserError for a damaged manifest."""
        return self.read_manifest().get("status") if self.config.exists() else None

    def has_finished(self, values: Mapping[str, Any], fingerprint: str) -> bool:
        """Has a run with this configuration and corpus fingerprint ended here, so that it need not run again? A
        finished run that has lost its scores has not. Raises UserError if the file of the scores is damaged."""
        if not self.status() or self.read_manifest().get("data", {}).get("fingerprint") != fingerprint:
            return False
        if self.status() == FINISHED and not read_json(self.results):
            return False
        return not _differences(load_values(self.config), values, NO_EFFECT_KEYS)

    def held_out(self, split: str) -> tuple[list[str], list[str], list[str] | None]:
        """Read sources, references and gold alignments of a split; the alignments are None if the corpus has none.
        Raises UserError if the run has no such split, or if its files are damaged."""
        source, target, gold = (self.data / f"{split}.{name}" for name in ("source", "target", "alignments"))
        if not (source.is_file() and target.is_file()):
            if self.is_archive:
                raise UserError(f"split={split}: {self.source} has no such text; export the run with held_out=true")
            splits = sorted({path.stem for path in self.data.glob("*.target")})
            raise UserError(
                f"split={split}: the corpus of {self.source} has none (there is: {', '.join(splits) or 'nothing'})"
            )
        texts = {path: text_lines(path) for path in (source, target, gold) if path is not gold or gold.is_file()}
        for path, lines in texts.items():
            if len(lines) != len(texts[source]):
                sizes = f"{counted(len(lines), 'line')} for {counted(len(texts[source]), 'sentence')}"
                raise UserError(f"{path}: has {sizes}")
        return texts[source], texts[target], texts.get(gold)

    def write_held_out(self, split: str, sources: list[str], references: list[str], gold: Iterable[str] | None) -> None:
        """Write the text of a split for `held_out` to read."""
        for name, lines in (("source", sources), ("target", references), ("alignments", gold)):
            if lines is not None:
                files.write_lines(self.data / f"{split}.{name}", lines)

    def owns(self, path: Path) -> bool:
        """Return whether this path lies among the files that training and evaluation write."""
        files = (self.config, self.manifest, self.log, self.metrics, self.results)
        folders = (self.tensorboard, self.checkpoints, self.hypotheses, self.data, self.alignments)
        target, own = path.resolve(), self.path.resolve()
        if any(own / folder.name in target.parents for folder in folders):
            return True
        return target.parent == own and (target.name in {file.name for file in files} or target.suffix == ".model")

    def update_json(self, path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
        """Merge values into a JSON file, atomically. Returns the file's new content."""
        merged = {**read_json(path), **values}
        files.write_atomically(path, f"{files.to_json(merged, indent=2)}\n".encode())
        return merged

    def _has_results(self) -> bool:
        return self.results.exists() or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def _check_only_run_files(self) -> None:
        """Raise UserError if the directory holds the files of something other than a run."""
        if not self.path.is_dir():
            return
        if self.config.exists():
            if not load_values(self.config).keys() >= RUN_SECTIONS:
                problem = f"is not a run (its {self.config.name} is another program's)"
                raise UserError(f"{self.path}: {problem}; choose another hydra.run.dir")
            return
        leftovers = (LOCK, ERROR, f".{self.config.name}.*.part")
        others = sorted(path.name for path in self.path.iterdir() if not any(map(path.match, leftovers)))
        if others:
            raise UserError(
                f"{self.path}: is not empty and not a run (it holds {others[0]}); choose another hydra.run.dir"
            )

    def _check_same_config(self, values: Mapping[str, Any]) -> None:
        """Raise UserError if the directory holds results of a run with another configuration."""
        if not (self.config.exists() and self._has_results()):
            return
        if differences := _differences(load_values(self.config), values, CHANGEABLE_KEYS):
            key, (saved, new) = next(iter(differences.items()))
            more = f" and {len(differences) - 1} more differ" if len(differences) > 1 else ""
            raise UserError(
                f"{self.path}: holds a run of another configuration ({key} is {saved} there, {new} here{more}); "
                f"choose another hydra.run.dir (for a sweep, hydra.sweep.dir), or resume the run with "
                f"{for_shell('run', self.path)}"
            )


def _differences(saved: Mapping[str, Any], new: Mapping[str, Any], ignored: set[str]) -> dict[str, tuple[Any, Any]]:
    """Return key -> (saved value, new value) for the keys that differ, except the ignored ones."""
    before, after = dict(flatten(saved)), dict(flatten(new))
    values = {key: (before.get(key), after.get(key)) for key in sorted({*before, *after} - ignored)}
    return {key: (old, new) for key, (old, new) in values.items() if old != new}


def runs_below(folder: Path) -> list[Path]:
    """Find the run directories at any depth in a folder, such as that of a sweep, sorted by path."""
    return files.folders_with(folder, "config.yaml")


def text_lines(path: Path) -> list[str]:
    """Read the lines of a file of a run. Raises UserError if it is not valid UTF-8."""
    try:
        return files.read_lines(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid UTF-8 (at byte {error.start})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return {} if there is no such file. Raises UserError if the file cannot be read or holds
    anything else."""
    remedy = "restore it" + ", or delete it and measure again" * (path.name == "results.json")
    try:
        values = json.loads(files.read_bytes(path))
        json.dumps(values, ensure_ascii=False).encode()  # an escaped lone surrogate could not be written again
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); if it is damaged, {remedy}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a JSON object; {remedy}")
    return values


def digest(values: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of the values, which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


# Saved configurations


def load_values(path: Path) -> dict[str, Any]:
    """Read a saved configuration without importing or calling anything that it names. Raises UserError."""
    line = ""
    try:
        values = yaml.safe_load(files.read_bytes(path).decode("utf-8"))
    except Exception as error:  # PyYAML raises anything, for example KeyError for !!bool x
        if isinstance(error, OSError):
            reason = error.strerror
        elif isinstance(error, yaml.MarkedYAMLError):
            reason = error.problem
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        else:
            reason = format_value(str(error).partition("\n")[0]) or type(error).__name__
        raise UserError(f"{path}{line}: cannot be read as a configuration ({reason})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a configuration (expected keys with values)")
    return values


def load_config(path: Path) -> schema.TrainConfig:
    """Read and check a run's saved configuration. Raises UserError."""
    return validated(schema.TrainConfig, load_values(path), source=path)


def save_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write values as YAML, keeping their order."""
    files.write_atomically(path, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).encode("utf-8"))


# What the manifest records of a start


def _software() -> dict[str, Any]:
    """Return the time, and the versions of Python, platform, packages and code."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package, distribution in PACKAGES.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(distribution)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "git": _git_commit(),
    }


def start_choices(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return as key -> value a start's group choices and overrides that affect results, except the seed.

    Choices that another choice implies are left out, such as attention/score by attention=bahdanau, and encoder=lstm
    by attention=gnmt.
    """
    groups = start.get("choices", {})
    chosen = {group: groups[group] for group in groups if "/" not in group and group not in SET_BY_PRESETS}
    choices = chosen | override_values(start.get("overrides", []))
    return {key: value for key, value in choices.items() if key not in NO_EFFECT_KEYS and key != "seed"}


def _git_commit() -> str | None:
    """Return the commit of the code's checkout, with "+" if it has changes; None for an installed package."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
