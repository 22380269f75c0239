"""Connections to nmt-serve: time limits, more of them than may be open, and headers that are too large."""

import os
import re
import resource
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from served import process, trained

WHOLE = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("connections") / "run", "training.max_steps=3")


def healthy(address: str) -> bool:
    """Whether a client with a connection of its own gets an answer."""
    with urllib.request.urlopen(f"{address}/healthz", timeout=20) as answer:
        return bool(answer.status == 200)


def opened(address: str, sent: bytes = b"") -> socket.socket:
    url = urlsplit(address)
    client = socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=20)
    client.sendall(sent)
    return client


def received(client: socket.socket) -> bytes:
    """What the service sends until it closes the connection."""
    with client:
        return b"".join(iter(lambda: client.recv(1000), b""))


def first_answer(client: socket.socket) -> bytes:
    """An answer that holds one object of JSON, on a connection that stays open."""
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(1000)
    return answer


def test_headers_have_a_time_limit(run: Path) -> None:
    """From the opening of a connection, or from the first byte of a further request."""
    with process(run.parent, f"run={run}", "limits.header_seconds=1") as started:
        silent, half, again, idle = (opened(started.address, sent) for sent in (b"", WHOLE[:-2], WHOLE, WHOLE))
        for client in (again, idle):
            assert first_answer(client).startswith(b"HTTP/1.1 200 ")
        again.sendall(WHOLE[:20])
        begun = time.monotonic()
        assert received(silent) == b""
        for client in (half, again):
            answer = received(client)
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert answer.endswith(b'{"error": "the headers did not arrive within 1 s"}')
        assert time.monotonic() - begun < 5
        idle.sendall(WHOLE)  # an idle connection stays open for longer
        assert first_answer(idle).startswith(b"HTTP/1.1 200 ")
        idle.close()
        assert healthy(started.address)


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Processes that are started here may open 60 files more than this one has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("limits", [["limits.connections=20"], []])
def test_connections_that_wait_make_room_for_others(run: Path, limits: list[str]) -> None:
    """The limit is the configuration's, or follows from the file descriptors."""
    with ExitStack() as stack:
        with nullcontext() if limits else few_descriptors():
            started = stack.enter_context(process(run.parent, f"run={run}", *limits))
        clients = [opened(started.address, b"GET / HT" * (number % 2)) for number in range(150)]
        time.sleep(1)
        for _ in range(3):
            assert healthy(started.address)
        with ThreadPoolExecutor(10) as pool:
            assert all(pool.map(healthy, [started.address] * 50))
        assert clients[0].recv(1000) == b""
        time.sleep(1.5)
        (line,) = started.logged()
        assert re.search(r"\d\d connections were closed or refused, as at most \d+ may be open at a time", line)


def test_a_connection_beyond_the_limit_is_refused_if_all_have_a_request(run: Path) -> None:
    with process(run.parent, f"run={run}", "limits.connections=2") as started:
        head = b"POST /v1/translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
        busy = [opened(started.address, head) for _ in range(2)]
        time.sleep(0.3)
        answer = received(opened(started.address))
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nretry-after: 1\r\n" in answer
        busy[0].close()
        time.sleep(0.3)
        assert healthy(started.address)


def test_headers_that_are_too_large_are_refused_in_words(run: Path) -> None:
    large = b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 200_000 + b"\r\n\r\n"
    with process(run.parent, f"run={run}") as started:
        answer = received(opened(started.address, large))
        assert started.logged() == []
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert answer.endswith(b'{"error": "the headers are too large"}')


def test_the_rest_of_a_refused_body_has_a_time_limit(run: Path) -> None:
    """A client without the token gets its answer before its body has arrived, and holds no place for long."""
    head = b"POST /v1/translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
    limits = ["token=secret", "limits.header_seconds=1", "limits.connections=2"]
    with process(run.parent, f"run={run}", *limits) as started:
        clients = [opened(started.address, head) for _ in range(2)]
        for client in clients:
            assert first_answer(client).startswith(b"HTTP/1.1 401 ")
        time.sleep(0.6)
        assert healthy(started.address)  # the first makes room
        clients[1].sendall(b"x")
        begun = time.monotonic()
        assert received(clients[1]) == b""
        assert time.monotonic() - begun < 5


def test_clients_that_do_not_read_are_closed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.serve.server.UNREAD", 0.5)
    pages = b"GET /static/app.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000
    with process(run.parent, f"run={run}", "limits.connections=1") as started, opened(started.address) as client:
        client.settimeout(1)
        with suppress(OSError):  # the service reads no further requests
            client.sendall(pages)
        deadline = time.monotonic() + 25
        while not (free := _is_free(started.address)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert free
        assert not [line for line in started.logged() if "connections were closed" not in line]


def _is_free(address: str) -> bool:
    with suppress(HTTPError):  # 503
        return healthy(address)
    return False


def test_clients_that_read_slowly_get_the_whole_answer(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.serve.server.UNREAD", 0.5)
    pages = 400
    with process(run.parent, f"run={run}") as started:
        with urllib.request.urlopen(f"{started.address}/static/app.js", timeout=20) as answer:
            size = len(answer.read())
        with opened(started.address) as client, ThreadPoolExecutor(1) as pool:
            sent = pool.submit(client.sendall, b"GET /static/app.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * pages)
            read = 0
            while read < pages * size:
                part = client.recv(200_000)
                assert part
                read += len(part)
                time.sleep(0.005)
            sent.result(20)
