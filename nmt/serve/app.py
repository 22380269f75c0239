"""The service over HTTP: its own interface under /v1, two calls of LibreTranslate's, health, figures and the page."""

import hmac
import logging
from collections.abc import Callable, Coroutine, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from nmt import DISTRIBUTION
from nmt.config.errors import UserError, printable
from nmt.serve.guard import Guard, MetricsMiddleware, RefusedError, Rules
from nmt.serve.messages import (
    PROBLEMS,
    ExplainAnswer,
    ExplainRequest,
    LibreTranslateAnswer,
    LibreTranslateRequest,
    ModelsAnswer,
    TranslateAnswer,
    TranslateRequest,
    explain_invalid,
)
from nmt.serve.models import ServedModel, TextTooLongError
from nmt.serve.service import QueueFullError, Service

log = logging.getLogger(__name__)
STATIC = Path(__file__).parent / "static"
MAX_MESSAGE = 500  # characters
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
LIBRETRANSLATE_BODY = {
    "required": True,
    "content": {kind: {"schema": LibreTranslateRequest.model_json_schema()} for kind in (JSON, FORM, MULTIPART)},
}


def application(service: Service, rules: Rules, log_requests: bool = False) -> ASGIApp:
    """Make the ASGI application of a service."""
    app = FastAPI(
        title="nmt-serve",
        version=version(DISTRIBUTION),
        description="Translations by recurrent models, and what they attend to.",
        docs_url=None,  # FastAPI's pages load scripts from other sites
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    app.router.route_class = _JsonRoute
    _add_handlers(app)
    _add_calls(app, service)
    _add_libretranslate(app, service, rules.token)
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

    @app.head("/healthz", include_in_schema=False)  # asked by load balancers
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

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204)

    app.mount("/static", StaticFiles(directory=STATIC))


def _add_handlers(app: FastAPI) -> None:
    """Answer every problem with its status and one line of JSON."""

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
    """List the methods of all routes of a path together."""
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path == path]
    methods = {method for route in routes for method in route.methods or ()}
    return ", ".join(sorted(methods or {"GET", "HEAD"}))  # of static files


def _add_libretranslate(app: FastAPI, service: Service, token: str | None) -> None:
    """Add the two calls of LibreTranslate's interface that its clients need."""

    @app.get("/languages", summary="Languages, as LibreTranslate lists them")
    async def languages() -> list[dict[str, Any]]:
        targets: dict[str, list[str]] = {}
        for model in service.models.values():
            targets.setdefault(model.info.source, []).append(model.info.target)
        return [{"code": code, "name": code, "targets": [*dict.fromkeys(codes)]} for code, codes in targets.items()]

    @app.post(
        "/translate",
        response_model=LibreTranslateAnswer,
        responses=PROBLEMS,
        openapi_extra={"requestBody": LIBRETRANSLATE_BODY},
        summary="Translate, as LibreTranslate does",
    )
    async def translate(request: Request) -> JSONResponse:
        query = await _query(request)
        if token is not None and not getattr(request.state, "authorized", False):
            given = query.api_key or ""
            if not hmac.compare_digest(given.strip().encode(), token.encode()):
                raise RefusedError(403, "this service needs a token: send it as api_key")
        model = _model(service, query)
        texts = [query.q] if isinstance(query.q, str) else query.q
        service.check_number(texts, "q")
        translated = await _by_lines(service, model, texts)
        return JSONResponse({"translatedText": translated[0] if isinstance(query.q, str) else translated})


async def _query(request: Request) -> LibreTranslateRequest:
    """Read a query from JSON or a form. Raises UserError or RefusedError."""
    kind = _content_type(request, JSON, FORM, MULTIPART)
    try:
        if kind == FORM:
            return LibreTranslateRequest.model_validate(_fields(_form(await request.body())))
        if kind == MULTIPART:
            form = await request.form()
            return LibreTranslateRequest.model_validate(_fields((key, value) for key, value in form.multi_items()))
        return LibreTranslateRequest.model_validate_json(await request.body())
    except ValidationError as error:
        raise UserError(explain_invalid(error.errors(include_url=False, include_input=False))) from None


def _form(body: bytes) -> list[tuple[str, str]]:
    """Read the fields of a form, in raw UTF-8 (which curl -d sends) or escaped. Raises UserError or RefusedError."""
    if body.lstrip().startswith((b"{", b"[")):
        raise RefusedError(415, f"content-type: the body looks like JSON; send it with content-type {JSON}")
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError as error:
        raise UserError(f"the form is not valid UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise UserError(f"the form cannot be read ({error})") from None


def _fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Collect the fields of a form. Several texts become a list, as in JSON."""
    fields = [(key, value) for key, value in pairs if isinstance(value, str)]
    texts = [value for key, value in fields if key == "q"]
    return dict(fields) | ({"q": texts} if len(texts) > 1 else {})


def _model(service: Service, query: LibreTranslateRequest) -> ServedModel:
    """Find the first model for these languages. Raises UserError if there is none."""
    for model in service.models.values():
        if query.source in {"auto", model.info.source} and query.target == model.info.target:
            return model
    pairs = dict.fromkeys(f"{model.info.source} to {model.info.target}" for model in service.models.values())
    raise UserError(f"{query.source[:20]} to {query.target[:20]}: this service translates {', '.join(pairs)}")


async def _by_lines(service: Service, model: ServedModel, texts: list[str]) -> list[str]:
    """Translate each line of each text by itself, all of them together. Raises RefusedError for more lines than may
    wait."""
    number, most = sum(text.count("\n") + 1 for text in texts), service.batcher.settings.sentences
    if number > most:
        raise RefusedError(413, f"q: has {number} lines, but at most {most} are taken")
    lines = [line for text in texts for line in text.split("\n")]
    translations = iter(await service.search(model, model.translator, lines, 1))
    return ["\n".join(next(translations)[0].text for _ in text.split("\n")) for text in texts]


def _content_type(request: Request, *allowed: str) -> str:
    """Check and return the content type. Raises RefusedError if it is not allowed, or if the body is compressed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise RefusedError(415, f"content-encoding: {encoding[:50]!r} is not taken; send the body uncompressed")
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in allowed:
        problem = f"{given[:50]!r} is not taken" if given else "is missing"
        raise RefusedError(415, f"content-type: {problem}; send {' or '.join(allowed)}")
    return given


class _JsonRoute(APIRoute):
    """A call whose body, if it has one, is JSON. FastAPI would say neither which content type it expects nor why it
    cannot read a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            _content_type(request, JSON)
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:  # noqa: ANN401
        try:
            return from_json(await self.body())
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON ({error})") from None
