"""The service's answers, compared with the Python API, and the rules for requests."""

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from conftest import values_of
from fastapi.testclient import TestClient
from served import LOADING, RULES, service, serving, trained, words

from nmt import Translation, Translator
from nmt.config.checks import validated
from nmt.config.errors import UserError
from nmt.config.schema import ServeConfig
from nmt.serve.messages import TranslateAnswer, TranslateRequest
from nmt.serve.models import load_models
from nmt.serve.server import Guard
from nmt.system.run import RunDirectory

LINE = "a small dog sees the red house ."
LINES = ["the cat sleeps .", "", LINE, "x", "the <b>house</b>\u202e"]
KINDS = {
    "multihead": ["attention=multihead", "attention/window=local_p"],
    "local": ["attention=luong_local_p"],
    "monotonic": ["attention=monotonic"],
    "none": ["attention=none"],
    "marginal": ["attention=marginal"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str | list[str]]:
    """List the runs to serve: the package's model, one run of each kind in KINDS, and an ensemble."""
    folder = tmp_path_factory.mktemp("served")
    others = [str(trained(folder / name, *kind)) for name, kind in KINDS.items()]
    return ["demo", *others, others[:2]]


@pytest.fixture(scope="module")
def client(runs: list[str | list[str]]) -> Iterator[TestClient]:
    with serving(runs) as client:
        yield client


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load("demo", **LOADING)


def post(client: TestClient, path: str = "/v1/translate", **request: Any) -> dict[str, Any]:  # noqa: ANN401
    answer = client.post(path, json=request)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def refused(client: TestClient, status: int, path: str = "/v1/translate", **request: Any) -> str:  # noqa: ANN401
    answer = client.post(path, json=request)
    assert answer.status_code == status, answer.text
    (message,) = answer.json().values()
    assert "\n" not in message
    return str(message)


def test_translations_and_scores_are_those_of_the_api(client: TestClient, translator: Translator) -> None:
    texts, targets = [LINE, "the cat sleeps ."], ["le chien dort .", "un chat"]
    search = {"beam_size": 6, "length_penalty": "gnmt", "alpha": 0.5}
    other = Translator.load("demo", **LOADING, search=search)
    for request, expected in (
        ({"text": LINES}, [[found] for found in translator.translate(LINES)]),
        ({"text": LINE, "nbest": 4, **search}, other.translate_nbest([LINE], 4)),
        ({"text": texts, "target": targets}, [[scored] for scored in translator.score(texts, targets)]),
    ):
        answered = post(client, alignment=True, **request)["translations"]  # type: ignore[arg-type]
        for one, own in zip(chain(*answered), chain(*expected), strict=True):
            exact = "text", "tokens", "source_tokens"
            assert [one[name] for name in exact] == [getattr(own, name) for name in exact]
            for name in ("score", "log_prob", "token_log_probs", "alignment"):
                np.testing.assert_allclose(np.float64(one[name]), np.float64(getattr(own, name)), atol=1e-4)
    assert post(client, text=LINE)["translations"][0][0]["alignment"] is None


@pytest.mark.parametrize("target", [None, "le chien dort ."])
def test_requests_with_other_settings_share_no_batch(target: str | None) -> None:
    """The requests wait at the same time, and each has another length penalty."""
    alphas = [0.0, 0.5, 1.0]
    given: dict[str, Any] = {"text": LINE, "target": target, "length_penalty": "average"}

    async def ask() -> list[TranslateAnswer]:
        return await asyncio.gather(*(started.translate(TranslateRequest(**given, alpha=alpha)) for alpha in alphas))

    with service(["demo"], wait=0.3) as started:
        for answer, alpha in zip(asyncio.run(ask()), alphas, strict=True):
            ((best,),) = answer.translations
            assert best.score == pytest.approx(best.log_prob / len(best.tokens) ** alpha, abs=1e-3)


def test_steering_changes_what_follows(client: TestClient) -> None:
    free = post(client, text=LINE, alignment=True)["translations"][0][0]
    request = {"text": LINE, "prefix": free["tokens"][:2], "attend": {"2": 0}, "alignment": True}
    steered = post(client, **request)["translations"][0][0]
    assert steered["tokens"][:2] == free["tokens"][:2]
    assert steered["alignment"][2] == np.eye(len(free["source_tokens"]))[0].tolist()
    # All members of an ensemble are steered.
    request = {"text": LINE, "model": "multihead+local", "attend": {"0": 1}, "alignment": True}
    free = post(client, **request)["translations"][0][0]
    assert free["alignment"][0] == np.eye(len(free["source_tokens"]))[1].tolist()
    forced = post(client, **request, target="le chien")["translations"][0][0]
    assert forced["alignment"][0] == free["alignment"][0]


def test_the_beam_as_a_tree(client: TestClient, translator: Translator) -> None:
    answer = post(client, text=LINE, tree=True, nbest=2)
    nbest, steps = translator.beam_tree(LINE, 2)
    pieces = translator.tokenizers.target.pieces
    expected = [[(node.parent, *pieces([node.token]), node.fate) for node in nodes] for nodes in steps]
    assert [[(n["parent"], n["token"], n["fate"]) for n in nodes] for nodes in answer["tree"]["steps"]] == expected
    assert [best["tokens"] for best in answer["translations"][0]] == [best.tokens for best in nbest]


def test_an_explanation_has_what_the_attention_has(client: TestClient) -> None:
    def explain(model: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        return post(client, "/v1/explain", text=LINE, target="le chien voit la maison .", model=model, **more)

    plain = explain("demo")
    T, S = len(plain["tokens"]), len(plain["source_tokens"])
    assert np.shape(plain["alignment"]) == np.shape(plain["saliency"]) == (T, S)
    np.testing.assert_allclose(np.sum(plain["saliency"], 1), 1, atol=1e-3)
    assert plain["heads"] is plain["window"] is plain["stops"] is None
    assert explain("demo", saliency=False)["saliency"] is None
    assert explain("demo", attend={"1": 0})["alignment"][1] == np.eye(S)[0].tolist()
    tokens = post(client, "/v1/explain", text=LINE, target=plain["tokens"], saliency=False)
    np.testing.assert_allclose(tokens["token_log_probs"], plain["token_log_probs"], atol=1e-3)
    heads = explain("multihead")
    np.testing.assert_allclose(np.mean(heads["heads"], 0), heads["alignment"], atol=1e-4)
    assert heads["window"] is None  # each head has its own window
    local = explain("local")
    for row, centre in zip(np.array(local["alignment"]), local["window"]["centres"], strict=True):
        assert not row[np.abs(np.arange(len(row)) - centre) > local["window"]["reach"]].any()
    monotonic = explain("monotonic")
    stops = [stop for stop in monotonic["stops"] if stop is not None]
    assert stops == sorted(stops)
    for row, stop in zip(monotonic["alignment"], monotonic["stops"], strict=True):
        assert row == (np.eye(len(row))[stop].tolist() if stop is not None else [0] * len(row))
    nothing = explain("none")
    assert nothing["alignment"] is None
    assert np.shape(nothing["saliency"]) == (len(nothing["tokens"]), len(nothing["source_tokens"]))
    assert explain("multihead+local")["saliency"] is None


def test_models_are_described_and_chosen_by_their_names(client: TestClient, runs: list[str | list[str]]) -> None:
    answer = client.get("/v1/models").json()
    models = {model["name"]: model for model in answer["models"]}
    assert (list(models), answer["default"]) == (["demo", *KINDS, "multihead+local"], "demo")
    assert [models["demo"][key] for key in ("source", "target")] == ["en", "fr"]
    assert models["demo"]["score"].startswith("BLEU 9")
    for key, names in {
        "heads": ["multihead"],
        "window": ["local"],  # not "heads": explanations lack the windows of several heads
        "monotonic": ["monotonic"],
        "latent": ["marginal"],
    }.items():
        assert [name for name, model in models.items() if model[key]] == names
    assert [name for name, model in models.items() if model["attention"] is None] == ["none"]
    assert models["multihead+local"]["members"] == 2
    for name, run in (("local", runs[2]), ("multihead+local", runs[-1])):
        expected = Translator.load(run, **LOADING).translate([LINE])[0].text
        assert words(post(client, text=LINE, model=name)["translations"]) == [expected]


def test_a_folder_stands_for_the_trained_runs_below_it(runs: list[str | list[str]], tmp_path: Path) -> None:
    """A folder may be the only value or stand beside a run, but not be a member of an ensemble. The name of a run whose
    folder is a time starts with its attention."""
    for name in ("sweep/2026-11-27/00-13-30-123456", "sweep/seeds/1", "sweep/untrained"):
        shutil.copytree(str(runs[1]), tmp_path / name)
    dated = RunDirectory(tmp_path / "sweep/2026-11-27/00-13-30-123456")
    dated.update_json(dated.manifest, {"starts": [{"choices": {"attention": "gnmt"}}]})
    shutil.rmtree(tmp_path / "sweep" / "untrained" / "checkpoints")
    sweep = ["gnmt 00-13-30-123456", "1"]
    for value, names in ((f"{tmp_path}/sweep", sweep), (f"[{tmp_path}/sweep,demo]", [*sweep, "demo"])):
        config = validated(ServeConfig, values_of("serve", [f"run={value}"]))
        assert list(load_models(config.run, LOADING, 8)) == names
    with pytest.raises(UserError, match="sweep: is not a run directory"):
        load_models([["demo", f"{tmp_path}/sweep"]], LOADING, 8)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "text: field required"),
        ({"text": []}, "text: is an empty list"),
        ({"text": "a", "texts": "b"}, "texts: extra inputs are not permitted"),
        ({"text": "a", "model": "other"}, "model: there is no 'other'; the models are demo, multihead"),
        ({"text": "a", "nbest": 9}, "nbest: 9 is above this service's limit of 8"),
        ({"text": "a", "nbest": 5, "beam_size": 4}, "nbest=5: more than the beam of 4; set search.beam_size=5"),
        ({"text": "a", "beam_size": 9}, "beam_size: 9 is above this service's limit of 8"),
        ({"text": ["a"], "tree": True}, "attend, prefix, tree: are for one text"),
        ({"text": "a", "target": "b", "nbest": 2}, "target: is scored without a search; leave out nbest, prefix"),
        ({"text": ["a", "b"], "target": ["c"]}, "target: one translation of each text is expected, 2 in all, not 1"),
        ({"text": "a", "attend": {"0": 999}}, "attend: step 0 attends to position 999"),
        ({"text": "a", "attend": {"0": 1}, "model": "none"}, "attend: the run has no attention to steer"),
    ],
)
def test_wrong_requests_are_one_clear_line(client: TestClient, request_: dict[str, Any], message: str) -> None:
    assert refused(client, 400, **request_).startswith(message)


