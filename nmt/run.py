"""The run directory: its paths, its lock and the record of what it ran with."""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nmt.config import schema
from nmt.config.compose import PLACES, flatten, load_values, save_values
from nmt.config.errors import UserError
from nmt.config.overrides import for_shell, given_values
from nmt.config.paths import user_path
from nmt.data.prepared import Prepared
from nmt.files import read_bytes, read_lines, refuse_strays, remove_leftovers, to_json, write_atomically, write_lines

# May differ when a run is resumed, and changes only rounding in what comes of it: what it computes with, what it tells.
UNSEEN = {"run", "device", "threads", "data.cache_dir", "training.log_every", "training.checkpoint_every"}
# A cosine schedule ends where the run does, so that a later end bends the rest of the curve.
WHERE_IT_STOPS = {"training.max_epochs", "training.max_steps", "validation.patience"}
# May differ as well: where it finds its data, what it shows, where it stops.
FREE = UNSEEN | PLACES | WHERE_IT_STOPS | {"validation.samples", "validation.saliency"}
LOCK = ".lock"
ERROR = "error.txt"  # why a job of a sweep failed
EVALUATION = "evaluation.json"  # of what is evaluated in a folder that is not a run
FINISHED, PRUNED = "finished", "pruned"  # the manifest's "status"; none: not at its end yet


