"""Runs and prepared corpora from elsewhere: links, pipes, configurations, records, tokenizers, arrays."""

import os
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest

from nmt import Translator
from nmt.compare.report import write_comparison
from nmt.config import schema
from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.data.prepare import prepare
from nmt.data.tokenizer import Tokenizer
from nmt.system.run import load_config
from nmt.training.job import train

SECRET = "root:x:0:0"


def config_of(*overrides: str) -> schema.TrainConfig:
    from conftest import TINY, values_of

    return validated(schema.TrainConfig, values_of("train", [*TINY, "training.max_steps=2", *overrides]))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("honest") / "run"
    assert train(config_of(), directory, []) == 0
    return directory


@pytest.fixture
def run(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, and a file and a folder outside of it that nobody may touch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text(f"{SECRET}\n")
    shutil.copytree(honest, tmp_path / "run")
    return tmp_path / "run"


def refused(call: Callable[[], object], match: str) -> None:
    """In one line, which does not show what is in other files, and those stay as they are."""
    with pytest.raises(UserError, match=match) as error:
        call()
    assert "\n" not in str(error.value)
    assert SECRET not in str(error.value)
    untouched()


def untouched() -> None:
    assert [path.name for path in Path("outside").iterdir()] == ["file"]
    assert Path("outside/file").read_text() == f"{SECRET}\n"


def resume(run: Path) -> int:
    return train(load_config(run / "config.yaml"), run, [])


def compare(run: Path) -> str:
    return write_comparison([str(run)], Path("compared"), examples=1, sentences=[], **RESAMPLING)


RESAMPLING = {"bootstrap_samples": 10, "randomisation_trials": 10}
USES: dict[str, Callable[[Path], object]] = {"translate": Translator.load, "resume": resume, "compare": compare}
FILES = (
    *(
        "checkpoints/best.safetensors",
        "checkpoints/last.pt",
        "hypotheses/test.txt",
        "hypotheses/test.statistics.safetensors",
        "results.json",
        "metrics.jsonl",
        "train.log",
    ),
    *(".lock", "manifest.json", "alignments/test.references.pharaoh", "data/test.source", "tokenizer.model", "new"),
)


@pytest.mark.parametrize(("place", "use"), zip(FILES, cycle(USES), strict=False))
def test_a_link_out_of_the_run_is_refused(place: str, use: str, run: Path) -> None:
    (run / place).unlink(missing_ok=True)
    (run / place).symlink_to("../" * place.count("/") + "../outside/file")
    refused(lambda: USES[use](run), "is a link that leads out of")


@pytest.mark.parametrize(
    ("place", "use"),
    [
        ("config.yaml", "translate"),
        ("train.log", "resume"),
        ("results.json", "compare"),
        ("tokenizer.model", "translate"),
    ],
)
def test_nobody_waits_at_a_pipe(place: str, use: str, run: Path) -> None:
    (run / place).unlink()
    os.mkfifo(run / place)
    refused(
        lambda: USES[use](run),
        "neither a file nor a folder|not a run directory|neither a run nor a folder|is not a file",
    )


RECORDS = {
    "deep nesting": '{"a":' + "[" * 10_000 + "]" * 10_000 + "}",
    "a list": "[]",
    "choices of no kind": '{"starts": [{"choices": [1], "overrides": []}]}',
    "a beginning of no kind": '{"starts": [{"start_from": ["system"]}]}',
    "a corpus of no kind": '{"data": 3}',
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_manifest_that_is_none_is_told(name: str, run: Path) -> None:
    (run / "manifest.json").write_text(RECORDS[name])
    for use in (resume, compare):
        refused(lambda use=use: use(run), "manifest.json|damaged")


def test_more_bytes_than_a_record_may_have_are_not_read(run: Path) -> None:
    for name, use in (
        ("manifest.json", resume),
        ("config.yaml", Translator.load),
        ("tokenizer.model", Translator.load),
    ):
        kept = (run / name).read_bytes()
        os.truncate(run / name, 2**40)  # takes no room on the disk
        refused(lambda use=use: use(run), "has 1,099,511,627,776 bytes, more than the limit")
        (run / name).write_bytes(kept)


def test_a_tokenizer_that_is_none_or_another_is_told(run: Path) -> None:
    model = (run / "tokenizer.model").read_bytes()
    for junk in (b"", b"junk" * 100, b"\x0a\xff\xff\xff\xff\x0f", model[:100]):
        (run / "tokenizer.model").write_bytes(junk)
        refused(lambda: Translator.load(run), "is not a SentencePiece model|lacks <s>|another model")
        with pytest.raises(UserError, match="SentencePiece"):
            Tokenizer.load(run / "tokenizer.model")
    other = prepare(config_of().data, config_of("tokenizer.vocab_size=300").tokenizer)
    other.tokenizers.save(run)
    refused(lambda: Translator.load(run), "another model")