NUMBERS = ["1" * 5000, "1e999", "-0.0", "NaN", "Infinity"]
NO_OBJECTS = [b"", b"{", b"[]", b"\xff\xfe", b"[" * 50_000, b'{"text": ' + b"9" * 5000 + b"}", b'{"text": "\xff"}']


@pytest.mark.parametrize("body", [*NO_OBJECTS, *(f'{{"text": "a", "nbest": {n}}}'.encode() for n in NUMBERS)])
def test_bodies_that_are_no_request_are_refused(client: TestClient, body: bytes) -> None:
    for kind in ("application/json", "text/plain"):
        answer = client.post("/v1/translate", content=body, headers={"content-type": kind})
        assert (answer.status_code, list(answer.json())) == (400, ["error"])


def test_what_is_too_large_is_refused(client: TestClient) -> None:
    long = "le " * 800
    assert refused(client, 413, text=long).startswith("text 1: has ")
    assert refused(client, 413, text="a", target=long).startswith("target 1: has ")
    assert refused(client, 413, text=["a"] * 21).startswith("text: has 21 texts, but the limit is 20")
    assert refused(client, 413, text="a" * 200_000).startswith("the body has more than 100000")
    assert refused(client, 400, text=LINE, prefix=["▁le"] * 1000).startswith("prefix: has 1000 tokens")
    for path, more in (("/v1/translate", {}), ("/v1/explain", {"target": "le chien ."})):
        message = refused(client, 400, path, text=LINE, attend={1000: 0}, **more)
        assert message.startswith("attend: there is no step 1000")