class RunDirectory:
    """Paths of one run, from whomever: nothing in it leads out of it. What trains goes through `claim`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.manifest = self.path / "manifest.json"
        self.log = self.path / "train.log"
        self.metrics = self.path / "metrics.jsonl"
        self.results = self.path / "results.json"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.hypotheses = self.path / "hypotheses"
        self.data = self.path / "data"
        self.alignments = self.path / "alignments"
        self._lock: int | None = None

    @classmethod
    def existing(cls, path: str | Path, key: str = "run") -> "RunDirectory":
        """Raises UserError, naming the configuration's `key`, if there is no run."""
        run = cls(user_path(path))
        if not run.path.is_dir():
            raise UserError(f"{key}={path}: no such directory")
        if not run.config.is_file():
            raise UserError(f"{key}={path}: is not a run directory (it has no config.yaml)")
        run.refuse_strays()
        return run

    def refuse_strays(self) -> None:
        """Raises UserError if a link leads out of the directory, or if it holds a pipe or a device."""
        try:
            refuse_strays(self.path)
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}; a run is read and written within itself") from None

    def claim(self, values: Mapping[str, Any]) -> None:
        """Take the directory for the run with these values: a new one, or this very run to be resumed.

        Changes nothing yet. What failed before its first checkpoint is not in the way. Raises UserError if another
        process trains there, or if the directory holds anything else, of which nothing is touched.
        """
        self._refuse_foreign()
        self.refuse_strays()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written to ({error.strerror})") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system when its owner ends
        except OSError:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            self._lock = None
            raise UserError(f"{self.path}: process {owner or '?'} is training there; wait for it or stop it") from None
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        if self.config.exists() and self._came_to_something():
            try:
                self._same(load_values(self.config), values)
            except UserError:
                self.release()
                raise
        remove_leftovers(self.path)

    def wait_until_free(self, seconds: float) -> None:
        """Wait for a process that still trains there, such as a job of a sweep that was killed just now."""
        self.refuse_strays()
        until = time.monotonic() + seconds
        while time.monotonic() < until:  # after that claiming it tells who is there
            try:
                with (self.path / LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)
            else:
                return

    def begin(self, values: Mapping[str, Any], prepared: Prepared, start: Mapping[str, Any]) -> None:
        """Write down what the claimed run runs with; every start adds a line.

        Raises UserError if the corpus or the tokenizers are not those that the run began with.
        """
        if not self._came_to_something():
            self.manifest.unlink(missing_ok=True)  # of a start with other values perhaps, that failed
        manifest = self.read_manifest()
        if manifest.get("data", prepared.report).get("content") != prepared.report["content"]:
            raise UserError(
                f"{self.path}: the corpus or its tokenizer has changed since this run began; start a new run"
            )
        if "status" in manifest:  # the end it had come to is not that of what begins now
            manifest = self.update_json(self.manifest, {"status": None})
        save_values(self.config, values)  # first: from now on this is a run, which a kill leaves resumable
        prepared.tokenizers.save(self.path)
        self._keep_held_out(prepared)
        self.update_json(
            self.manifest,
            {
                "seed": values["seed"],
                "data": prepared.report,
                "starts": [*manifest.get("starts", []), {**surroundings(), **start}],
            },
        )

    def given(self) -> dict[str, Any]:
        """The overrides that the run was started with, by key."""
        return given_values(self.first_start().get("overrides", []))

    def recorded_choices(self) -> dict[str, Any]:
        """What the run was started with: the choice from each group, and single values, by key.

        Without what comes along with a choice, as attention/score does with attention=bahdanau.
        """
        choices = {group: it for group, it in self.first_start().get("choices", {}).items() if "/" not in group}
        given = {**choices, **self.given()}
        return {key: value for key, value in given.items() if key not in UNSEEN and key != "seed"}

    def system(self) -> str:
        """Equal for runs that differ in their seed alone, and in that of runs that they began with or learn from."""
        free = FREE - WHERE_IT_STOPS | {"seed"}
        same = {key: value for key, value in flatten(load_values(self.config)) if key not in free}
        same["corpus"] = self.read_manifest().get("data", {}).get("content")
        start = self.first_start()
        same["training.start_from"] = start.get("start_from", {}).get("system", same.get("training.start_from"))
        if teachers := start.get("teachers"):
            same["objective.teachers"] = [teacher.get("system", teacher.get("run")) for teacher in teachers]
        return digest(same)

    def first_start(self) -> dict[str, Any]:
        """What the run was started with: overrides, choices, and what else is known of how it began."""
        starts = self.read_manifest().get("starts")
        if starts:
            return dict(starts[0])
        with suppress(OSError, ValueError, IndexError):  # no such file, or one that a kill cut short
            return {"overrides": shlex.split(read_lines(self.path / ERROR)[1])}  # it failed before it began
        return {}

    def read_manifest(self) -> dict[str, Any]:
        """What is known of the run, {} of a new one. Raises UserError if the file is broken."""
        manifest = read_json(self.manifest)
        try:
            schema.Manifest.model_validate(manifest)
        except ValueError:
            raise UserError(f"{self.path}: a file of this run is damaged (manifest.json)") from None
        return manifest

    def _refuse_foreign(self) -> None:
        """Raises UserError if the directory holds anything but a run or a kill's leftover of a run's first file."""
        if self.config.exists() or not self.path.is_dir():
            return
        ours = (LOCK, ERROR, f".{self.config.name}.*.part")
        others = sorted(path.name for path in self.path.iterdir() if not any(path.match(name) for name in ours))
        if others:
            raise UserError(
                f"{self.path}: is not empty and not a run (it holds {others[0]}); choose another hydra.run.dir"
            )

    def status(self) -> str | None:
        """FINISHED, PRUNED, or None: not at its end yet, or not a run. Raises UserError if the file is broken."""
        return self.read_manifest().get("status") if self.config.exists() else None

    def has_finished(self, values: Mapping[str, Any], fingerprint: str) -> bool:
        """Is here the end of a run with these values on the corpus with this fingerprint, so that running it again
        would change nothing?"""
        if not self.status() or self.read_manifest().get("data", {}).get("fingerprint") != fingerprint:
            return False
        return not _changed(load_values(self.config), values, UNSEEN)

    def _same(self, saved: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        before, now = dict(flatten(saved)), dict(flatten(values))
        changed = _changed(saved, values, FREE)
        if changed:
            key = changed[0]
            more = f" and {len(changed) - 1} more differ" if len(changed) > 1 else ""
            raise UserError(
                f"{self.path}: holds a run of another configuration ({key} is {before.get(key)} there, "
                f"{now.get(key)} here{more}); choose another hydra.run.dir, or resume it with "
                f"{for_shell('run', self.path)}"
            )

    def _came_to_something(self) -> bool:
        return self.results.exists() or any(self.checkpoints.glob("*.pt"))

    def release(self) -> None:
        """Give the directory free (ending the process does so too), and take the lock out of one that is not a run."""
        if self._lock is None:
            return
        if not self.config.exists():
            (self.path / LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None

    def update_json(self, path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
        """Merge values into a JSON file, atomically. Returns all that it then holds."""
        merged = {**read_json(path), **values}
        write_atomically(path, f"{to_json(merged, indent=2)}\n".encode())
        return merged

    def _keep_held_out(self, prepared: Prepared) -> None:
        """Copy what is translated and scored into the run, so that it needs nothing else."""
        for split in prepared:
            if split.name == "train":
                continue
            self.write_held_out(split.name, split.source.lines(), split.target.lines(), split.alignments)

    def held_out(self, split: str) -> tuple[list[str], list[str], list[str] | None]:
        """Sources, references and gold alignments (or None) of a split. Raises UserError if the run has none."""
        source = self.data / f"{split}.source"
        if not source.is_file():
            known = sorted({path.stem for path in self.data.glob("*.source")})
            raise UserError(f"split={split}: the run's corpus has none (there is: {', '.join(known) or 'nothing'})")
        gold = self.data / f"{split}.alignments"
        return (
            read_lines(source),
            read_lines(self.data / f"{split}.target"),
            read_lines(gold) if gold.is_file() else None,
        )

    def write_held_out(self, split: str, sources: list[str], references: list[str], gold: Sequence[str] | None) -> None:
        """data/<split>.source, .target, and .alignments where there is gold."""
        for name, lines in (("source", sources), ("target", references), ("alignments", gold)):
            if lines is not None:
                write_lines(self.data / f"{split}.{name}", lines)

    def write_hypotheses(self, split: str, lines: list[str]) -> None:
        """hypotheses/<split>.txt."""
        write_lines(self.hypotheses / f"{split}.txt", lines)

    def write_alignments(self, name: str, lines: list[str]) -> None:
        """alignments/<name>.pharaoh."""
        write_lines(self.alignments / f"{name}.pharaoh", lines)

    def write_word_weights(self, name: str, weights: list[dict[str, Any] | None]) -> None:
        """alignments/<name>.words.jsonl: the attention between the words of each translation and its source."""
        write_lines(self.alignments / f"{name}.words.jsonl", [to_json(each or {}) for each in weights])


def _changed(saved: Mapping[str, Any], values: Mapping[str, Any], free: set[str]) -> list[str]:
    before, now = dict(flatten(saved)), dict(flatten(values))
    return [key for key in sorted(before.keys() | now.keys()) if key not in free and before.get(key) != now.get(key)]


def runs_below(folder: Path) -> list[Path]:
    """The run directories in a folder such as a sweep's, sorted by name."""
    return sorted(path.parent for path in folder.rglob("config.yaml"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} if there is no such file. Raises UserError if it is broken."""
    try:
        values = json.loads(read_bytes(path))
        json.dumps(values, ensure_ascii=False).encode()  # an escape can name a lone surrogate, which no file can hold
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a JSON object")
    return values


def digest(values: Mapping[str, Any]) -> str:
    """A name for values, the same for the same ones."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


PACKAGES = ("nmt", "torch", "numpy", "sentencepiece", "sacrebleu", "datasets", "hydra-core")


def surroundings() -> dict[str, Any]:
    """For the record of a run."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git": _git_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the checkout that the code runs from, "+" if it has changes; None for an installed package."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
