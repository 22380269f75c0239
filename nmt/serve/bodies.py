"""Bodies of requests: which kinds are taken, and JSON with a reason when it is malformed."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from nmt.serve.guard import RefusedError

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"


def content_type(request: Request, *allowed: str) -> str:
    """The content type of a request. Raises RefusedError if it is not allowed, or if the body is compressed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise RefusedError(415, f"content-encoding: {encoding[:50]!r} is not taken; send the body uncompressed")
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in allowed:
        problem = f"{given[:50]!r} is not taken" if given else "is missing"
        raise RefusedError(415, f"content-type: {problem}; send {' or '.join(allowed)}")
    return given


class JsonRoute(APIRoute):
    """A call whose body, if it has one, is JSON. FastAPI says neither which content type it wants nor why it cannot
    read a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            content_type(request, JSON)
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:  # noqa: ANN401
        try:
            return from_json(await self.body())
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON ({error})") from None
