"""The service's answers, against the Python API and the rules of the request."""

import asyncio
import gzip
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import values_of
from fastapi import Request
from fastapi.testclient import TestClient
from served import RULES, serving, trained, words
from starlette.types import Message, Send

from nmt import Translation, Translator
from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import ServeConfig
from nmt.serve.app import _query
from nmt.serve.guard import Guard, Metrics, MetricsMiddleware
from nmt.serve.messages import LibreTranslateRequest, TranslateAnswer, TranslateRequest
from nmt.serve.models import _names, load_models
from nmt.serve.service import Batcher, QueueFullError, QueueSettings, Service
from nmt.system.run import RunDirectory

LINE = "a small dog sees the red house ."
LINES = ["the cat sleeps .", "", LINE, "x", "the <b>house</b>\u202e"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("served") / "bahdanau")


@pytest.fixture(scope="module")
def runs(run: Path) -> list[str | list[str]]:
    """Models of several kinds, trained for a moment; an ensemble."""
    kinds = {
        "multihead": "attention=multihead",
        "local": "attention=luong_local_p",
        "monotonic": "attention=monotonic",
        "none": "attention=none",
        "marginal": "attention=marginal",
        "local_heads": "attention=multihead attention/window=local_p",
    }
    short = "seed=2", "training.max_steps=3"
    directories = [trained(run.parent / name, *kind.split(), *short) for name, kind in kinds.items()]
    return [str(run), *map(str, directories), [str(run), str(directories[0])]]


@pytest.fixture(scope="module")
def client(runs: list[str | list[str]]) -> Iterator[TestClient]:
    with serving(runs) as client:
        yield client


@pytest.fixture(scope="module")
def translator(run: Path) -> Translator:
    return Translator.load(run, device="cpu", precision="fp32", threads=1)


def post(client: TestClient, path: str = "/v1/translate", **request: Any) -> dict[str, Any]:  # noqa: ANN401
    answer = client.post(path, json=request)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(client: TestClient, status: int, path: str = "/v1/translate", **request: Any) -> str:  # noqa: ANN401
    answer = client.post(path, json=request)
    assert answer.status_code == status, answer.text
    (message,) = answer.json().values()
    assert "\n" not in message
    return str(message)


def test_translations_are_those_of_the_api(client: TestClient, translator: Translator) -> None:
    assert words(post(client, text=LINES)["translations"]) == [found.text for found in translator.translate(LINES)]
    assert words(post(client, text=LINE)["translations"]) == [translator.translate([LINE])[0].text]


def test_an_nbest_list_with_other_settings(client: TestClient, run: Path) -> None:
    search = {"beam_size": 6, "length_penalty": "gnmt", "alpha": 0.5}
    other = Translator.load(run, device="cpu", precision="fp32", threads=1, search=search)
    (found,) = post(client, text=LINE, nbest=4, alignment=True, **search)["translations"]
    (expected,) = other.translate_nbest([LINE], 4)
    assert [one["text"] for one in found] == [one.text for one in expected]
    for one, own in zip(found, expected, strict=True):
        assert one["score"] == pytest.approx(own.score, abs=1e-4)
        assert one["tokens"] == own.tokens
        assert one["source_tokens"] == own.source_tokens
        assert sum(one["token_log_probs"]) == pytest.approx(own.log_prob, abs=1e-3)
        np.testing.assert_allclose(one["alignment"], own.alignment, atol=1e-4)
    assert post(client, text=LINE)["translations"][0][0]["alignment"] is None


def test_forced_decoding(client: TestClient, translator: Translator) -> None:
    texts, targets = [LINE, "the cat sleeps ."], ["le chien dort .", "un chat"]
    found = post(client, text=texts, target=targets, alignment=True)["translations"]
    for (one,), own in zip(found, translator.score(texts, targets), strict=True):
        assert one["text"] == own.text
        assert one["log_prob"] == pytest.approx(own.log_prob, abs=1e-4)
        np.testing.assert_allclose(one["token_log_probs"], own.token_log_probs, atol=1e-4)
        np.testing.assert_allclose(one["alignment"], own.alignment, atol=1e-4)


