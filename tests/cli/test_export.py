"""nmt-export: an archive works wherever a run does, and contains no more of a corpus than the user asked for."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import TINY
from forks import call, error_of, worked
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
    worked("nmt-train", *TINY, "training.max_steps=6", "hydra.run.dir=run", *own, cwd=home)
    (home / "secret folder").mkdir()
    verbs = [("sees", "sieht"), ("hears", "hört"), ("finds", "findet"), ("likes", "mag")]
    pairs = [(f"the {a} {v} the {b} .", f"das {a} {w} das {b} .") for a in SECRETS for v, w in verbs for b in SECRETS]
    for split, some in (("train", pairs * 3), ("valid", pairs[:8]), ("test", pairs[8:16])):
        for suffix, side in (("en", 0), ("de", 1)):
            text = "".join(f"{pair[side]}\n" for pair in some)
            (home / "secret folder" / f"{split}.{suffix}").write_text(text)
    small = [value for value in TINY if not value.startswith(("data.", "tokenizer.vocab_size"))]
    corpus = {"train": "train", "validation": "valid", "test": "test"}
    private = ["data=files", *(f"data.{key}=secret folder/{name}" for key, name in corpus.items()), *small]
    private += ["tokenizer.vocab_size=60", "training.max_steps=4", "hydra.run.dir=private"]
    worked("nmt-train", *private, cwd=home)
    return home


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    done = worked("nmt-export", "run=run", "output=model.nmt", "held_out=true", "license='CC | 4.0'", cwd=home)
    assert done.stdout.decode().startswith("archive: model.nmt (")
    return home / "model.nmt"


def files(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_archive_translates_as_its_run(model: Path, home: Path) -> None:
    text = "".join(f"{line}\n" for line in LINES).encode()
    run, packed, both = (
        worked("nmt-translate", f"run={given}", stdin=text, cwd=home).stdout
        for given in ("run", "model.nmt", "[model.nmt,run]")
    )
    assert packed == run == both
    assert len(run.splitlines()) == len(LINES)


def test_an_archive_with_held_out_text_is_evaluated_but_never_written(model: Path, home: Path) -> None:
    own, before = json.loads((home / "run" / "results.json").read_text())["test"], model.read_bytes()
    done = worked("nmt-evaluate", "run=model.nmt", "threads=1", cwd=home)
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["run"] == "model.nmt"
    assert [printed[key] for key in ("bleu", "chrf", "aer")] == [own[key] for key in ("bleu", "chrf", "aer")]
    assert printed["output"].startswith("outputs/evaluate/")
    written = home / printed["output"]
    assert json.loads((written / "evaluation.json").read_text())["members"] == [str(model)]
    assert (written / "results.json").is_file()
    assert model.read_bytes() == before
    folder = RunDirectory.existing(model).path
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {*files(model)}


def test_results_of_the_best_checkpoint_are_not_those_of_the_last(home: Path) -> None:
    worked("nmt-export", "run=run", "output=last.nmt", "checkpoint=last", cwd=home)
    assert json.loads(files(home / "last.nmt")["results.json"]) == {}


def test_weights_of_16_bits_take_half_the_space_and_the_card_says_so(home: Path) -> None:
    run = RunDirectory.existing(str(home / "run"))
    whole, half = (contents(run, "model.nmt", half=half) for half in (False, True))
    weights = [load(packed[WEIGHTS]) for packed in (whole, half)]
    for name, weight in weights[0].items():
        assert torch.equal(weights[1][name], weight.half() if weight.is_floating_point() else weight)
    assert len(half[WEIGHTS]) < 0.6 * len(whole[WEIGHTS])
    said = "weights rounded to fp16, scores measured before this"
    assert [said in packed["README.md"].decode() for packed in (whole, half)] == [False, True]


def test_an_existing_file_stays_unless_told(home: Path) -> None:
    (home / "precious").write_text("thesis")
    given = ["nmt-export", "run=run", "output=precious"]
    assert "output=precious: exists; name another file, or set" in error_of(call(*given, cwd=home))
    assert (home / "precious").read_text() == "thesis"
    worked(*given, "overwrite=true", cwd=home)
    assert zipfile.is_zipfile(home / "precious")


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints/best.safetensors"])
def test_no_output_replaces_a_runs_own_files(name: str, home: Path) -> None:
    before = (home / "run" / name).read_bytes()
    for command, key, *more in (("nmt-export", "output", "overwrite=true"), ("nmt-translate", "alignments")):
        done = call(command, "run=run", f"{key}=run/{name}", *more, cwd=home)
        assert f"{key}=run/{name}: lies among the run" in error_of(done)
    assert (home / "run" / name).read_bytes() == before


def test_the_card_says_what_the_model_is(model: Path, home: Path) -> None:
    text, own = files(model)["README.md"].decode(), json.loads((home / "run" / "results.json").read_text())["test"]
    run = RunDirectory(home / "run")
    for part in (
        "| Licence | CC \\| 4.0 |",
        f"| Size | {run.read_manifest()['parameters']:,} parameters",
        "| Encoder | GRU, 1 layer of 16 units, in both directions |",
        "| Checkpoint | best (update 6) |",
        f"| test | 12 | {own['bleu']:.2f} | {own['chrf']:.2f} | {own['ter']:.2f} | {100 * own['aer']:.1f} % |",
        f"- BLEU: `{own['signatures']['bleu']}`",
        'Translator.load("model.nmt")',
    ):
        assert part in text, part
    assert files(model)["attention-1.png"].startswith(b"\x89PNG")


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of tokens that label the pictures of cards, in the order in which they are drawn."""
    drawn: list[str] = []
    draw = module.draw_alignment
    monkeypatch.setattr(module, "draw_alignment", lambda w, s, t: drawn.extend([*s, *t]) or draw(w, s, t))
    return drawn


def test_a_private_corpus_leaves_no_text_and_no_path(home: Path, labels: list[str]) -> None:
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
    assert labels
    assert all(label.isdigit() for label in labels)
    assert "a sentence of the validation set" in readable["README.md"]
    assert "The tokens are numbered" in readable["README.md"]
    assert "| Training corpus | text files: 108 sentence pairs" in readable["README.md"]


@pytest.mark.slow
def test_the_picture_has_words_if_asked_for(home: Path, labels: list[str]) -> None:
    packed = contents(RunDirectory(home / "private"), "model.nmt", sentences=["the okapi ."])
    text = packed["README.md"].decode()
    assert "a sentence that was chosen for this card" in text
    assert "tokens are numbered" not in text
    assert "</s>" in labels


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
    overrides = ["data.train=/me/t", "hydra.run.dir=/x", "training={start_from: /me/x}", "run=/home", "seed=2"]
    start = {"overrides": overrides, "platform": "P", "start_from": record, "machine": {"precision": "bf16"}}
    (kept,) = shared_manifest({"starts": [start, {"machine": {"precision": "fp32"}}], "other": 1})["starts"]
    assert kept == {
        "overrides": ["seed=2"],
        "machine": {"precision": "fp32"},
        "start_from": {"run": "run", "step": 3, "system": "s"},
    }
