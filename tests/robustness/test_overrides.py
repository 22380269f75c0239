"""Whatever the command line says, it is taken as it stands or refused in one line: no traceback, nothing ignored."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import quick_hydra
import torch
from command_laws import broken_law, call, repeat
from conftest import values_of
from drawn_overrides import drawn
from hydra._internal.hydra import Hydra

from nmt.cli import compare, evaluate, export, train, translate
from nmt.config import schema
from nmt.config.compose import merge_search, validated
from nmt.model.build import build_model
from nmt.system.run import RunDirectory
from nmt.system.saved_config import load_config, save_values
from nmt.training.trainer import Schedule
from nmt.translate.translator import Translator

MAINS = {"train": train, "evaluate": evaluate, "translate": translate, "compare": compare, "export": export}
TASKS = {train: "_train", evaluate: "_evaluate", translate: "_translate", compare: "_compare", export: "_export"}
Seen = list[Mapping[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory, as far as its configuration."""
    config = validated(schema.TrainConfig, values_of("train", [])).with_absolute_paths()
    (tmp_path / "run").mkdir()
    save_values(tmp_path / "run" / "config.yaml", config.model_dump(mode="json"))
    return tmp_path / "run"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """The values of each job. The commands go as far as is cheap: to the model, without its memory, and to the
    search, without a checkpoint."""
    found: Seen = []

    def remembering(task: Callable[..., Any]) -> Callable[..., Any]:
        def remember(config: Any, overrides: list[str], **given: Any) -> Any:  # noqa: ANN401
            found.append(config.model_dump(mode="json"))
            return task(config, overrides, **given)

        return remember

    for module, name in TASKS.items():
        monkeypatch.setattr(module, name, remembering(getattr(module, name)))

    def begin(config: schema.TrainConfig, *_: object) -> int:
        size = config.tokenizer.vocab_size if config.tokenizer.kind != "file" else 8
        with torch.device("meta"):
            build_model(config, size, size, (0, 0))
        Schedule(config.schedule, config.training.max_steps or 10**9)
        return 0

    def load(runs: list[str] | Path, **given: Any) -> None:  # noqa: ANN401
        first = runs if isinstance(runs, Path) else runs[0]
        config = load_config(RunDirectory.existing(first).config)
        merge_search(config.search, given.get("search") or {})
        sys.exit(0)

    monkeypatch.setattr(Hydra, "get_mode", quick_hydra.mode)
    monkeypatch.setattr("nmt.training.job.train", begin)
    monkeypatch.setattr(Translator, "load", load)
    monkeypatch.setattr(RunDirectory, "held_out", lambda *_: ([], [], None))
    monkeypatch.setattr("nmt.compare.report.write_comparison", lambda **_: "")
    monkeypatch.setattr("nmt.data.reading.corpus.splits", lambda _: {"train": range(5)})
    monkeypatch.setattr("nmt.data.prepare.prepare.fingerprint_of", lambda *_: "")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    before = Path.cwd()
    yield found
    os.chdir(before)


def campaign(seed: int, draws: int, run: Path, seen: Seen) -> dict[str, int]:
    """So many command lines; how many of them were taken and refused. Fails with those that break a law."""
    counts = {"overrides": 0, "taken": 0, "refused": 0}
    faults = []
    rng = random.Random(seed)
    for _ in range(draws):
        command, words = drawn(rng, str(run))
        outcome = call(MAINS[command].main, command, words, run.parent / "place", seen)
        if fault := broken_law(outcome, command, words):
            faults.append(f"{fault}\n    {repeat(command, words)}\n    {outcome.err[:700]}")
        counts["overrides"] += len(words)
        counts["refused" if outcome.status == 2 else "taken"] += 1
    assert not faults, f"seed {seed}: {len(faults)} of {draws}\n" + "\n".join(faults)
    return counts


def test_what_is_given_is_taken_or_refused(run: Path, seen: Seen) -> None:
    counts = campaign(0, 40, run, seen)
    assert counts["taken"] > 0
    assert counts["refused"] > 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 41))
def test_thousands_of_overrides(seed: int, run: Path, seen: Seen) -> None:
    campaign(seed, 125, run, seen)


STRANGE = [
    ("nmt-train", f"seed={'9' * 5_000}"),
    ("nmt-train", "encoder.hidden=1000000000"),
    ("nmt-train", "data.cache_dir='\x1b[31m'"),
    ("nmt-train", b"data.cache_dir=\xff"),
    ("nmt-train", f"data.cache_dir={'x' * 100_000}"),
    ("nmt-train", f"optimizer.betas={'[' * 10_000}"),
    ("nmt-train", "encoder=/etc/passwd"),
    ("nmt-train", "hydra.run.dir=/proc/nope"),
    ("nmt-train", "hydra.run.dir=new/newer", "seed=-1"),
    ("nmt-train", "-m", "seed=range(1,100000000)"),
    ("nmt-evaluate",),
    ("nmt-evaluate", "run='a\nb'"),
    ("nmt-translate", "run=nope", "hydra.run.dir=new"),
    ("nmt-compare", "-m", "runs=a,b"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", STRANGE, ids=range(len(STRANGE)))
def test_the_strangest_in_a_process_of_its_own(words: tuple[Any, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"from nmt.cli.{words[0][4:]} import main; main()", *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    told = done.stderr.decode()
    assert done.returncode == 2, told
    assert done.stdout == b""
    assert all(line.startswith(f"{words[0]}: error: ") and len(line) < 600 for line in told.splitlines()), told
    assert not list(tmp_path.iterdir())