def test_scores_of_other_settings_share_no_batch(run: Path, translator: Translator) -> None:
    """Requests that wait at the same time, each with a length penalty of its own."""
    models = load_models([str(run)], {"device": "cpu", "precision": "fp32", "threads": 1}, 8)
    service = Service(models, QueueSettings(workers=1, threads=1, sentences=50, wait=0.3), 20)
    alphas = [0.0, 0.5, 1.0]

    async def ask() -> list[TranslateAnswer]:
        requests = [TranslateRequest(text=LINE, target="le chien dort .", alpha=alpha) for alpha in alphas]
        return await asyncio.gather(*map(service.translate, requests))

    answers = asyncio.run(ask())
    service.batcher.close()
    (scored,) = translator.score([LINE], ["le chien dort ."])
    expected = [scored.log_prob / len(scored.tokens) ** alpha for alpha in alphas]
    assert [answer.translations[0][0].score for answer in answers] == pytest.approx(expected, abs=1e-3)


def test_searches_of_other_settings_share_no_batch(run: Path, translator: Translator) -> None:
    models = load_models([str(run)], {"device": "cpu", "precision": "fp32", "threads": 1}, 8)
    service = Service(models, QueueSettings(workers=1, threads=1, sentences=50, wait=0.3), 20)
    penalties = [{"length_penalty": "none"}, {"length_penalty": "average", "alpha": 1.0}]

    async def ask() -> list[TranslateAnswer]:
        return await asyncio.gather(*(service.translate(TranslateRequest(text=LINE, **each)) for each in penalties))

    answers = asyncio.run(ask())
    service.batcher.close()
    for answer, divided in zip(answers, (False, True), strict=True):
        (((best,),)) = answer.translations
        assert best.score == pytest.approx(best.log_prob / (len(best.tokens) if divided else 1), abs=1e-3)


def test_steering_changes_what_follows(client: TestClient) -> None:
    free = post(client, text=LINE, alignment=True)["translations"][0][0]
    step = len(free["tokens"]) // 2
    for position in (0, len(free["source_tokens"]) - 1):
        request = {"text": LINE, "prefix": free["tokens"][:step], "attend": {str(step): position}, "alignment": True}
        steered = post(client, **request)["translations"][0][0]
        assert steered["tokens"][:step] == free["tokens"][:step]
        assert steered["alignment"][step] == np.eye(len(free["source_tokens"]))[position].tolist()
    own = {str(step): row for step, row in enumerate(free["alignment"])}
    again = post(client, text=LINE, prefix=free["tokens"][:-1], attend=own)["translations"][0][0]
    assert again["tokens"] == free["tokens"]
    assert again["log_prob"] == pytest.approx(free["log_prob"], abs=1e-3)
    forced = post(client, text=LINE, target=free["text"], attend={"0": 1}, alignment=True)["translations"][0][0]
    assert forced["alignment"][0][1] == 1


def test_all_members_of_an_ensemble_are_steered(client: TestClient) -> None:
    request = {"text": LINE, "model": "bahdanau+multihead", "attend": {"0": 1}, "alignment": True}
    found = post(client, **request)["translations"][0][0]
    assert found["alignment"][0] == np.eye(len(found["source_tokens"]))[1].tolist()
    forced = post(client, **request, target="le chien")["translations"][0][0]
    assert forced["alignment"][0] == found["alignment"][0]


def test_a_text_is_continued(client: TestClient) -> None:
    assert post(client, text=LINE, prefix="le chien")["translations"][0][0]["text"].startswith("le chien")


def test_the_beam_as_a_tree(client: TestClient) -> None:
    answer = post(client, text=LINE, tree=True, nbest=2, beam_size=3)
    steps = answer["tree"]["steps"]
    for best in answer["translations"][0]:
        ended = [
            (step, node)
            for step, nodes in enumerate(steps)
            for node in nodes
            if node["fate"] == "ended" and node["score"] == pytest.approx(best["score"], abs=1e-6)
        ]
        ((step, node),) = ended
        tokens = [node["token"]]
        while node["parent"] is not None:
            step -= 1
            node = steps[step][node["parent"]]
            tokens.insert(0, node["token"])
        assert tokens == best["tokens"]
    assert all(sum(node["fate"] == "kept" for node in nodes) <= 3 for nodes in steps)


