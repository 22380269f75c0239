"""The page with a service behind it that needs no trained model: `python tests/serve/stub_server.py --port 8000`.

It keeps the interface of nmt-serve. Tests turn its knobs: how long an answer takes, and the errors that come next.
"""

import argparse
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fake_model import FakeModel, fake_models

import nmt

STATIC = Path(nmt.__file__).parent / "serve" / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass
class Failure:
    status: int
    error: str
    retry_after: int | None = None


@dataclass
class Knobs:
    """Settings of the next answers, and a record of the requests: (path, body)."""

    latency: Callable[[dict[str, Any]], float] = lambda body: 0.0  # seconds, by the request
    failures: list[Failure] = field(default_factory=list)  # one each for the next answers
    token: str | None = None
    dropping: bool = False  # cuts every connection
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class StubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.knobs = Knobs()
        self.models = fake_models()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class RefusedError(Exception):
    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    server: StubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/v1/models":
            self.answered({})
        elif path == "/" or path.startswith("/static/"):
            file = STATIC / (path.removeprefix("/static/") if path != "/" else "index.html")
            if file.parent == STATIC and file.is_file():
                self.send(200, file.read_bytes(), TYPES[file.suffix])
            else:
                self.send_json(404, {"error": f"there is no {path}"})
        else:
            self.send_json(404, {"error": f"there is no {path}"})

    def do_POST(self) -> None:
        self.answered(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answered(self, body: dict[str, Any]) -> None:
        knobs = self.server.knobs
        knobs.asked.append((self.path, body))
        time.sleep(knobs.latency(body))
        if knobs.dropping:
            self.close_connection = True
            self.connection.close()
            return
        if knobs.token is not None and self.headers.get("Authorization") != f"Bearer {knobs.token}":
            self.send_json(401, {"error": "this service asks for a token"})
            return
        if knobs.failures:
            failure = knobs.failures.pop(0)
            wait = {} if failure.retry_after is None else {"Retry-After": str(failure.retry_after)}
            self.send_json(failure.status, {"error": failure.error}, wait)
            return
        routes = {"/v1/models": models, "/v1/translate": translate, "/v1/explain": explain}
        try:
            self.send_json(200, routes[self.path](self.server.models, body))
        except RefusedError as refused:
            self.send_json(refused.status, {"error": str(refused)})

    def send_json(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(value).encode(), "application/json", headers)

    def send(self, status: int, content: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        try:
            self.send_response(status)
            fixed = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
            fixed |= {
                "Content-Security-Policy": POLICY,
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-cache",
            }
            for name, value in (fixed | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):  # the page no longer wants this answer
            self.close_connection = True


def models(known: dict[str, FakeModel], _: dict[str, Any]) -> dict[str, Any]:
    return {"models": [model.description for model in known.values()], "default": "bahdanau-1"}


def chosen(known: dict[str, FakeModel], body: dict[str, Any]) -> FakeModel:
    name = body.get("model") or "bahdanau-1"
    if name not in known:
        raise RefusedError(400, f"there is no model {name}")
    return known[name]


def attended(model: FakeModel, body: dict[str, Any]) -> dict[int, Any]:
    if body.get("attend") and model.description["attention"] is None:
        raise RefusedError(400, "this model has no attention to steer")
    return {int(step): value for step, value in (body.get("attend") or {}).items()}


def translate(known: dict[str, FakeModel], body: dict[str, Any]) -> dict[str, Any]:
    model = chosen(known, body)
    beam, nbest = body.get("beam_size") or model.description["beam_size"], body.get("nbest") or 1
    if beam > model.description["max_beam_size"]:
        raise RefusedError(400, f"beam_size is {beam}, but may be at most {model.description['max_beam_size']}")
    attend, text, target = attended(model, body), body["text"], body.get("target")
    if target is not None:
        forced = model.force(text, model.tokens_of(target, end=True), attend)
        found, steps = [forced], []
    else:
        penalty = (body.get("length_penalty"), body.get("alpha"))
        prefix = model.tokens_of(body.get("prefix") or [], end=False)
        found, steps = model.search(text, beam, penalty, prefix, attend)
    if not body.get("alignment"):
        found = [each | {"alignment": None} for each in found]
    tree = {"steps": steps} if body.get("tree") else None
    return {"model": model.description["name"], "translations": [found[:nbest]], "tree": tree}


def explain(known: dict[str, FakeModel], body: dict[str, Any]) -> dict[str, Any]:
    model = chosen(known, body)
    about = model.description
    forced = model.force(body["text"], model.tokens_of(body["target"], end=True), attended(model, body))
    rows = model.force(body["text"], forced["tokens"], {})["alignment"] or [
        [1 / len(forced["source_tokens"])] * len(forced["source_tokens"]) for _ in forced["tokens"]
    ]
    best = [max(range(len(row)), key=row.__getitem__) for row in rows]
    saliency = [[0.5 * weight + 0.5 / len(row) for weight in row] for row in rows]
    shifted = [[row[max(0, k - head)] for k in range(len(row))] for head in range(about["heads"]) for row in rows]
    heads = [shifted[head * len(rows) : (head + 1) * len(rows)] for head in range(about["heads"])]
    wanted = body.get("saliency") and about["members"] == 1
    return {
        **{key: forced[key] for key in ("source_tokens", "tokens", "token_log_probs", "log_prob", "alignment")},
        "model": about["name"],
        "heads": heads or None,
        "window": {"centres": [each + 0.3 for each in best], "reach": 2} if about["window"] else None,
        "stops": [*best[:-1], None] if about["monotonic"] else None,
        "saliency": saliency if wanted else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--latency", type=float, default=0.1, help="seconds each answer takes")
    parser.add_argument("--token", help="ask for this token")
    options = parser.parse_args()
    server = StubServer(options.port)
    server.knobs.latency, server.knobs.token = (lambda body: options.latency), options.token
    print(server.url, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
