"""Small trained runs, and a service for them, inside the test's process or in a fork of it."""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conftest import TINY, values_of
from fastapi.testclient import TestClient
from forks import ended, forked
from quick_hydra import compose_once

from nmt.cli.commands import serve
from nmt.config.compose import validated
from nmt.config.schema import TrainConfig
from nmt.serve.app import application
from nmt.serve.guard import Rules
from nmt.serve.models import Runs, load_models
from nmt.serve.service import QueueSettings, Service
from nmt.training.job import train

RULES = Rules(hosts=None, token=None, body=100_000, body_seconds=5, seconds=60)


def trained(directory: Path, *overrides: str, size: int = 400) -> Path:
    """A run of a tiny model in this folder."""
    assert (
        train(validated(TrainConfig, values_of("train", [*TINY, f"data.train_size={size}", *overrides])), directory, [])
        == 0
    )
    return directory


@contextmanager
def serving(runs: Runs, rules: Rules = RULES, waiting: int = 200, beam_size: int = 8) -> Iterator[TestClient]:
    """A client of a service within this process."""
    loading = {"precision": "fp32", "device": "cpu", "threads": 1}
    service = Service(load_models(runs, loading, beam_size), QueueSettings(1, 1, waiting, 0.002), 20)
    try:
        with TestClient(application(service, rules), raise_server_exceptions=False) as client:
            yield client
    finally:
        service.batcher.close()


class Process:
    """nmt-serve in a fork of this process."""

    def __init__(self, output: Path, *overrides: str, environment: dict[str, str]) -> None:
        def work() -> int:
            compose_once()
            logging.getLogger().handlers.clear()  # pytest's, which keep warnings of libraries from standard error
            os.environ.update(environment)
            sys.argv = ["nmt-serve", "port=0", "device=cpu", "threads=1", *overrides]
            serve()
            return 0

        self.output, self._status = output, None
        self._number = forked(work, output)
        first = self._wait_for_line()
        assert " at http://" in first, first
        self.address = first.split(" at ")[1].split("/;")[0].split("/#")[0]

    def signal(self, number: int) -> None:
        os.kill(self._number, number)

    def ended(self) -> int:
        """Wait for its end. Returns its status, negative after a signal."""
        if self._status is None:
            self._status = ended(self._number)
        return self._status

    def is_running(self) -> bool:
        return self._status is None and os.waitpid(self._number, os.WNOHANG) == (0, 0)

    def logged(self) -> list[str]:
        """What it printed after the first line."""
        return self.output.read_text().split("\n")[1:-1]

    def _wait_for_line(self) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            text = self.output.read_text() if self.output.exists() else ""
            if "\n" in text:
                return text.split("\n")[0]
            time.sleep(0.02)
        raise AssertionError("nmt-serve does not start")


@contextmanager
def process(folder: Path, *overrides: str, environment: dict[str, str] | None = None) -> Iterator[Process]:
    """nmt-serve in a fork of this process, which is killed at the end of the block."""
    number = len(list(folder.glob("serve.*")))
    started = Process(folder / f"serve.{number}", *overrides, environment=environment or {})
    try:
        yield started
    finally:
        if started._status is None:
            started.signal(signal.SIGKILL)
            started.ended()


def words(texts: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    """The best translations of an answer."""
    return [nbest[0]["text"] for nbest in texts]
