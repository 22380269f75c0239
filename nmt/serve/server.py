"""The service over HTTP: the calls under /v1, a health check and the page; checks of host, origin and token, and limits
of requests; the server."""

import asyncio
import errno
import hmac
import logging
import socket
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nmt import DISTRIBUTION
from nmt.config.errors import UserError, printable
from nmt.serve import messages
from nmt.serve.service import Service

STATIC = Path(__file__).parent / "static"
MAX_MESSAGE = 500  # characters of an error message
log = logging.getLogger(__name__)
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
OPEN_PATHS = {"/", "/healthz"}  # paths that need no token; the page asks its user for the token
CLIENT_LEFT = 499  # nginx's status for a client that left before the answer; only in the log
BACKLOG = 2048  # connections that may wait to be accepted


@dataclass(frozen=True)
class Rules:
    """The rules that requests must keep."""

    hosts: frozenset[str] | None  # host names by which requests may address this machine; None allows any
    token: str | None  # secret that requests must carry; None if they need none
    body_bytes: int  # largest size of a body
    seconds: float  # time within which a request must arrive and be answered


def application(service: Service, rules: Rules, log_requests: bool = False) -> ASGIApp:
    """Make the ASGI application of a service, with the guard in front that enforces the rules."""
    app = FastAPI(
        title="nmt-serve",
        version=version(DISTRIBUTION),
        description="Translations by recurrent models, and what they attend to.",
        docs_url=None,  # FastAPI's documentation pages load scripts from other sites
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    for kind in (HTTPException, RequestValidationError, UserError, Exception):
        app.add_exception_handler(kind, _problem)
    post = partial(app.post, responses=messages.PROBLEMS)

    @post("/v1/translate", response_model=messages.TranslateAnswer, summary="Translate or score texts")
    async def translate(request: messages.TranslateRequest) -> Response:
        return _json(await service.translate(request))

    @post("/v1/explain", response_model=messages.ExplainAnswer, summary="Explain one translation")
    async def explain(request: messages.ExplainRequest) -> Response:
        return _json(await service.explain(request))

    @app.get("/v1/models", response_model=messages.ModelsAnswer, summary="The models of this service")
    async def models() -> Response:
        return _json(service.describe())

    @app.head("/healthz", include_in_schema=False)  # load balancers may send HEAD
    @app.get("/healthz", summary="Whether the service is up, and how many sentences wait in its queue")
    async def healthz() -> dict[str, str | int]:
        return {"status": "ok", "waiting": len(service.batcher)}

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC))
    paths = frozenset(path for route in app.routes if "{" not in (path := getattr(route, "path", "{")))
    return Guard(app, rules, paths, log_requests)


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


async def _problem(_: Request, error: Exception) -> JSONResponse:
    """Answer an error with its HTTP status and a JSON object whose `error` is one line."""
    status, message, headers = 500, f"internal error ({type(error).__name__})", None  # uvicorn logs the traceback
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
    elif isinstance(error, RequestValidationError):
        status, message = 400, messages.describe_invalid(error.errors())
    elif isinstance(error, UserError):
        status, message = 400, str(error)
    line = printable(" ".join(message.split()))[:MAX_MESSAGE]
    return JSONResponse({"error": line}, status, headers)