def test_an_explanation_has_what_the_attention_has(client: TestClient) -> None:
    def explain(model: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        return post(client, "/v1/explain", text=LINE, target="le chien voit la maison .", model=model, **more)

    plain = explain("bahdanau")
    T, S = len(plain["tokens"]), len(plain["source_tokens"])
    assert np.shape(plain["alignment"]) == np.shape(plain["saliency"]) == (T, S)
    np.testing.assert_allclose(np.sum(plain["saliency"], 1), 1, atol=1e-3)
    assert plain["log_prob"] == pytest.approx(sum(plain["token_log_probs"]), abs=1e-3)
    assert plain["heads"] is plain["window"] is plain["stops"] is None
    heads = explain("multihead")
    assert np.shape(heads["heads"])[1:] == np.shape(heads["alignment"])
    np.testing.assert_allclose(np.mean(heads["heads"], 0), heads["alignment"], atol=1e-4)
    local = explain("local")
    assert len(local["window"]["centres"]) == len(local["tokens"])
    weights = np.array(local["alignment"])
    for row, centre in zip(weights, local["window"]["centres"], strict=True):
        outside = np.abs(np.arange(len(row)) - centre) > local["window"]["reach"]
        assert not row[outside].any()
    monotonic = explain("monotonic")
    stops = [stop for stop in monotonic["stops"] if stop is not None]
    assert stops == sorted(stops)
    for row, stop in zip(monotonic["alignment"], monotonic["stops"], strict=True):
        assert (np.argmax(row) == stop and row[stop] == 1) if stop is not None else not any(row)
    nothing = explain("none")
    assert nothing["alignment"] is None
    assert np.shape(nothing["saliency"]) == (len(nothing["tokens"]), len(nothing["source_tokens"]))
    assert explain("bahdanau+multihead")["saliency"] is None
    assert explain("bahdanau", saliency=False)["saliency"] is None
    assert np.shape(explain("marginal")["alignment"])[0] == T
    steered = explain("bahdanau", attend={"1": 0})
    assert steered["alignment"][1] == np.eye(S)[0].tolist()


def test_a_translation_is_explained_whole_or_not_at_all(client: TestClient) -> None:
    for target, message in (
        ("le " * 800, "target: has "),
        (["▁le"] * 800, "target: has "),
        (["no such piece"], "target: 'no such piece' is no piece"),
    ):
        assert refused(client, 400, "/v1/explain", text=LINE, target=target).startswith(message)


def test_tokens_may_be_explained_as_answered(client: TestClient) -> None:
    found = post(client, text=LINE)["translations"][0][0]
    explained = post(client, "/v1/explain", text=LINE, target=found["tokens"], saliency=False)
    assert explained["tokens"] == found["tokens"]
    np.testing.assert_allclose(explained["token_log_probs"], found["token_log_probs"], atol=1e-3)


def test_models_are_described(client: TestClient) -> None:
    answer = client.get("/v1/models").json()
    models = {model["name"]: model for model in answer["models"]}
    single = ["bahdanau", "multihead", "local", "monotonic", "none", "marginal", "local_heads"]
    assert list(models) == [*single, "bahdanau+multihead"]
    assert answer["default"] == "bahdanau"
    assert (models["bahdanau"]["source"], models["bahdanau"]["target"]) == ("en", "fr")
    assert models["multihead"]["heads"] > 1
    # An explanation has no windows of several heads, so the page does not offer them.
    assert {name: model["window"] for name, model in models.items() if model["window"]} == {"local": "local_p"}
    assert post(client, "/v1/explain", text=LINE, target="le chien .", model="local_heads")["window"] is None
    assert [model["name"] for model in models.values() if model["monotonic"]] == ["monotonic"]
    assert [model["name"] for model in models.values() if model["attention"] is None] == ["none"]
    assert [model["name"] for model in models.values() if model["latent"]] == ["marginal"]
    assert models["bahdanau+multihead"]["members"] == 2
    assert len(models["bahdanau"]["examples"]) > 0
    assert models["bahdanau"]["parameters"] > 1000
    assert isinstance(models["bahdanau"]["bleu"], float)


def test_a_run_that_is_named_by_a_time_has_its_attention_in_its_name(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "2026-11-27"
    place.mkdir()
    for name in ("00-13-30-123456", "mine"):
        shutil.copytree(run, place / name)
        copy = RunDirectory(place / name)
        copy.update_json(copy.manifest, {"starts": [{"choices": {"attention": "gnmt"}}]})
    assert _names([[str(place / "00-13-30-123456")], [str(place / "mine")]]) == ["gnmt 00-13-30-123456", "mine"]


def test_each_model_translates_by_its_name(client: TestClient, runs: list[str | list[str]]) -> None:
    for name, run in (("none", runs[4]), ("bahdanau+multihead", runs[7])):
        own = Translator.load(run, device="cpu", precision="fp32", threads=1).translate([LINE])[0]
        assert words(post(client, text=LINE, model=name)["translations"]) == [own.text]


def test_a_folder_stands_for_the_trained_runs_below_it(run: Path, tmp_path: Path) -> None:
    """As a value of its own, and beside a run; not as a member of an ensemble."""
    for name in ("sweep/0", "sweep/seeds/1", "sweep/untrained"):
        shutil.copytree(run, tmp_path / name)
    shutil.rmtree(tmp_path / "sweep" / "untrained" / "checkpoints")
    loading = {"precision": "fp32", "device": "cpu", "threads": 1}
    for value, names in ((f"{tmp_path}/sweep", ["0", "1"]), (f"[{tmp_path}/sweep,{run}]", ["0", "1", "bahdanau"])):
        config = validated(ServeConfig, values_of("serve", [f"run={value}"]))
        assert list(load_models(config.run, loading, 8)) == names
    with pytest.raises(UserError, match="sweep: is not a run directory"):
        load_models([[str(run), f"{tmp_path}/sweep"]], loading, 8)
    with pytest.raises(UserError, match="untrained/checkpoints"):
        load_models([[f"{tmp_path}/sweep/untrained"]], loading, 8)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "text: field required"),
        ({"text": 3}, "text: input should be a valid string"),
        ({"text": []}, "text: is an empty list"),
        ({"text": "a", "texts": "b"}, "texts: extra inputs are not permitted"),
        ({"text": "a", "body": 1}, "body: extra inputs are not permitted"),
        ({"text": "a", "model": "other"}, "model: there is no 'other', but: bahdanau, multihead"),
        ({"text": "a", "nbest": 0}, "nbest: input should be greater than 0"),
        ({"text": "a", "nbest": 9}, "nbest: 9 is above this service's limit of 8"),
        ({"text": "a", "nbest": 5}, "nbest: 5 translations need a beam_size of 5 at least, not 2"),
        ({"text": "a", "beam_size": 9}, "beam_size: 9 is above this service's limit of 8"),
        ({"text": "a", "alpha": "1"}, "alpha: input should be a valid number"),
        ({"text": "a", "length_penalty": "some"}, "length_penalty: input should be 'none', 'average' or 'gnmt'"),
        ({"text": "a", "target": ["b"], "prefix": "c"}, "attend, prefix, tree: are for one text"),
        ({"text": ["a"], "tree": True}, "attend, prefix, tree: are for one text"),
        ({"text": "a", "target": "b", "tree": True}, "target: is scored without a search"),
        ({"text": "a", "target": "b", "nbest": 2}, "target: is scored without a search; leave out nbest"),
        ({"text": ["a", "b"], "target": ["c"]}, "target: 1 translations of 2 texts"),
        ({"text": "a", "attend": {"0": 99}}, "attend: step 0 attends to position 99"),
        ({"text": "a", "attend": {"x": 1}}, "attend.x: input should be a valid integer"),
        ({"text": "a", "attend": {"0": [0.5]}}, "attend: step 0 has 1 weights for"),
        ({"text": "a", "attend": {"0": 1}, "model": "none"}, "attend: the run has no attention to steer"),
        ({"text": "a", "target": "le " * 800, "attend": {"0": 0}}, "target: has 80"),
        ({"text": "a", "prefix": ["no such piece"]}, "prefix: 'no such piece' is no piece"),
    ],
)
def test_wrong_requests_are_one_clear_line(client: TestClient, request_: dict[str, Any], message: str) -> None:
    assert refused(client, 400, **request_).startswith(message)