def test_a_body_in_parts_has_the_limit_of_a_whole_one() -> None:
    parts = [{"type": "http.request", "body": b" " * 40_000, "more_body": more} for more in (True, True, False)]
    application, send = AsyncMock(), AsyncMock()
    scope = {"type": "http", "method": "POST", "path": "/v1/translate", "headers": []}
    asyncio.run(Guard(application, RULES, frozenset())(scope, AsyncMock(side_effect=parts), send))
    assert send.call_args_list[0].args[0]["status"] == 413
    application.assert_not_called()


def test_an_answer_that_takes_too_long_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, resumed = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> list[list[Translation]]:
        begun.set()
        assert resumed.wait(20)
        return []

    with serving(["demo"], replace(RULES, seconds=2), waiting=3) as client:
        monkeypatch.setattr(Translator, "translate_nbest", slow)
        assert refused(client, 413, text=["a"] * 4) == "text: has 4 texts, but the limit is 3"
        late = client.post("/v1/translate", json={"text": "a"})
        assert begun.is_set()
        resumed.set()
    assert (late.status_code, late.json()) == (504, {"error": "no answer within 2 s"})
    assert "retry-after" not in late.headers  # the page would repeat the request for ever


def test_a_request_that_fails_gives_up_its_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fail(_: object, lines: list[str], **__: object) -> list[list[Translation]]:
        tried.extend(lines)
        time.sleep(0.1)
        raise KeyError(lines[0])

    monkeypatch.setattr(Translator, "translate_nbest", fail)
    with service(["demo"], wait=0.0, batch_tokens=500) as started:
        texts = ["the cat " * 20] * 20  # needs several batches
        with pytest.raises(KeyError):
            asyncio.run(started.translate(TranslateRequest(text=texts)))
        assert len(started.batcher) == 0
    assert len(tried) < 20


