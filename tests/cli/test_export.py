"""nmt-export: an archive works wherever a run does, and contains no more of a corpus than the user asked for."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import TINY
from forks import call
from safetensors.torch import load

from nmt.export import contents as module
from nmt.export.contents import contents, shared_config, shared_manifest
from nmt.system.files import WEIGHTS
from nmt.system.run import RunDirectory, load_values

pytestmark = pytest.mark.system
SECRETS = ["zebra", "quagga", "okapi"]  # words of the private corpus
LINES = ["the cat sees the dog .", "the dogs see the red house .", "", "a cat sleeps ."]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run on the demo corpus, `run`, and one on a private corpus, `private`, in one folder."""
    home = tmp_path_factory.mktemp("export")
    own = ["data.test_size=12", "data.max_length=200"]  # so that no pair is dropped
    done = call("nmt-train", *TINY, "training.max_steps=6", "hydra.run.dir=run", *own, cwd=home)
    assert done.returncode == 0, done.stderr.decode()
    (home / "secret folder").mkdir()
    verbs = [("sees", "sieht"), ("hears", "hört"), ("finds", "findet"), ("likes", "mag")]
    pairs = [(f"the {a} {v} the {b} .", f"das {a} {w} das {b} .") for a in SECRETS for v, w in verbs for b in SECRETS]
    for split, some in (("train", pairs * 3), ("valid", pairs[:8]), ("test", pairs[8:16])):
        for suffix, side in (("en", 0), ("de", 1)):
            text = "".join(f"{pair[side]}\n" for pair in some)
            (home / "secret folder" / f"{split}.{suffix}").write_text(text)
    small = [value for value in TINY if not value.startswith(("data.", "tokenizer.vocab_size"))]
    paths = [f"'data.{key}=secret folder/{name}'" for key, name in (("train", "train"), ("test", "test"))]
    paths += ["'data.validation=secret folder/valid'"]
    done = call(
        "nmt-train",
        *(path.strip("'") for path in paths),
        "data=files",
        *small,
        "tokenizer.vocab_size=60",
        "training.max_steps=4",
        "hydra.run.dir=private",
        cwd=home,
    )
    assert done.returncode == 0, done.stderr.decode()
    return home


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    done = call("nmt-export", "run=run", "output=model.nmt", "held_out=true", "license='CC | 4.0'", cwd=home)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("archive: model.nmt (")
    return home / "model.nmt"


@pytest.fixture
def refused(home: Path):  # noqa: ANN201
    def check(message: str, *command: str) -> None:
        done = call(*command, cwd=home)
        assert done.returncode == 2, done.stdout.decode()
        (line,) = (line for line in done.stderr.decode().splitlines() if ": error: " in line)
        assert message in line

    return check


