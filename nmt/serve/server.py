"""Run the service until a signal ends it."""

import asyncio
import logging
import socket

import uvicorn
from starlette.types import ASGIApp

from nmt.config.errors import UserError

log = logging.getLogger(__name__)
BACKLOG = 2048  # connections that wait to be accepted
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


def run(app: ASGIApp, listening: socket.socket, seconds: float) -> None:
    """Serve until SIGTERM or Ctrl-C; then answer what is in flight, for at most these seconds."""
    config = uvicorn.Config(
        app,
        http="h11",  # bounds the size of headers
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(seconds)),
        h11_max_incomplete_event_size=16_384,
    )
    with asyncio.Runner() as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[listening]))
