"""Figures of the service in Prometheus' text format."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counts of one service."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        """waiting: the number of sentences in the queue."""
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
        """All figures."""
        return generate_latest(self.registry)


class MetricsMiddleware:
    """ASGI middleware that counts and times requests, by the paths that exist."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, paths: frozenset[str], log: Callable[[str], object] | None
    ) -> None:
        """log: gets one line about each request, which holds nothing of its body; None: none."""
        self.app, self.metrics, self.paths, self.log = app, metrics, paths, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started, counted = 499, time.monotonic(), False  # 499: the client left

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
                count()  # before the client has its answer, and may ask for the figures
            await send(message)

        try:
            await self.app(scope, receive, observe)
        finally:
            if not counted:
                count()
