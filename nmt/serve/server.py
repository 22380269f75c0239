"""Run the service until a signal ends it."""

import asyncio
import logging
import socket

import uvicorn
from starlette.types import ASGIApp

from nmt.config.errors import UserError
from nmt.serve.connections import ACCEPTED, Connections

log = logging.getLogger(__name__)
BACKLOG = 2048  # connections that wait to be accepted
MAX_HEADERS = 16_384  # bytes
KEEP_ALIVE = 30  # seconds that an idle connection stays open


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any free one. Raises UserError if that is impossible."""
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
    """The address as a URL."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class _Server(uvicorn.Server):
    """Accepts few connections at a time, so that those above the limit are closed before the next are accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # asyncio has one number for both


def run(app: ASGIApp, listening: socket.socket, connections: Connections, seconds: float) -> None:
    """Serve until SIGTERM or Ctrl-C; then answer what is in flight, for at most these seconds."""
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # uvicorn calls it to make a protocol
        ws="none",  # a WebSocket would leave the limits of `connections`
        backlog=ACCEPTED,
        log_config=None,
        log_level="error",  # no line for each request that is no HTTP
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(seconds)),
        h11_max_incomplete_event_size=MAX_HEADERS,
    )
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it would log malformed forms
    with asyncio.Runner() as runner:
        runner.run(_Server(config).serve(sockets=[listening]))
