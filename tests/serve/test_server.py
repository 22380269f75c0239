"""nmt-serve as a process: starting, clients that misbehave or leave, and stopping."""

import http.client
import json
import random
import signal
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from forks import call
from libretranslatepy import LibreTranslateAPI
from served import Process, process, trained, words

from nmt import Translator

LINES = ["the cat sleeps .", "a small dog sees the red house .", "the house"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("server") / "run")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Process]:
    limits = ["limits.body_bytes=20000", "limits.queued_sentences=400"]
    with process(run.parent, f"run={run}", "precision=fp32", *limits) as started:
        yield started


@pytest.fixture(scope="module")
def address(server: Process) -> str:
    return server.address


def post(address: str, path: str = "/v1/translate", **request: Any) -> dict[str, Any]:  # noqa: ANN401
    body = json.dumps(request).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address + path, body, headers), timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def connection(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)


def test_many_clients_get_what_the_command_prints(address: str, run: Path) -> None:
    """Each sentence alone, from sixteen clients at once, line for line."""
    sources = [line for line in (run / "data" / "validation.source").read_text().split("\n") if line] + LINES
    printed = call("nmt-translate", f"run={run}", "precision=fp32", stdin="\n".join(sources).encode()).stdout.decode()
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda text: words(post(address, text=text)["translations"])[0], sources * 3))
    assert found == printed.split("\n")[:-1] * 3


def test_a_client_of_libretranslate(address: str, run: Path) -> None:
    client = LibreTranslateAPI(address)
    expected = Translator.load(run, device="cpu", precision="fp32").translate(LINES)
    assert [client.translate(line, "en", "fr") for line in LINES] == [found.text for found in expected]
    assert client.languages() == [{"code": "en", "name": "en", "targets": ["fr"]}]


VALUES: list[Any] = [None, 7, -1e308, True, {}, [[]], {"a": [1]}, "x" * 30_000]
NUMBERS = ["1" * 5000, "1e999", "-0.0", "NaN", "Infinity"]


def malformed(number: int) -> tuple[str, bytes, dict[str, str]]:
    """A path, a body that no request may have, and headers."""
    draw = random.Random(number)
    path, kind, json_ = draw.choice(["/v1/translate", "/v1/explain", "/translate"]), number % 8, "application/json"
    nowhere = draw.choice(["/v2", "/v1/translate/x", "/static/%2e%2e/app.py", "/v1"])
    odd_type = draw.choice(["text/html", "application/xml", "", "a/b;c=d"])
    value, number_ = draw.choice(VALUES), draw.choice(NUMBERS)
    bodies = [
        draw.randbytes(draw.randrange(300)),
        b"[" * draw.randrange(1, 9000),
        b'{"text":' * draw.randrange(1, 2000) + b"1" + b"}" * draw.randrange(3),
        json.dumps({"text": value, "q": value}).encode(),
        f'{{"text": "a", "target": "b", "nbest": {number_}, "attend": {number_}}}'.encode(),
        draw.randbytes(50),
        json.dumps({"text": "a", draw.choice("bcdef"): 1, "target": 3}).encode(),
        b"{}",
    ]
    return nowhere if kind == 7 else path, bodies[kind], {"content-type": odd_type if kind == 5 else json_}


def test_two_thousand_malformed_requests_get_a_clear_refusal_each(server: Process) -> None:
    address = server.address

    def send(numbers: range) -> Counter[int]:
        seen: Counter[int] = Counter()
        client = connection(address)
        for number in numbers:
            path, body, headers = malformed(number)
            client.request("POST", path, body, headers)
            answer = client.getresponse()
            text = answer.read()
            seen[answer.status] += 1
            assert list(json.loads(text)) == ["error"], text
            if answer.getheader("connection") == "close":
                client.close()
        client.close()
        return seen

    with ThreadPoolExecutor(8) as pool:
        statuses = sum(pool.map(send, [range(first, 2000, 8) for first in range(8)]), Counter())
    assert sum(statuses.values()) == 2000
    assert set(statuses) <= {400, 404, 405, 413, 415}, statuses
    assert server.is_running()
    assert server.logged() == []
    assert words(post(address, text=LINES)["translations"])[0]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\x00" * 100 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: " + b"b" * 1_000_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(address: str, sent: bytes) -> None:
    url = urlsplit(address)
    with socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=20) as client:
        client.sendall(sent)
        answer = client.recv(1000)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    post(address, text="a")


def test_a_slow_or_endless_body_is_cut_off(run: Path) -> None:
    with process(run.parent, f"run={run}", "limits.body_bytes=20000", "limits.body_seconds=1") as started:
        url = urlsplit(started.address)
        for length, chunk, status in ((100, b'{"text"', b" 408 "), (10**9, b"{" * 30_000, b" 413 ")):
            with socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=20) as client:
                head = f"POST /v1/translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
                client.sendall(head.encode() + chunk)
                answer = b"".join(iter(lambda: client.recv(1000), b""))
                assert status in answer, answer
                assert b'{"error": "' in answer


def waiting(address: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=20) as answer:
        lines = answer.read().decode().split("\n")
    return next(float(line.split()[1]) for line in lines if line.startswith("nmt_waiting_sentences "))