def test_a_body_that_is_no_object_is_told_what_to_send(client: TestClient) -> None:
    answer = client.post("/v1/translate", json=[])
    assert (answer.status_code, answer.json()) == (
        400,
        {"error": 'the body must be a JSON object, such as {"text": "..."}'},
    )


def test_what_is_too_large_is_refused(client: TestClient) -> None:
    assert refused(client, 413, text="word " * 800).startswith("text 1: has ")
    assert refused(client, 413, text=["a"] * 21).startswith("text: has 21 texts, but at most 20")
    assert refused(client, 413, text="a" * 200_000).startswith("the body has more than 100000")


def test_a_body_in_parts_has_the_limit_of_a_whole_one() -> None:
    parts = iter([True, True, False])
    answers: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b" " * 40_000, "more_body": next(parts)}

    async def send(message: Message) -> None:
        answers.append(message)

    async def application(*_: object) -> None:
        pytest.fail("the body is handed on")

    scope = {"type": "http", "method": "POST", "path": "/v1/translate", "headers": []}
    asyncio.run(Guard(application, RULES)(scope, receive, send))
    assert answers[0]["status"] == 413


def test_a_full_queue_says_when_to_come_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise QueueFullError(7.0)

    monkeypatch.setattr(Batcher, "submit", full)
    with serving([str(run)]) as busy:
        answer = busy.post("/v1/translate", json={"text": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 50_000, b'{"text": ' + b"9" * 5000 + b"}"])