class Guard:
    """ASGI middleware that refuses requests that the rules do not allow, cancels requests whose clients leave, and
    logs requests."""

    def __init__(self, app: ASGIApp, rules: Rules, paths: frozenset[str], log_requests: bool = False) -> None:
        """log_requests: log the method, path, status and duration of each request, but not its body, nor a path that is
        not among `paths`."""
        self.app, self.rules, self.paths, self.log_requests = app, rules, paths, log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, read its body and run the application, unless the client leaves."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started = CLIENT_LEFT, time.monotonic()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope)
            async with asyncio.timeout(self.rules.seconds):
                body = await self._body(receive)
                if body is not None:
                    await self._run(scope, body, receive, send_with_headers)
        except (HTTPException, TimeoutError) as error:
            late = HTTPException(504, f"no answer within {self.rules.seconds:g} s")
            refused = error if isinstance(error, HTTPException) else late
            if status == CLIENT_LEFT:  # still the initial value, so no answer has begun
                answer = JSONResponse({"error": refused.detail}, refused.status_code, refused.headers)
                await answer(scope, receive, send_with_headers)
        finally:
            if self.log_requests:
                path, seconds = scope["path"] if scope["path"] in self.paths else "other", time.monotonic() - started
                log.info("%s %s %d %.0f ms", scope["method"], path, status, 1000 * seconds)

    def _check(self, scope: Scope) -> None:
        """Check host, origin and token. Raises HTTPException if one of them is not allowed."""
        headers, rules = Headers(scope=scope), self.rules
        host = headers.get("host", "")
        # Against DNS rebinding: if the host name of another site points at this machine, browsers let the pages of that
        # site use the service.
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = None
        if rules.hosts is not None and name not in rules.hosts:
            raise HTTPException(400, f"Host: {host[:100]!r} is not a name of this service; see its option hosts")
        origin = headers.get("origin")  # the text "null" if the page hides its origin
        if origin is not None and origin.partition("://")[2] != host:
            raise HTTPException(403, "a page of another site may not use this service")
        path = scope["path"]
        if rules.token is None or path in OPEN_PATHS or path.startswith("/static/"):
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Starlette decodes headers as Latin-1, so encoding as Latin-1 restores the bytes that the client sent.
        equal = hmac.compare_digest(token.strip().encode("latin-1"), rules.token.encode())
        if not (equal and scheme.lower() == "bearer"):
            message = "this service needs a token: send it as `Authorization: Bearer TOKEN`"
            raise HTTPException(401, message, {"www-authenticate": "Bearer"})

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the whole body; None if the client left. Raises HTTPException if the body is too large, but only after
        its end, because a client that is still sending would not see the answer."""
        parts, size, limit = [], 0, self.rules.body_bytes
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size <= limit:
                parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        if size > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes")
        return b"".join(parts)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application until it has answered, and cancel it if the client leaves before."""
        delivered = False

        async def receive_body() -> Message:
            nonlocal delivered
            if delivered:
                await asyncio.Event().wait()  # wait forever; only `departure` receives further messages
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def departure() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = asyncio.ensure_future(self.app(scope, receive_body, send))
        left = asyncio.ensure_future(departure())
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            for task in (answer, left):
                task.cancel()
            await asyncio.gather(answer, left, return_exceptions=True)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens at this address; port 0 takes any free port. Raises UserError if it cannot listen."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise UserError(f"host={host}: is not the name or address of a machine ({error.strerror or error})") from None
    try:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"host={host}: is no address of this machine; use host=0.0.0.0 for all of them") from None
        raise UserError(f"host={host} port={port}: cannot be listened to ({reason}); choose another port") from None
    return listening


def address(listening: socket.socket) -> str:
    """Format the address of a socket as a URL."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class Connection(H11Protocol):
    """A connection that is cut if its client keeps it waiting: for a request, or for the client to read the answer.
    uvicorn itself waits for both forever."""

    def __init__(self, seconds: float, **of_uvicorn: Any) -> None:  # noqa: ANN401
        """seconds: the time between two checks. A client that takes twice as long is always too late."""
        super().__init__(**of_uvicorn)
        self.seconds = seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waited: tuple[object, ...] = (self.cycle,)
        self._check = self.loop.call_later(self.seconds, self._cut_if_stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        super().connection_lost(exc)

    def _cut_if_stalled(self) -> None:
        """Cut the connection if it waited for the client at the last check and still does, with no new request between
        the two; else plan the next check."""
        answered = self.cycle is None or self.cycle.response_complete
        unread = self.transport.is_closing() or self.flow.write_paused  # a closing transport first sends what it holds
        waits = (self.cycle,) if answered or unread else ()
        if waits and waits == self._waited:
            self.transport.abort()
            return
        self._waited = waits
        self._check = self.loop.call_later(self.seconds, self._cut_if_stalled)


def run(app: ASGIApp, listening: socket.socket, connections: int, seconds: float) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in flight, which may take `seconds`, the time between the
    checks of a `Connection`. More than `connections` open connections are answered with status 503."""
    protocol: Any = partial(Connection, seconds)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # leaves out warnings about invalid HTTP
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=connections + 1,  # uvicorn refuses requests as soon as this many connections are open
        timeout_graceful_shutdown=max(1, round(seconds)),
    )
    uvicorn.Server(config).run(sockets=[listening])
