"""The service with small models, within the test's process or in a fork of it."""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import tiny_config
from fastapi.testclient import TestClient
from forks import ended, forked

from nmt.cli.entry import serve
from nmt.serve.models import Runs, load_models
from nmt.serve.server import Rules, application
from nmt.serve.service import QueueSettings, Service
from nmt.training.job import train

RULES = Rules(hosts=None, token=None, body_bytes=100_000, seconds=60)
LOADING: dict[str, Any] = {"precision": "fp32", "device": "cpu", "threads": 1}


def trained(directory: Path, *overrides: str) -> Path:
    """Train a tiny model for three updates, and return its run."""
    assert train(tiny_config("data.test_size=2", "training.max_steps=3", *overrides), directory) == 0
    return directory


@contextmanager
def service(
    runs: Runs, *, waiting: int = 200, wait: float = 0.002, beam_size: int = 8, batch_tokens: int = 4000
) -> Iterator[Service]:
    models = load_models(runs, {**LOADING, "search": {"batch_tokens": batch_tokens}}, beam_size)
    started = Service(models, QueueSettings(1, 1, waiting, wait), 20)
    try:
        yield started
    finally:
        started.batcher.close()


@contextmanager
def serving(runs: Runs, rules: Rules = RULES, **settings: int) -> Iterator[TestClient]:
    """Serve runs within this process, and yield a client."""
    with (
        service(runs, **settings) as started,  # type: ignore[arg-type]
        TestClient(application(started, rules), raise_server_exceptions=False) as client,
    ):
        yield client


class Process:
    """The command nmt-serve in a fork of this process, by default with run=demo."""

    def __init__(self, output: Path, *overrides: str, environment: dict[str, str]) -> None:
        def work() -> int:
            logging.getLogger().handlers.clear()  # pytest's handlers hide warnings from standard error
            os.environ.update(environment)
            run = [] if any(word.startswith("run=") for word in overrides) else ["run=demo"]
            sys.argv = ["nmt-serve", *run, "port=0", "device=cpu", "precision=fp32", "threads=1", *overrides]
            serve()
            return 0

        self.output, self.status = output, None
        self._number = forked(work, output)
        deadline = time.monotonic() + 120
        while not (output.exists() and "\n" in output.read_text()):
            assert time.monotonic() < deadline, "nmt-serve does not start"
            time.sleep(0.02)
        first = output.read_text().split("\n")[0]
        assert " at http://" in first, first
        self.address = first.split(" at ")[1].split("/;")[0].split("/#")[0]

    def signal(self, number: int) -> None:
        os.kill(self._number, number)

    def ended(self) -> int:
        """Wait until the process ends. Returns its status, negative after a signal."""
        if self.status is None:
            self.status = ended(self._number)
        return self.status


@contextmanager
def process(folder: Path, *overrides: str, environment: dict[str, str] | None = None) -> Iterator[Process]:
    """Run nmt-serve in a fork of this process, and kill the fork at the end of the block."""
    number = len(list(folder.glob("serve.*")))
    started = Process(folder / f"serve.{number}", *overrides, environment=environment or {})
    try:
        yield started
    finally:
        if started.status is None:
            started.signal(signal.SIGKILL)
            started.ended()


def words(texts: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    """Return the best translation of each text in an answer."""
    return [nbest[0]["text"] for nbest in texts]