def test_clients_that_leave_free_their_places(address: str) -> None:
    """Of 300 sentences that would take a while, few are left to do once the client has gone."""
    url = urlsplit(address)
    body = json.dumps({"text": [f"{LINES[1]} {number}" for number in range(200)], "alignment": True}).encode()
    clients = []
    for _ in range(2):
        client = socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=20)
        head = f"POST /v1/translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        clients.append(client)
    deadline = time.monotonic() + 20
    while waiting(address) < 50 and time.monotonic() < deadline:
        time.sleep(0.005)
    for client in clients:
        client.close()
    started = time.monotonic()
    while waiting(address) and time.monotonic() - started < 20:
        time.sleep(0.01)
    assert waiting(address) == 0
    post(address, text="a")


def test_a_signal_finishes_what_is_in_flight(run: Path) -> None:
    with process(run.parent, f"run={run}") as started, ThreadPoolExecutor(1) as pool:
        address = started.address
        answer = pool.submit(post, address, text=[f"{LINES[1]} {number}" for number in range(100)])
        deadline = time.monotonic() + 20
        while waiting(address) == 0 and not answer.done() and time.monotonic() < deadline:
            time.sleep(0.005)
        started.signal(signal.SIGTERM)
        assert len(answer.result(60)["translations"]) == 100
        assert started.ended() in {143, -signal.SIGTERM}
        assert started.logged() == []
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"{address}/healthz", timeout=5)


def test_requests_are_logged_without_their_texts_and_only_if_asked_for(run: Path) -> None:
    for asked in (False, True):
        with process(run.parent, f"run={run}", f"log_requests={asked}") as started:
            post(started.address, text="a secret sentence")
            url = urlsplit(started.address)
            with socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=20) as client:
                client.sendall(b"secret\r\n\r\n")
                assert client.recv(1000).startswith(b"HTTP/1.1 400 Bad Request")
            started.signal(signal.SIGTERM)
            started.ended()
            logged = "\n".join(started.logged())
            assert ("POST /v1/translate 200 " in logged) == asked
            assert ("refused a connection with status 400: this is no valid HTTP request" in logged) == asked
            assert "secret" not in logged


def refused(*overrides: str) -> str:
    ended = call("nmt-serve", *overrides)
    assert ended.returncode == 2, ended
    (line,) = ended.stderr.decode().strip().split("\n")
    return line


def test_what_cannot_be_served_is_told_at_the_start(run: Path, tmp_path: Path) -> None:
    assert "host=0.0.0.0: other machines could use this service; give token=" in refused(f"run={run}", "host=0.0.0.0")
    assert f"run={tmp_path}: is not a run directory" in refused(f"run={tmp_path}", "port=0")
    assert "a run is named twice" in refused(f"run=[{run},{run}]", "port=0")
    assert "hosst" in refused(f"run={run}", "hosst=a")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port={port}: cannot be listened to" in refused(f"run={run}", f"port={port}")


def test_names_of_this_machine(run: Path) -> None:
    """Its own, and those that the configuration adds."""
    with process(run.parent, f"run={run}", "hosts=[Translate.Example]", "workers=2") as started:
        client = connection(started.address)
        for name, status in (("localhost", 200), ("translate.example:443", 200), ("other.example", 400)):
            client.request("GET", "/healthz", headers={"host": name})
            answer = client.getresponse()
            assert (answer.read() != b"", answer.status) == (True, status)


def test_a_token_from_the_environment(run: Path) -> None:
    token = {"NMT_SERVE_TOKEN": "secret"}
    with process(run.parent, f"run={run}", environment=token) as started:
        with pytest.raises(OSError, match="401"):
            post(started.address, text="a")
        client = LibreTranslateAPI(started.address, "secret")
        assert client.translate("the house", "en", "fr")
        assert client.languages() == [{"code": "en", "name": "en", "targets": ["fr"]}]


def test_white_space_around_a_token_does_not_count(run: Path) -> None:
    for given in ({"NMT_SERVE_TOKEN": " secret \n"}, {}):
        overrides = [] if given else ["token=' secret '"]
        with process(run.parent, f"run={run}", *overrides, environment=given) as started:
            assert LibreTranslateAPI(started.address, "secret ").translate("the house", "en", "fr")
            assert ("#token=secret;" in started.output.read_text()) == (not given)


def test_a_token_that_no_client_can_send_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "token: is blank" in refused(f"run={run}", "host=0.0.0.0", "token=' '")
    for given in (" ", "a\nb"):
        monkeypatch.setenv("NMT_SERVE_TOKEN", given)
        assert "NMT_SERVE_TOKEN: is blank or holds control" in refused(f"run={run}", "host=0.0.0.0")


def test_a_malformed_form_is_not_logged(server: Process) -> None:
    client = connection(server.address)
    client.request("POST", "/translate", b"q=a", {"content-type": "multipart/form-data; boundary=x"})
    assert client.getresponse().status == 400
    assert server.logged() == []


def test_the_address_carries_any_token(run: Path) -> None:
    with process(run.parent, f"run={run}", "token='a+b/c==&%'") as started:
        assert f"{started.address}/#token=a%2Bb%2Fc%3D%3D%26%25;" in started.output.read_text()