def test_paths_that_exist_and_others(client: TestClient) -> None:
    for path in ("/v1/other", "/static/../server.py", "/docs"):
        assert client.get(path).status_code == 404
    answer = client.get("/v1/translate")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    health = client.head("/healthz")
    assert (health.status_code, health.content) == (200, b"")
    page = client.get("/")
    assert "<html" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    document = client.get("/v1/openapi.json").json()
    assert {"/v1/translate", "/v1/explain", "/v1/models", "/healthz"} == set(document["paths"])


def test_hosts_origins_and_tokens() -> None:
    rules = replace(RULES, hosts=frozenset({"localhost"}), token="secret")
    with serving(["demo"], rules) as client:
        client.base_url = "http://localhost"

        def status(token: str = "Bearer secret", **headers: str) -> int:
            headers |= {"authorization": token} if token else {}
            return client.post("/v1/translate", json={"text": "a"}, headers=headers).status_code

        for token, expected in (("", 401), ("Bearer wrong", 401), ("Basic secret", 401), ("bearer secret", 200)):
            assert status(token) == expected
        assert client.get("/").status_code == client.get("/healthz").status_code == 200
        assert client.get("/v1/models").headers["www-authenticate"] == "Bearer"
        for host in ("evil.example", "[", "localhost.evil.example", "[::1", ""):
            assert client.get("/healthz", headers={"host": host}).status_code == 400
        # A browser sends "null" for a page without a referrer, and for a sandboxed frame.
        origins = {"http://evil.example": 403, "http://[": 403, "null": 403, "http://localhost": 200}
        assert {origin: status(origin=origin) for origin in origins} == origins