def files(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def card(path: Path) -> str:
    return files(path)["README.md"].decode()


def test_an_archive_translates_as_its_run(model: Path, home: Path) -> None:
    text = "".join(f"{line}\n" for line in LINES).encode()
    own = call("nmt-translate", "run=run", stdin=text, cwd=home)
    packed = call("nmt-translate", "run=model.nmt", stdin=text, cwd=home)
    assert (packed.returncode, packed.stdout) == (0, own.stdout), packed.stderr.decode()
    assert len(own.stdout.splitlines()) == len(LINES)
    both = call("nmt-translate", "run=[model.nmt,run]", stdin=text, cwd=home)
    assert both.stdout == own.stdout


@pytest.mark.slow
def test_an_archive_with_held_out_text_can_be_evaluated(model: Path, home: Path) -> None:
    own = json.loads((home / "run" / "results.json").read_text())["test"]
    before = model.read_bytes()
    for output in ([], ["output=scores"]):
        done = call("nmt-evaluate", "run=model.nmt", "threads=1", *output, cwd=home)
        assert done.returncode == 0, done.stderr.decode()
        printed = json.loads(done.stdout.decode().splitlines()[-1])
        assert printed["run"] == "model.nmt"
        assert {key: printed[key] for key in ("bleu", "chrf", "aer")} == {
            key: own[key] for key in ("bleu", "chrf", "aer")
        }
    assert printed["output"] == "scores"
    assert json.loads((home / "scores" / "evaluation.json").read_text())["members"] == [str(model)]
    assert model.read_bytes() == before
    folder = RunDirectory.existing(model).path
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {*files(model)}


def test_results_are_never_written_into_an_archive(model: Path, home: Path) -> None:
    before = model.read_bytes()
    done = call("nmt-evaluate", "run=model.nmt", cwd=home)
    assert done.returncode == 0, done.stderr.decode()
    folder = json.loads(done.stdout)["output"]
    assert folder.startswith("outputs/evaluate/")
    assert (home / folder / "results.json").is_file()
    assert model.read_bytes() == before


def test_results_of_the_best_checkpoint_are_not_those_of_the_last(home: Path) -> None:
    done = call("nmt-export", "run=run", "output=last.nmt", "checkpoint=last", cwd=home)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(files(home / "last.nmt")["results.json"]) == {}


def test_an_archive_cannot_be_resumed(model: Path, refused) -> None:  # noqa: ANN001
    refused(
        "run=model.nmt: is a file; an archive cannot be resumed, but training.start_from=", "nmt-train", "run=model.nmt"
    )


def test_weights_of_16_bits_take_half_the_space_and_the_card_says_so(home: Path) -> None:
    run = RunDirectory.existing(str(home / "run"))
    whole, half = (contents(run, "model.nmt", half=half) for half in (False, True))
    weights = [load(packed[WEIGHTS]) for packed in (whole, half)]
    for name, weight in weights[0].items():
        assert torch.equal(weights[1][name], weight.half() if weight.is_floating_point() else weight)
    assert len(half[WEIGHTS]) < 0.6 * len(whole[WEIGHTS])
    said = "weights rounded to fp16, scores measured before this"
    assert [said in packed["README.md"].decode() for packed in (whole, half)] == [False, True]


def test_an_existing_file_stays_unless_told(home: Path, refused) -> None:  # noqa: ANN001
    (home / "precious").write_text("thesis")
    refused(
        "output=precious: exists; name another file, or set overwrite=true", "nmt-export", "run=run", "output=precious"
    )
    assert (home / "precious").read_text() == "thesis"
    done = call("nmt-export", "run=run", "output=precious", "overwrite=true", cwd=home)
    assert done.returncode == 0, done.stderr.decode()
    assert zipfile.is_zipfile(home / "precious")


@pytest.mark.parametrize("name", ["config.yaml", "results.json", "tokenizer.model", "checkpoints/best.safetensors"])
def test_no_output_replaces_a_runs_own_files(name: str, home: Path, refused) -> None:  # noqa: ANN001
    before = (home / "run" / name).read_bytes()
    refused(f"output=run/{name}: lies among the run", "nmt-export", "run=run", f"output=run/{name}", "overwrite=true")
    refused(f"alignments=run/{name}: lies among the run", "nmt-translate", "run=run", f"alignments=run/{name}")
    assert (home / "run" / name).read_bytes() == before


@pytest.mark.slow
def test_mistakes_are_one_line(model: Path, home: Path, refused) -> None:  # noqa: ANN001
    export = ("nmt-export", "run=run")
    refused("output=private: is a folder; name a file", *export, "output=private")
    refused("output=model.nmt/x: cannot be written", *export, "output=model.nmt/x")
    refused("needs to be one model, as an archive holds one", "nmt-export", "run=[run,private]", "output=x")
    refused(
        "checkpoint=last: model.nmt is an archive, which has one checkpoint",
        *export[:1],
        "run=model.nmt",
        "output=x",
        "checkpoint=last",
    )
    refused("output: missing", *export)
    refused("sentence= : has no translation", *export, "output=x", "sentence=' '")
    refused("shortlist=auto: model.nmt has no table", "nmt-translate", "run=model.nmt", "shortlist=auto")
    assert not (home / "x").exists()


def test_the_card_says_what_the_model_is(model: Path, home: Path) -> None:
    text, own = card(model), json.loads((home / "run" / "results.json").read_text())["test"]
    run = RunDirectory(home / "run")
    for part in (
        "# Translation from en to fr",
        "| Licence | CC \\| 4.0 |",
        "the demo corpus that comes with nmt: 300 sentence pairs",
        f"| Size | {run.read_manifest()['parameters']:,} parameters",
        "| Decoder | GRU, 1 layer of 32 units |",
        "| Encoder | GRU, 1 layer of 16 units, in both directions |",
        "`attention=bahdanau`, score `additive`",
        "| Checkpoint | best (update 6) |",
        f"| test | 12 | {own['bleu']:.2f} | {own['chrf']:.2f} | {own['ter']:.2f} | {100 * own['aer']:.1f} % |",
        f"- BLEU: `{own['signatures']['bleu']}`",
        "](attention-1.png)",
        "nmt-translate run=model.nmt < input > output\nnmt-evaluate run=model.nmt output=scores\n",
        'Translator.load("model.nmt")',
    ):
        assert part in text, part
    assert files(model)["attention-1.png"].startswith(b"\x89PNG")


def test_a_private_corpus_leaves_no_text_and_no_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[list[str]] = []
    draw = module.draw_alignment
    monkeypatch.setattr(module, "draw_alignment", lambda w, s, t: labels.append([*s, *t]) or draw(w, s, t))
    packed = contents(RunDirectory(home / "private"), "model.nmt")
    assert set(packed) == {
        *("README.md", "config.yaml", "manifest.json", "results.json", "tokenizer.model"),
        *("attention-1.png", "checkpoints/best.safetensors"),
    }
    readable = {name: text.decode() for name, text in packed.items() if name.endswith((".md", ".yaml", ".json"))}
    assert len(readable) == 4
    for name, text in readable.items():
        for secret in [*SECRETS, "secret folder", str(home), "platform"]:
            assert secret not in text, (name, secret)
    assert all(label.isdigit() for label in labels[0])
    assert "The tokens are numbered" in readable["README.md"]
    assert "| Training corpus | text files: 108 sentence pairs" in readable["README.md"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "names", "note"),
    [
        ({"sentences": ["the okapi ."]}, "a sentence that was chosen for this card", False),
        ({}, "a sentence of the validation set", True),
    ],
)
def test_the_picture_has_words_only_if_asked_for(
    given: dict, names: str, note: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    draw = module.draw_alignment
    monkeypatch.setattr(module, "draw_alignment", lambda w, s, t: labels.extend([*s, *t]) or draw(w, s, t))
    text = contents(RunDirectory(home / "private"), "model.nmt", **given)["README.md"].decode()
    assert names in text
    assert ("tokens are numbered" in text) == note
    assert any(label == "</s>" for label in labels) != note


def test_values_of_this_machine_are_left_out(home: Path) -> None:
    values = load_values(home / "private" / "config.yaml")
    assert str(home) in values["data"]["train"][0]
    values["training"]["start_from"] = "/home/me/secret/run"
    shared = shared_config(values)
    assert shared["data"]["train"] == ["train"]
    assert shared["data"]["cache_dir"] == "~/.cache/nmt"
    assert shared["training"]["start_from"] == "run"
    changed = dict.fromkeys(("data", "training"), 0)
    assert {**shared, **changed} == {**values, **changed}
    record = {"run": "/home/me/secret/run", "step": 3, "system": "s"}
    start = {
        "overrides": [
            "data.train=/home/me/t",
            "hydra.run.dir=/x",
            "training={start_from: /home/me/x}",
            "run=/home/me/secret",
            "seed=2",
        ],
        "platform": "P",
        "start_from": record,
    }
    manifest = {"starts": [{**start, "machine": {"precision": "bf16"}}, {"machine": {"precision": "fp32"}}], "other": 1}
    (kept,) = shared_manifest(manifest)["starts"]
    assert kept == {
        "overrides": ["seed=2"],
        "machine": {"precision": "fp32"},
        "start_from": {"run": "run", "step": 3, "system": "s"},
    }
    assert manifest["starts"][0]["start_from"] is record
    assert record["run"] == "/home/me/secret/run"
