"""The service over HTTP: the calls under /v1, a health check, and the page."""

from functools import partial
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from nmt import DISTRIBUTION
from nmt.config.errors import UserError, printable
from nmt.serve import messages
from nmt.serve.server import Guard, Rules
from nmt.serve.service import Service

STATIC = Path(__file__).parent / "static"
MAX_MESSAGE = 500  # characters of an error message


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
    _add_calls(app, service)
    app.mount("/static", StaticFiles(directory=STATIC))
    paths = frozenset(path for route in app.routes if "{" not in (path := getattr(route, "path", "{")))
    return Guard(app, rules, paths, log_requests)


def _add_calls(app: FastAPI, service: Service) -> None:
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


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


async def _problem(_: Request, error: Exception) -> JSONResponse:
    """Answer an error with its HTTP status and a JSON object whose `error` is one line."""
    status, message, headers = 500, f"internal error ({type(error).__name__})", None  # uvicorn logs the traceback
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
    elif isinstance(error, RequestValidationError):
        status, message = 400, messages.explain_invalid(error.errors())
    elif isinstance(error, UserError):
        status, message = 400, str(error)
    line = printable(" ".join(message.split()))[:MAX_MESSAGE]
    return JSONResponse({"error": line}, status, headers)
