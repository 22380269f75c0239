"""Around the application: checks of hosts, token, size and time of bodies, clients that leave; headers; figures."""

import asyncio
import hmac
import json
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
DISCARDED = 16  # times the limit: how much of a body that is too large is read
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OPEN_PATHS = {"/", "/healthz", "/favicon.ico", "/languages"}  # need no token; the page asks for it


@dataclass(frozen=True)
class Rules:
    """The rules of a service."""

    hosts: frozenset[str] | None  # names that requests may use for this machine; None for any
    token: str | None
    body: int  # bytes
    body_seconds: float  # within which a body must arrive
    seconds: float  # within which a request must be answered


class RefusedError(Exception):
    """The request is answered with this status and message."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Guard:
    """ASGI middleware. Reads the body of each request before the application sees it."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answered = False

        async def send_with_headers(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope)
            body = await self._body(scope, receive)
            if body is not None:
                await self._answer(scope, body, receive, send_with_headers)
        except RefusedError as refused:
            if not answered:
                await _send_problem(send_with_headers, refused)

    def _check(self, scope: Scope) -> None:
        """Check host, origin and token. Raises RefusedError."""
        headers, rules = Headers(scope=scope), self.rules
        host = headers.get("host", "")
        # Otherwise the page of a site whose name leads to this machine could use the service (DNS rebinding).
        if rules.hosts is not None and _hostname(host) not in rules.hosts:
            raise RefusedError(400, f"this service is not called {host[:100]!r}")
        origin = headers.get("origin")  # "null" from a page that hides its origin
        if origin is not None and origin.partition("://")[2] != host:
            raise RefusedError(403, "a page of another site may not use this service")
        path = scope["path"]
        if rules.token is None or path in OPEN_PATHS or path.startswith("/static/"):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Encode as Latin-1, as which headers were decoded: these are the bytes that the client sent.
        equal = hmac.compare_digest(given.strip().encode("latin-1"), rules.token.encode())
        scope.setdefault("state", {})["authorized"] = equal and scheme.lower() == "bearer"
        # LibreTranslate's clients send the token within the body.
        if not scope["state"]["authorized"] and path != "/translate":
            raise RefusedError(401, "this service needs a token: send it as `Authorization: Bearer TOKEN`")

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the whole body; None if the client left. Raises RefusedError if it is too large or too slow."""
        parts, size, most = [], 0, self.rules.body
        try:
            async with asyncio.timeout(self.rules.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size <= most:
                        parts.append(message.get("body", b""))
                    # Read the rest, up to a limit: a client that is still sending would not see the answer.
                    if size > DISCARDED * most or (size > most and not message.get("more_body", False)):
                        raise RefusedError(413, f"the body has more than {most} bytes")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            if size > most:
                raise RefusedError(413, f"the body has more than {most} bytes") from None
            raise RefusedError(408, f"the body did not arrive within {self.rules.body_seconds:g} s") from None

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application until it has answered, its time is over, or the client has left. Raises RefusedError."""
        delivered = False

        async def receive_body() -> MutableMapping[str, Any]:
            nonlocal delivered
            if delivered:
                await asyncio.Event().wait()  # forever: `departure` waits for the client to leave
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def departure() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = asyncio.ensure_future(self.app(scope, receive_body, send))
        left = asyncio.ensure_future(departure())
        try:
            await asyncio.wait({answer, left}, timeout=self.rules.seconds, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            elif not left.done():
                raise RefusedError(503, f"no answer within {self.rules.seconds:g} s", self.rules.seconds)
        finally:
            for task in (answer, left):
                task.cancel()
            await asyncio.gather(answer, left, return_exceptions=True)


def _hostname(host: str) -> str | None:
    """The name in a Host header, without its port; None if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def _send_problem(send: Send, refused: RefusedError) -> None:
    """Answer with the status and one line of JSON."""
    body = json.dumps({"error": str(refused)}, ensure_ascii=True).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.retry_after is not None:
        headers.append((b"retry-after", str(max(1, round(refused.retry_after))).encode()))
    if refused.status == 401:  # noqa: PLR2004
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in {408, 413}:
        headers.append((b"connection", b"close"))  # the rest of the body is left unread
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Metrics:
    """Figures of one service, for Prometheus."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        """waiting: returns the number of sentences in the queue."""
        self.registry = CollectorRegistry()
        self.requests = Counter("nmt_requests", "Requests answered", ["path", "status"], registry=self.registry)
        self.seconds = Histogram(
            "nmt_request_seconds", "Time to answer", ["path"], buckets=SECONDS, registry=self.registry
        )
        self.sentences = Counter("nmt_sentences", "Sentences translated or scored", ["model"], registry=self.registry)
        self.tokens = Counter("nmt_source_tokens", "Source tokens of these", ["model"], registry=self.registry)
        self.batch_sentences = Histogram(
            "nmt_batch_sentences", "Sentences of a batch", buckets=SENTENCES, registry=self.registry
        )
        self.batch_seconds = Histogram("nmt_batch_seconds", "Time of a batch", buckets=SECONDS, registry=self.registry)
        Gauge("nmt_waiting_sentences", "Sentences in the queue", registry=self.registry).set_function(waiting)

    def observe_batch(self, sentences: int, seconds: float) -> None:
        """Count a batch."""
        self.batch_sentences.observe(sentences)
        self.batch_seconds.observe(seconds)

    def text(self) -> bytes:
        """Format all figures as text."""
        return generate_latest(self.registry)


class MetricsMiddleware:
    """ASGI middleware that counts and times requests, by path."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, paths: frozenset[str], log: Callable[[str], object] | None
    ) -> None:
        """paths: all others count as one. log: called with one line about each request, without its body."""
        self.app, self.metrics, self.paths, self.log = app, metrics, paths, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started, counted = 499, time.monotonic(), False  # 499 if the client leaves

        def count() -> None:
            nonlocal counted
            counted = True
            path, seconds = scope["path"] if scope["path"] in self.paths else "other", time.monotonic() - started
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(seconds)
            if self.log is not None:
                self.log(f"{scope['method']} {path} {status} {1000 * seconds:.0f} ms")

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                count()  # before the client has its answer and may ask for the figures
            await send(message)

        try:
            await self.app(scope, receive, observe)
        finally:
            if not counted:
                count()
