"""The process of nmt-serve: start, clients that misbehave or leave, and stop."""

import http.client
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import pytest
from forks import call, ended, error_of, forked
from served import process, words
from starlette.types import Receive, Scope, Send

from nmt.serve.server import Connection, listen, run
from nmt.serve.server import address as address_of

LINES = ["the cat sleeps .", "a small dog sees the red house .", "the house"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    limits = ["limits.body_bytes=20000", "limits.queued_sentences=400", "limits.connections=40"]
    with process(tmp_path_factory.mktemp("server"), "hosts=[Translate.Example]", *limits) as started:
        yield started.address


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to this"
        time.sleep(0.01)


def post(address: str, token: str | None = None, **request: Any) -> dict[str, Any]:  # noqa: ANN401
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    sent = urllib.request.Request(f"{address}/v1/translate", json.dumps(request).encode(), headers)
    with urllib.request.urlopen(sent, timeout=60) as answer:
        body: dict[str, Any] = json.load(answer)
    return body


def connection(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)


def opened(address: str, sent: bytes) -> socket.socket:
    url = urlsplit(address)
    client = socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=20)
    client.sendall(sent)
    return client


def test_many_clients_get_what_the_command_prints(address: str) -> None:
    """Sixteen clients at once send single sentences; the answers equal the lines of nmt-translate."""
    sources = LINES * 8
    words_ = ["run=demo", "precision=fp32", "device=cpu"]
    printed = call("nmt-translate", *words_, stdin="\n".join(sources).encode()).stdout.decode()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda text: words(post(address, text=text)["translations"])[0], sources))
    assert answers == printed.split("\n")[:-1]


def test_names_of_this_machine(address: str) -> None:
    """Accepts this machine's own names and those of the configuration as Host, and no others."""
    client = connection(address)
    for name, status in (("localhost", 200), ("translate.example:443", 200), ("other.example", 400)):
        client.request("GET", "/healthz", headers={"host": name})
        answer = client.getresponse()
        assert (answer.read() != b"", answer.status) == (True, status)


def waiting(address: str) -> int:
    with urllib.request.urlopen(f"{address}/healthz", timeout=20) as answer:
        return int(json.load(answer)["waiting"])


def test_clients_that_leave_free_their_places(address: str) -> None:
    body = json.dumps({"text": [f"{LINES[1]} {number}" for number in range(200)], "alignment": True}).encode()
    head = f"POST /v1/translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    sent = head.encode() + b"content-type: application/json\r\n\r\n" + body
    clients = [opened(address, sent) for _ in range(2)]
    wait_until(lambda: waiting(address) >= 50)
    for client in clients:
        client.close()
    wait_until(lambda: waiting(address) == 0, seconds=2)


def test_a_signal_finishes_what_is_in_flight_and_requests_are_logged_without_texts(tmp_path: Path) -> None:
    options = ["log_requests=true", "limits.request_seconds=30", "token='a+b/c=&%'"]
    with process(tmp_path, *options) as started, ThreadPoolExecutor(1) as pool:
        assert f"{started.address}/#token=a%2Bb%2Fc%3D%26%25;" in started.output.read_text()
        texts = [f"the secret {number}" for number in range(100)]
        answer = pool.submit(post, started.address, "a+b/c=&%", text=texts)
        wait_until(lambda: bool(waiting(started.address)) or answer.done())
        started.signal(signal.SIGTERM)
        assert len(answer.result(60)["translations"]) == 100
        assert started.ended() == 128 + signal.SIGTERM  # not by the signal itself: what was unpacked is deleted
        (line,) = [line for line in started.output.read_text().split("\n")[1:-1] if "/healthz" not in line]
        assert "POST /v1/translate 200 " in line
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"{started.address}/healthz", timeout=5)


def test_what_stays_away_is_given_up(tmp_path: Path) -> None:
    with process(tmp_path, "limits.request_seconds=1", environment={"NMT_SERVE_TOKEN": " secret \n"}) as started:
        head = b"POST /v1/translate HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret\r\n"
        with opened(started.address, head + b'content-length: 100\r\n\r\n{"text"') as client:
            assert b" 504 " in client.recv(1000)
        with opened(started.address, b"") as silent, opened(started.address, head) as without_end:
            assert silent.recv(1000) == without_end.recv(1000) == b""
        with pytest.raises(OSError, match="401"):
            post(started.address, text="a")
        assert post(started.address, "secret", text="a")
        assert "#token" not in started.output.read_text()  # the output may be shown to others


async def large(_: Scope, receive: Receive, send: Send) -> None:
    """Answer with more than the kernel's buffers hold."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(20_000_000)})


def test_clients_that_never_read_their_answers_are_cut(tmp_path: Path) -> None:
    listening = listen("127.0.0.1", 0)

    def work() -> int:
        run(large, listening, connections=8, seconds=1)
        return 0

    def status() -> int:
        client = connection(address_of(listening))
        client.request("GET", "/")
        return client.getresponse().status

    number = forked(work, tmp_path / "output")
    try:
        with ExitStack() as stack:
            for _ in range(8):
                client = stack.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(listening.getsockname())
                client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            time.sleep(0.3)
            assert status() == 503
            wait_until(lambda: status() != 503, seconds=10)
    finally:
        os.kill(number, signal.SIGKILL)
        ended(number)


def refused(*overrides: str, **environment: str) -> str:
    return error_of(call("nmt-serve", *overrides, env=environment))


def test_what_cannot_be_served_is_refused_at_the_start() -> None:
    demo = "run=demo"
    assert "host=0.0.0.0: other machines could use this service; give token=" in refused(demo, "host=0.0.0.0")
    assert "a run is named twice" in refused("run=[demo,demo]", "port=0")
    assert "NMT_SERVE_TOKEN: is blank or holds control" in refused(demo, NMT_SERVE_TOKEN="a\nb")
    assert "host=192.0.2.1: is no address of this machine" in refused(demo, "host=192.0.2.1", "token=x")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port={port}: cannot be listened to" in refused(demo, f"port={port}")


def test_a_connection_is_cut_after_a_whole_interval_of_waiting_for_its_client() -> None:
    """A request that began before one check and was answered before the next is no reason to cut the connection."""
    checks: list[Callable[[], None]] = []
    loop = SimpleNamespace(call_later=lambda _, check: checks.append(check))
    open_connection = MagicMock(spec=Connection, loop=loop, seconds=1.0, transport=MagicMock())
    open_connection.flow = SimpleNamespace(write_paused=False)
    open_connection.transport.is_closing.return_value = False

    def check(cycle: object, *, unread: bool = False) -> bool:
        open_connection.cycle, open_connection.flow.write_paused = cycle, unread
        Connection._cut_if_stalled(open_connection)
        return bool(open_connection.transport.abort.called)

    waiting, answered, unread = (MagicMock(response_complete=complete) for complete in (False, True, False))
    open_connection._waited = ()
    assert [check(waiting), check(waiting)] == [False, False]  # the service still computes
    waiting.response_complete = True
    assert not check(waiting)  # answered since the last check
    assert not check(answered)  # another request since the last check
    assert not check(unread, unread=True)
    assert not check(unread)  # read since the last check
    assert [check(unread, unread=True), check(unread, unread=True), len(checks)] == [False, True, 7]
