"""The commands in a group of several processes, as users start them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import TINY
from forks import call, ended, forked_group

from nmt.model.checkpoints import read_checkpoint
from nmt.system.processes import agreed

BIN = Path(sys.executable).parent
SHORT = [*TINY, "training.max_steps=8", "data.train_size=100", "precision=fp32", "threads=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("commands") / "run"
    done = call("nmt-train", *SHORT, f"hydra.run.dir={directory}")
    assert done.returncode == 0, done.stderr
    return directory


def in_group(size: int, output: Path, *command: str | Path, stdin: bytes = b"") -> list[tuple[int, str]]:
    """Run a command in `size` processes. Returns status and output of each.

    All processes share a standard input, which only rank 0 may read.
    """
    given = output.with_suffix(".in")
    given.write_bytes(stdin)

    def work() -> int:
        os.dup2(os.open(given, os.O_RDONLY), 0)
        done = call(*command, stdin=stdin)
        print(done.stdout.decode() + done.stderr.decode(), end="")
        return done.returncode

    processes = forked_group(work, size, output)
    return [(ended(p), output.with_name(f"{output.name}.{rank}").read_text()) for rank, p in enumerate(processes)]


@pytest.mark.parametrize(
    "options",
    [
        "search.batch_tokens=40 alignments={folder}/links",
        pytest.param("search=sampling search.batch_tokens=40", marks=pytest.mark.slow),
        pytest.param("references={run}/data/test.target", marks=pytest.mark.slow),
    ],
)
def test_translations_and_scores_keep_their_order(options: str, run: Path, tmp_path: Path) -> None:
    lines = (run / "data" / "test.source").read_bytes()
    words = ["nmt-translate", f"run={run}", "buffer_lines=3", *options.format(run=run, folder=tmp_path).split()]
    alone = call(*words, stdin=lines)
    assert alone.returncode == 0
    assert alone.stdout.count(b"\n") == lines.count(b"\n")
    links = [path.read_bytes() for path in tmp_path.glob("links")]
    (first, printed), (second, nothing) = in_group(2, tmp_path / "out", *words, stdin=lines)
    assert (first, second) == (0, 0)
    assert printed.encode() == alone.stdout
    assert nothing == ""
    assert [path.read_bytes() for path in tmp_path.glob("links")] == links


@pytest.mark.slow
def test_a_command_starts_several_processes_itself(run: Path) -> None:
    lines = (run / "data" / "test.source").read_bytes()

    def translate(*options: str) -> subprocess.CompletedProcess[bytes]:
        command = [str(BIN / "nmt-translate"), "search.batch_tokens=40", *options]
        return subprocess.run(command, input=lines, capture_output=True, timeout=120, check=False)

    alone = call("nmt-translate", "search.batch_tokens=40", f"run={run}", stdin=lines)
    shared = translate(f"run={run}", "processes=2", "threads=1")
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout == alone.stdout
    command = f"{BIN / 'nmt-translate'} run={run} processes=2 threads=1 search.batch_tokens=40 buffer_lines=2 | head -1"
    bash = ["/bin/bash", "-c", f"set -o pipefail; {command}"]
    left = subprocess.run(bash, input=lines * 20, capture_output=True, timeout=120, check=False)
    assert (left.returncode, left.stderr.decode()) == (0, "")
    failed = translate("run=nowhere", "processes=2")
    assert failed.returncode == 2
    assert failed.stderr.decode() == "nmt-translate: error: run=nowhere: no such directory\n"


def test_an_ensemble_is_evaluated_in_one_folder(run: Path, tmp_path: Path) -> None:
    folders = f"output={tmp_path}/evaluations/${{now:%f}}"  # the processes would insert different times
    group = in_group(2, tmp_path / "out", "nmt-evaluate", f"run=[{run},{run}]", "split=validation", folders)
    assert group[0][0] == 0, group[0][1]
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert (folder / "results.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nmt-translate run={run} alignments={folder}/none/links", "none/links: cannot be written"),
        ("nmt-translate run={run} processes=2", "processes=: several processes were started already; leave it out"),
        ("nmt-train processes=2", "processes=: several processes were started already; leave it out"),
        ("nmt-train attention=bahdanaw", "nmt-train: error: attention=bahdanaw: "),
    ],
)
def test_an_error_is_printed_once(words: str, message: str, run: Path, tmp_path: Path) -> None:
    group = in_group(2, tmp_path / "out", *words.format(run=run, folder=tmp_path).split())
    assert [status for status, _ in group] == [2, 2]
    assert message in group[0][1]
    assert group[1][1] == ""


def test_the_first_value_is_agreed_on_and_outlives_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed("place", "here") == "here"
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert [agreed("place", "here"), agreed("place", "there"), agreed("other", "there")] == ["here", "here", "there"]


@pytest.mark.slow
def test_a_killed_process_is_replaced_and_the_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    steps = ["training.checkpoint_every=2", "training.max_steps=40", "training.max_epochs=20", "training.log_every=1"]
    start = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "--max-restarts=2", "--no-python"]
    command = [*start, str(BIN / "nmt-train"), *SHORT, *steps, f"data.cache_dir={tmp_path}"]
    whole = tmp_path / "whole"
    subprocess.run([*command, f"hydra.run.dir={whole}"], check=True, capture_output=True, timeout=200)
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    killed = False
    while process.poll() is None and not killed:
        time.sleep(0.02)
        for metrics in (tmp_path / "outputs").rglob("metrics.jsonl"):
            if metrics.read_text().count("\n") >= 7:
                workers = subprocess.run(
                    ["pgrep", "-P", str(process.pid)], check=False, capture_output=True, text=True
                ).stdout.split()
                os.kill(int(workers[-1]), signal.SIGKILL)
                killed = True
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed.decode()
    assert killed
    (run,) = (tmp_path / "outputs" / "train").glob("*/*")  # the restarted processes resume the same run
    last, expected = (read_checkpoint(each / "checkpoints" / "last.pt")["model"] for each in (run, whole))
    assert all(torch.equal(last[name], expected[name]) for name in expected)
    assert len(json.loads((run / "manifest.json").read_text())["starts"]) == 2
