"""Run the service until a signal ends it, with limits on connections: how many are open, and how long a request's
headers may take to arrive."""

import asyncio
import json
import logging
import os
import resource
import socket
import sys
import time
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from nmt.config.errors import UserError

log = logging.getLogger(__name__)
BACKLOG = 2048  # connections that wait to be accepted
ACCEPTED = 4  # connections that the event loop accepts at a time
MAX_HEADERS = 16_384  # bytes
KEEP_ALIVE = 30  # seconds that an idle connection stays open
RESERVED = 32  # file descriptors for connections that are being accepted or closed, and for files
GRACE = 0.5  # seconds for which a new idle connection is not closed to make room for another
REPORT_EVERY = 60  # seconds between warnings about closed connections
LINGER = 2  # seconds in which a refused client may read why
UNREAD = 10  # seconds in which a client must read some of an answer


class Connections:
    """The open connections of a service. When there are too many, the one that has waited longest for a request makes
    room; if none has waited for long, the new connection is refused."""

    def __init__(self, most: int, header_seconds: float, log_requests: bool) -> None:
        """most: connections open at a time, or fewer if this process lacks file descriptors."""
        self.most = min(most, _free_descriptors())
        self.header_seconds, self.log_requests = header_seconds, log_requests
        self.idle: dict[Connection, float] = {}  # those without a complete request, and since when; oldest first
        self._open = self._closed = 0
        self._report_due: asyncio.TimerHandle | None = None

    def protocol(self, **arguments: Any) -> "Connection":  # noqa: ANN401
        """Make the protocol of a new connection, for uvicorn."""
        return Connection(self, **arguments)

    def add(self) -> bool:
        """Count a new connection. Return False if there is no room for it."""
        self._open += 1
        if self._open <= self.most:
            return True
        self._closed += 1
        if self._report_due is None:
            self._report_due = asyncio.get_running_loop().call_later(1, self._report)
        before = time.monotonic() - GRACE
        for connection, since in self.idle.items():
            # Not one whose answer is still being sent: it would be lost.
            if since < before and not connection.transport.get_write_buffer_size():
                del self.idle[connection]
                connection.transport.abort()
                return True
        return False

    def remove(self, connection: "Connection") -> None:
        """Count a closed connection."""
        self._open -= 1
        self.idle.pop(connection, None)

    def _report(self) -> None:
        self._report_due = None
        if self._closed:
            log.warning(
                "%d connections were closed or refused, as at most %d may be open at a time", self._closed, self.most
            )
            self._closed = 0
            self._report_due = asyncio.get_running_loop().call_later(REPORT_EVERY, self._report)


class Connection(H11Protocol):
    """A connection, which is closed if a request's headers take too long or the client does not read its answer."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:  # noqa: ANN401
        super().__init__(**arguments)
        self._connections = connections
        self._limit: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._refused = False

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport.set_write_buffer_limits(high=0)  # so that any unread answer calls `pause_writing`
        if self._connections.add():
            self._watch()
        else:
            self._refuse(503, "too many connections are open")
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._connections.remove(self)
        self._stop_clock()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if not self._refused:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        """Wait for a further request. Until its first byte, uvicorn's limit for idle connections holds."""
        super().on_response_complete()
        if not self._answering and not self.transport.is_closing():
            self._connections.idle[self] = time.monotonic()

    def pause_writing(self) -> None:
        """Close the connection if the client does not read."""
        super().pause_writing()
        self._reading = self.loop.call_later(UNREAD, self._check_reading, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the clock: the client has read."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with the status that h11 suggests."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        self._refuse(status, "the headers are too large" if status == 431 else "this is no valid HTTP request")  # noqa: PLR2004

    def shutdown(self) -> None:
        """Close the connection, as the service stops."""
        if self._refused:
            self.transport.abort()
        else:
            super().shutdown()

    def _watch(self) -> None:
        """Start the clock when a request, or the rest of one that was refused early, is awaited; stop it when the
        application has a request."""
        if self._refused or self.transport.is_closing():
            return
        if self._answering:
            self._connections.idle.pop(self, None)
            self._stop_clock()
        elif self._limit is None:
            self._connections.idle.setdefault(self, time.monotonic())
            self._limit = self.loop.call_later(self._connections.header_seconds, self._headers_late)

    def _stop_clock(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _headers_late(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(408, f"the headers did not arrive within {self._connections.header_seconds:g} s")
        else:
            self.transport.close()

    def _check_reading(self, before: int) -> None:
        """before: the number of unread bytes at the last call."""
        unread = self.transport.get_write_buffer_size()
        if unread >= before:
            self.transport.abort()
        else:
            self._reading = self.loop.call_later(UNREAD, self._check_reading, unread)

    def _refuse(self, status: int, reason: str) -> None:
        """Answer, and discard what the client still sends. If the connection were closed at once, a client that is
        sending would see a reset instead of the answer."""
        self._refused = True
        self._connections.idle.pop(self, None)
        self._stop_clock()
        if self._connections.log_requests:
            log.info("refused a connection with status %d: %s", status, reason)
        running = self._answering
        if running:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not running or not self.cycle.response_started:
            body = json.dumps({"error": reason}).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += "retry-after: 1\r\n" if status == 503 else ""  # noqa: PLR2004
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self._limit = self.loop.call_later(LINGER, self.transport.abort)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens there, with port 0 at any free port. Raises UserError if that is impossible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"host={host} port={port}: cannot be listened to ({reason}); choose another port") from None
    return listening


def address(listening: socket.socket) -> str:
    """The address of a socket as a URL."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class _Server(uvicorn.Server):
    """Accepts few connections at a time, so that those above the limit are closed before the next are accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # asyncio uses one number for both


def run(app: ASGIApp, listening: socket.socket, connections: Connections, seconds: float) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish the requests in flight, for at most these seconds."""
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # uvicorn calls it to make a protocol
        ws="none",  # the limits do not hold for WebSockets
        backlog=ACCEPTED,
        log_config=None,
        log_level="error",  # no warnings about invalid HTTP
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(seconds)),
        h11_max_incomplete_event_size=MAX_HEADERS,
    )
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # no warnings about malformed forms
    with asyncio.Runner() as runner:
        runner.run(_Server(config).serve(sockets=[listening]))


def _free_descriptors() -> int:
    """Count the connections for which this process has file descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, limit - len(os.listdir("/dev/fd")) - RESERVED)
