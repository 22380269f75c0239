"""The service over HTTP: its own interface under /v1, two calls of LibreTranslate's, health, figures and the page."""

import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from nmt.config.errors import UserError, printable
from nmt.serve import libretranslate
from nmt.serve.batcher import QueueFullError
from nmt.serve.bodies import JsonRoute
from nmt.serve.guard import Guard, RefusedError, Rules
from nmt.serve.messages import (
    PROBLEMS,
    ExplainAnswer,
    ExplainRequest,
    ModelsAnswer,
    TranslateAnswer,
    TranslateRequest,
    explain_invalid,
)
from nmt.serve.metrics import MetricsMiddleware
from nmt.serve.models import TextTooLongError
from nmt.serve.service import Service

log = logging.getLogger(__name__)
STATIC = Path(__file__).parent / "static"
MAX_MESSAGE = 500  # characters


def application(service: Service, rules: Rules, log_requests: bool = False) -> ASGIApp:
    """The service as an ASGI application."""
    app = FastAPI(
        title="nmt-serve",
        version=version("nmt"),
        description="Translations by recurrent models, and what they attend to.",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    app.router.route_class = JsonRoute
    _add_handlers(app)
    _add_calls(app, service)
    libretranslate.add_calls(app, service, rules.token)
    _add_page(app)
    paths = frozenset(path for route in app.routes if "{" not in (path := getattr(route, "path", "{")))
    return MetricsMiddleware(Guard(app, rules), service.metrics, paths, log.info if log_requests else None)


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

    @app.head("/healthz", include_in_schema=False)  # what load balancers ask
    @app.get("/healthz", summary="Is the service up?")
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

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204)

    app.mount("/static", StaticFiles(directory=STATIC))


def _add_handlers(app: FastAPI) -> None:
    """Every problem is one line of JSON with its status."""

    def handler(kind: type[Exception], status: Callable[[Any], tuple[int, str, float | None]]) -> None:
        async def answer(request: Request, error: Exception) -> JSONResponse:
            code, message, retry_after = status(error)
            headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}
            if code == 405:  # noqa: PLR2004
                headers["allow"] = _methods(app, request.url.path)
            line = printable(" ".join(message.split()))[:MAX_MESSAGE]
            return JSONResponse({"error": line}, code, headers)

        app.add_exception_handler(kind, answer)

    def failed(error: Exception) -> tuple[int, str, None]:
        log.error("a request failed", exc_info=error)
        return 500, f"internal error ({type(error).__name__})", None

    handler(RequestValidationError, lambda error: (400, explain_invalid(error.errors()), None))
    handler(HTTPException, lambda error: (error.status_code, str(error.detail), None))
    handler(UserError, lambda error: (413 if isinstance(error, TextTooLongError) else 400, str(error), None))
    handler(RefusedError, lambda error: (error.status, str(error), error.retry_after))
    handler(QueueFullError, lambda error: (503, str(error), error.retry_after))
    handler(Exception, failed)


def _methods(app: FastAPI, path: str) -> str:
    """The methods that all routes of a path take together."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.path == path]
    methods = {method for route in routes for method in route.methods or ()}
    return ", ".join(sorted(methods or {"GET", "HEAD"}))  # those of files