def test_other_bodies_are_refused(client: TestClient, body: bytes) -> None:
    for path in ("/v1/translate", "/v1/explain", "/translate"):
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (path, answer.text)
        assert list(answer.json()) == ["error"]


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("path", ["/v1/translate", "/v1/explain", "/translate"])
def test_the_reason_why_a_body_cannot_be_read(client: TestClient, path: str) -> None:
    def answered(status: int, body: bytes, **headers: str) -> str:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = client.post(path, content=body, headers=given)
        assert answer.status_code == status
        return str(answer.json()["error"])

    json_ = "application/json"
    wanted = f"{json_} or {FORM} or multipart/form-data" if path == "/translate" else json_
    assert answered(415, b'{"text": "a"}') == f"content-type: is missing; send {wanted}"
    assert answered(415, b"<a>", content_type="a/b; c=d") == f"content-type: 'a/b' is not taken; send {wanted}"
    assert json_ in answered(415, b'{"text": "a", "q": "a"}', content_type=FORM)  # what curl -d sends
    zipped = gzip.compress(b'{"text": "a"}')
    refusal = "content-encoding: 'gzip' is not taken; send the body uncompressed"
    assert answered(415, zipped, content_type=json_, content_encoding="gzip") == refusal
    for body, reason in (
        (b"[" * 5000, "recursion limit exceeded"),
        (b'{"text": "\xff"}', "invalid unicode code point"),
    ):
        assert answered(400, body, content_type=json_).startswith(f"the body is not valid JSON ({reason} at line 1")


@pytest.mark.parametrize("body", ["q=größe&target=fr".encode("latin-1"), b"q=gr%F6%DFe&target=fr"])
def test_forms_that_are_not_utf8_are_refused(client: TestClient, body: bytes) -> None:
    answer = client.post("/translate", content=body, headers={"content-type": FORM})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("the form is not valid UTF-8 (invalid start byte at byte ")


