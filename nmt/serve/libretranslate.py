"""The two calls of LibreTranslate's interface that its clients need: /languages and /translate."""

import hmac
from collections.abc import Iterable
from typing import Any, Literal
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nmt.config.errors import UserError
from nmt.serve.bodies import FORM, JSON, MULTIPART, content_type
from nmt.serve.guard import RefusedError
from nmt.serve.messages import PROBLEMS, Text, explain_invalid
from nmt.serve.models import ServedModel
from nmt.serve.service import Service


class Query(BaseModel):
    """The fields that count here. Clients send others too, such as alternatives."""

    model_config = ConfigDict(extra="ignore", strict=True)

    q: Text | list[Text] = Field(description="a text or several; each line is translated for itself")
    source: str = Field("auto", description="a code of /languages; auto: that of the first model with this target")
    target: str = Field(description="a code of /languages")
    format: Literal["text"] = "text"  # tags of HTML would be translated as words
    api_key: str | None = Field(None, description="the service's token, unless the header authorization holds it")


class Translated(BaseModel):
    """The translation of `q`: a text, or a list if `q` is one."""

    translatedText: str | list[str]  # noqa: N815


BODY = {
    "required": True,
    "content": {kind: {"schema": Query.model_json_schema()} for kind in (JSON, FORM, MULTIPART)},
}


def add_calls(app: FastAPI, service: Service, token: str | None) -> None:
    """Add the calls to an application."""

    @app.get("/languages", summary="Languages, as LibreTranslate lists them")
    async def languages() -> list[dict[str, Any]]:
        targets: dict[str, list[str]] = {}
        for model in service.models.values():
            known = targets.setdefault(model.info.source, [])
            if model.info.target not in known:
                known.append(model.info.target)
        return [{"code": code, "name": code, "targets": codes} for code, codes in targets.items()]

    @app.post(
        "/translate",
        response_model=Translated,
        responses=PROBLEMS,
        openapi_extra={"requestBody": BODY},
        summary="Translate, as LibreTranslate does",
    )
    async def translate(request: Request) -> JSONResponse:
        query = await _query(request)
        if token is not None and not getattr(request.state, "authorized", False):
            _check_key(query.api_key or "", token)
        model = _model(service, query)
        texts = [query.q] if isinstance(query.q, str) else query.q
        service.check_number(texts, "q")
        translated = await _by_lines(service, model, texts)
        return JSONResponse({"translatedText": translated[0] if isinstance(query.q, str) else translated})


def _check_key(given: str, token: str) -> None:
    """Raises RefusedError."""
    if not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise RefusedError(403, "this service needs a token: send it as api_key")


async def _query(request: Request) -> Query:
    """JSON or a form. Raises UserError or RefusedError."""
    kind = content_type(request, JSON, FORM, MULTIPART)
    try:
        if kind == FORM:
            return Query.model_validate(_fields(_form(await request.body())))
        if kind == MULTIPART:
            form = await request.form()
            return Query.model_validate(_fields((key, value) for key, value in form.multi_items()))
        return Query.model_validate_json(await request.body())
    except ValidationError as error:
        raise UserError(explain_invalid(error.errors(include_url=False, include_input=False))) from None


def _form(body: bytes) -> list[tuple[str, str]]:
    """The fields of a form, in raw UTF-8 (which curl -d sends) or with escapes. Raises UserError or RefusedError."""
    if body.lstrip().startswith((b"{", b"[")):
        raise RefusedError(415, f"content-type: the body looks like JSON; send it with content-type {JSON}")
    try:
        return parse_qsl(body.decode(), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError as error:
        raise UserError(f"the form is not valid UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise UserError(f"the form cannot be read ({error})") from None


def _fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a form. Several texts are a list, as in JSON."""
    known = [(key, value) for key, value in pairs if isinstance(value, str)]
    texts = [value for key, value in known if key == "q"]
    return dict(known) | ({"q": texts} if len(texts) > 1 else {})


def _model(service: Service, query: Query) -> ServedModel:
    """The first model for these languages. Raises UserError if there is none."""
    for model in service.models.values():
        if query.source in {"auto", model.info.source} and query.target == model.info.target:
            return model
    pairs = dict.fromkeys(f"{model.info.source} to {model.info.target}" for model in service.models.values())
    raise UserError(f"{query.source[:20]} to {query.target[:20]}: this service translates {', '.join(pairs)}")


async def _by_lines(service: Service, model: ServedModel, texts: list[str]) -> list[str]:
    """Translates each line of each text for itself, all of them together. Raises RefusedError for more lines than may
    wait."""
    number, most = sum(text.count("\n") + 1 for text in texts), service.batcher.settings.sentences
    if number > most:
        raise RefusedError(413, f"q: has {number} lines, but at most {most} are taken")
    lines = [line for text in texts for line in text.split("\n")]
    found = iter(await service.search(model, model.translator, lines, 1))
    return ["\n".join(next(found)[0].text for _ in text.split("\n")) for text in texts]
