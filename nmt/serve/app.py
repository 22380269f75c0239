"""The service over HTTP: the calls under /v1, a health check, figures for Prometheus, and the page."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from nmt import DISTRIBUTION
from nmt.config.errors import UserError, printable
from nmt.serve.messages import (
    PROBLEMS,
    ExplainAnswer,
    ExplainRequest,
    ModelsAnswer,
    TranslateAnswer,
    TranslateRequest,
    explain_invalid,
)
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
    _add_handlers(app)
    _add_calls(app, service)
    _add_page(app)
    paths = frozenset(path for route in app.routes if "{" not in (path := getattr(route, "path", "{")))
    return Guard(app, rules, service.metrics, paths, log_requests)


def _add_calls(app: FastAPI, service: Service) -> None:
    @app.post("/v1/translate", response_model=TranslateAnswer, responses=PROBLEMS, summary="Translate or score texts")
    async def translate(request: TranslateRequest) -> Response:
        return _json(await service.translate(request))

    @app.post("/v1/explain", response_model=ExplainAnswer, responses=PROBLEMS, summary="Explain one translation")
    async def explain(request: ExplainRequest) -> Response:
        return _json(await service.explain(request))

    @app.get("/v1/models", response_model=ModelsAnswer, summary="The models of this service")
    async def models() -> Response:
        return _json(service.describe())

    @app.head("/healthz", include_in_schema=False)  # load balancers may send HEAD
    @app.get("/healthz", summary="Whether the service is up")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", summary="Figures for Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC))


def _add_handlers(app: FastAPI) -> None:
    """Answer every error with its HTTP status and a JSON object whose `error` is one line."""

    def problem(status: int, message: str, headers: Any = None) -> JSONResponse:  # noqa: ANN401
        line = printable(" ".join(message.split()))[:MAX_MESSAGE]
        return JSONResponse({"error": line}, status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return problem(400, explain_invalid(error.errors()))

    @app.exception_handler(UserError)
    async def mistaken(_: Request, error: UserError) -> JSONResponse:
        return problem(400, str(error))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, error.detail, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return problem(500, f"internal error ({type(error).__name__})")  # uvicorn logs the traceback