def test_a_request_that_takes_too_long_is_given_up(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answered, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> list[list[Translation]]:
        begun.set()
        answered.wait(20)
        ended.set()
        return []

    with serving([str(run)], replace(RULES, seconds=2)) as client:
        monkeypatch.setattr(Translator, "translate_nbest", slow)
        answer = client.post("/v1/translate", json={"text": "a"})
        assert begun.is_set()
        assert not ended.is_set()
        answered.set()
        assert (answer.status_code, answer.json()) == (503, {"error": "no answer within 2 s"})
        assert int(answer.headers["retry-after"]) >= 1


def test_a_request_that_fails_gives_up_its_other_texts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = load_models([str(run)], {"device": "cpu", "precision": "fp32", "threads": 1}, 8)
    service = Service(models, QueueSettings(workers=1, threads=1, sentences=50, wait=0.0), 20)
    tried: list[str] = []

    def fail(_: object, lines: list[str], **__: object) -> list[list[Translation]]:
        tried.extend(lines)
        time.sleep(0.1)
        raise KeyError(lines[0])

    monkeypatch.setattr(Translator, "translate_nbest", fail)
    monkeypatch.setattr("nmt.serve.service._similar", lambda jobs, threads: [jobs[0]])
    with pytest.raises(KeyError):
        asyncio.run(service.translate(TranslateRequest(text=list("abcdef"))))
    assert len(service.batcher) == 0
    service.batcher.close()
    assert len(tried) < 4


def test_load_balancers_may_ask_without_a_body(client: TestClient) -> None:
    answer = client.head("/healthz")
    assert (answer.status_code, answer.content) == (200, b"")


def test_paths_and_methods_that_do_not_exist(client: TestClient) -> None:
    assert client.get("/v1/other").status_code == 404
    methods = [
        ("GET", "/v1/translate", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("PUT", "/static/dom.js", "GET, HEAD"),
    ]
    for method, path, allowed in methods:
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/docs").status_code == 404


def test_headers_and_page(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "<html" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_openapi_document_describes_every_call(client: TestClient) -> None:
    document = client.get("/v1/openapi.json").json()
    assert {"/v1/translate", "/v1/explain", "/v1/models", "/healthz", "/metrics", "/translate", "/languages"} <= set(
        document["paths"]
    )
    schema = document["components"]["schemas"]["TranslateRequest"]
    assert schema["properties"]["nbest"]["description"] == "translations of each text, best first"
    for path in ("/v1/translate", "/v1/explain", "/translate"):
        call = document["paths"][path]["post"]
        assert set(call["responses"]) == {*map(str, (200, 400, 401, 403, 408, 413, 415, 503)), "default"}
    kinds = {"application/json", "application/x-www-form-urlencoded", "multipart/form-data"}
    assert set(call["requestBody"]["content"]) == kinds
    fields = call["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert set(fields) == {"q", "source", "target", "format", "api_key"}
    assert call["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/LibreTranslateAnswer")


def test_figures_for_prometheus(client: TestClient) -> None:
    def figures() -> dict[str, float]:
        lines = [line for line in client.get("/metrics").text.split("\n") if line and line[0] != "#"]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = figures()
    post(client, text=LINES)
    client.get("/some/other/path")
    after = figures()
    sentences, answered = (
        'nmt_sentences_total{model="bahdanau"}',
        'nmt_requests_total{path="/v1/translate",status="200"}',
    )
    assert after[sentences] - before.get(sentences, 0) == len(LINES)
    assert after[answered] - before.get(answered, 0) == 1
    assert after["nmt_waiting_sentences"] == 0
    assert after["nmt_batch_sentences_count"] > before["nmt_batch_sentences_count"]
    assert not any("some" in name for name in after)  # no series for each path that somebody tries


def test_a_request_is_counted_before_its_client_has_the_answer() -> None:
    async def application(_: object, __: object, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    metrics, counted = Metrics(lambda: 0), []

    async def send(message: Message) -> None:
        counted.append(b'nmt_requests_total{path="/a",status="200"} 1.0' in metrics.text())

    middleware = MetricsMiddleware(application, metrics, frozenset({"/a"}), None)
    asyncio.run(middleware({"type": "http", "path": "/a", "method": "GET"}, None, send))  # type: ignore[arg-type]
    assert counted == [False, False, True]


def test_the_two_calls_of_libretranslate(client: TestClient, translator: Translator) -> None:
    assert client.get("/languages").json() == [{"code": "en", "name": "en", "targets": ["fr"]}]
    expected = [found.text for found in translator.translate(["the cat sleeps .", LINE])]
    query = {"q": f"the cat sleeps .\n{LINE}", "source": "en", "target": "fr"}
    assert client.post("/translate", data=query).json() == {"translatedText": "\n".join(expected)}
    listed = {"q": ["the cat sleeps .", LINE], "source": "auto", "target": "fr", "format": "text"}
    assert client.post("/translate", json=listed).json() == {"translatedText": expected}
    unset = client.post("/translate", json={**query, "api_key": None})  # as some clients send it
    assert unset.json() == {"translatedText": "\n".join(expected)}
    assert "this service translates en to fr" in refused(client, 400, "/translate", q="a", source="en", target="xx")
    assert refused(client, 400, "/translate", q="a", source="en").startswith("target: field required")
    html = {**query, "q": "<b>a</b>", "format": "html"}
    assert refused(client, 400, "/translate", **html) == "format: input should be 'text'"


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ("q=größe café&target=fr", {"q": "größe café", "target": "fr"}),  # curl -d sends raw UTF-8
        ("q=gr%C3%B6%C3%9Fe+caf%C3%A9&q=&target=fr", {"q": ["größe café", ""], "target": "fr"}),
    ],
)
def test_forms_of_libretranslate(body: str, fields: dict[str, Any]) -> None:
    scope = {"type": "http", "headers": [(b"content-type", b"application/x-www-form-urlencoded; charset=utf-8")]}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body.encode()}

    assert asyncio.run(_query(Request(scope, receive))) == LibreTranslateRequest(**fields)


def test_more_lines_than_may_wait_are_refused(run: Path) -> None:
    query = {"source": "en", "target": "fr"}
    with serving([str(run)], waiting=8) as client:
        assert client.post("/translate", json={"q": "a\n" * 7, **query}).status_code == 200
        message = refused(client, 413, "/translate", q=["a\n" * 5, "b\nc\nd"], **query)
        assert message == "q: has 9 lines, but at most 8 are taken"
        assert "at most 8 are taken" in refused(client, 413, text=["a"] * 9)


def test_guidance_beyond_any_translation_is_refused(client: TestClient, translator: Translator) -> None:
    most = max(translator.search.max_source_length, translator.search.max_length)
    piece = translator.tokenizers.target.pieces([10])[0]
    too_long = f"prefix: has {most} tokens, but translations have at most {most}, with </s>"
    assert refused(client, 400, text=LINE, prefix=[piece] * most) == too_long
    for path, more in (("/v1/translate", {}), ("/v1/explain", {"target": "le chien ."})):
        message = refused(client, 400, path, text=LINE, attend={most: 0}, **more)
        assert message == f"attend: there is no step {most}; translations have at most {most} tokens"
    post(client, text=LINE, attend={most - 1: 0})


def test_a_models_own_beam_may_be_wider_than_what_clients_may_ask_for(run: Path) -> None:
    with serving([str(run)], beam_size=1) as client:
        own = client.get("/v1/models").json()["models"][0]
        assert own["beam_size"] == own["max_beam_size"] > 1
        post(client, text=LINE)
        post(client, text=LINE, beam_size=own["beam_size"])
        assert "above this service's limit" in refused(client, 400, text=LINE, beam_size=own["beam_size"] + 1)


def test_hosts_origins_and_tokens(run: Path) -> None:
    rules = replace(RULES, hosts=frozenset({"localhost"}), token="secret")
    with serving([str(run)], rules) as client:
        client.base_url = "http://localhost"
        query = {"text": "a"}
        assert client.post("/v1/translate", json=query).status_code == 401
        assert client.post("/v1/translate", json=query, headers={"authorization": "Bearer wrong"}).status_code == 401
        allowed = {"authorization": "Bearer secret"}
        assert client.post("/v1/translate", json=query, headers=allowed).status_code == 200
        lower = {"authorization": "bearer secret"}
        assert client.post("/v1/translate", json=query, headers=lower).status_code == 200
        assert client.get("/").status_code == client.get("/healthz").status_code == 200
        assert client.get("/languages").status_code == 200  # LibreTranslate's clients ask without the token
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics").headers["www-authenticate"] == "Bearer"
        form = {"q": "a", "source": "en", "target": "fr"}
        assert client.post("/translate", data=form).status_code == 403
        assert client.post("/translate", data={**form, "api_key": "secret"}).status_code == 200
        for host in ("evil.example", "[", "localhost.evil.example", "[::1", ""):
            assert client.get("/healthz", headers={"host": host}).status_code == 400
        foreign = {**allowed, "origin": "http://evil.example"}
        assert client.post("/v1/translate", json=query, headers=foreign).status_code == 403
        assert client.post("/v1/translate", json=query, headers={**allowed, "origin": "http://["}).status_code == 403
        hidden = {**allowed, "origin": "null"}  # of a page that sends no referrer, or within a sandboxed frame
        assert client.post("/v1/translate", json=query, headers=hidden).status_code == 403
        own = {**allowed, "origin": "http://localhost"}
        assert client.post("/v1/translate", json=query, headers=own).status_code == 200
