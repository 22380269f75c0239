"""Runs and prepared corpora from elsewhere: links, pipes, configurations, records, tokenizers, arrays."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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

BIN = Path(sys.executable).parent
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


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", FILES)
def test_a_link_out_of_the_run_is_refused(place: str, use: str, run: Path) -> None:
    (run / place).unlink(missing_ok=True)
    (run / place).symlink_to("../" * place.count("/") + "../outside/file")
    refused(lambda: USES[use](run), "is a link that leads out of")


@pytest.mark.parametrize("place", ["checkpoints", "tensorboard", "hypotheses", "alignments", "data"])
def test_a_folder_that_is_a_link_out_of_the_run_is_refused(place: str, run: Path) -> None:
    shutil.rmtree(run / place)
    (run / place).symlink_to("../outside")
    for use in USES.values():
        refused(lambda use=use: use(run), "is a link that leads out of")


def test_a_detour_out_of_the_run_is_refused_and_a_link_within_is_not(run: Path) -> None:
    (run / "inner").symlink_to("alignments")
    (run / "round").symlink_to("round")
    Translator.load(run)
    (run / "alignments" / "up").symlink_to("../../outside")
    (run / "file").symlink_to("alignments/up/file")
    refused(lambda: Translator.load(run), "is a link that leads out of")


def test_a_run_may_itself_be_reached_by_a_link(run: Path) -> None:
    Path("link").symlink_to("run")
    assert Translator.load("link").translate(["the cat ."])
    assert resume(Path("link")) == 0
    untouched()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", ["config.yaml", "train.log", "metrics.jsonl", "results.json", "tokenizer.model"])
def test_nobody_waits_at_a_pipe(place: str, use: str, run: Path) -> None:
    if (place, use) == ("config.yaml", "resume"):
        pytest.skip("read by the test itself")
    (run / place).unlink()
    os.mkfifo(run / place)
    refused(
        lambda: USES[use](run),
        "neither a file nor a folder|not a run directory|neither a run nor a folder|is not a file",
    )


@pytest.mark.parametrize(
    "command",
    [
        "nmt-evaluate run=run",
        pytest.param("nmt-train run=run", marks=pytest.mark.slow),
        pytest.param("nmt-train hydra.run.dir=run", marks=pytest.mark.slow),
        pytest.param("nmt-translate run=run", marks=pytest.mark.slow),
        pytest.param("nmt-translate run=[run,run]", marks=pytest.mark.slow),
        pytest.param("nmt-evaluate run=[run,run] output=o", marks=pytest.mark.slow),
        pytest.param("nmt-compare runs=run", marks=pytest.mark.slow),
    ],
)
@pytest.mark.system
def test_the_commands_refuse_a_link_and_leave_what_it_leads_to(command: str, run: Path) -> None:
    (run / "train.log").unlink()
    (run / "train.log").symlink_to("../outside/file")
    name, *arguments = command.split()
    done = subprocess.run(
        [BIN / name, *arguments], capture_output=True, text=True, input="a\n", timeout=100, check=False
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "run/train.log: is a link that leads out of " in line
    untouched()


CONFIGS = {
    "code": ("!!python/object/apply:os.mkdir [outside/executed]", "could not determine a constructor"),
    "a target": ("_target_: os.mkdir\npath: outside/executed", "_target_: unknown key"),
    "deep nesting": ("[" * 10_000, "cannot be read as a configuration"),
    "references": ("a: &a [1,1]\nb: &b [*a,*a]\nc: [*b,*b]", "aliases are not supported"),
    "a date that is none": ("a: 2020-99-99", "cannot be read as a configuration"),
    "a truth that is none": ("a: !!bool perhaps", "cannot be read as a configuration"),
    "many digits": (f"a: {'9' * 5000}", "cannot be read as a configuration"),
    "numbers for keys": ("1: 2", "unknown key|missing"),
    "a list": ("[1, 2]", "is not a configuration"),
    "other bytes": ("\0", "cannot be read as a configuration"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_data(name: str, run: Path) -> None:
    text, message = CONFIGS[name]
    (run / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        Translator.load(run)
    assert not any(line.startswith(" ") for line in str(error.value).splitlines())
    untouched()


def test_translating_opens_no_place_that_the_configuration_names(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    for key in ("cache_dir", "start_from"):
        text = "\n".join(f"{line.partition(':')[0]}: {Path('outside/pipe').resolve()}" if f" {key}:" in line else line
                         for line in text.splitlines())  # fmt: skip
    (run / "config.yaml").write_text(text)
    os.mkfifo("outside/pipe")
    Translator.load(run).translate(["the cat ."])
    Path("outside/pipe").unlink()
    untouched()


RECORDS = {
    "deep nesting": '{"a":' + "[" * 10_000 + "]" * 10_000 + "}",
    "a list": "[]",
    "starts of no kind": '{"starts": [3]}',
    "a number for starts": '{"starts": 3}',
    "choices of no kind": '{"starts": [{"choices": [1], "overrides": []}]}',
    "a status of no kind": '{"status": [1]}',
    "a machine of no kind": '{"starts": [{"machine": 3}]}',
    "a beginning of no kind": '{"starts": [{"start_from": ["system"]}]}',
    "teachers of no kind": '{"starts": [{"teachers": ["system"]}]}',
    "overrides of no kind": '{"starts": [{"overrides": [1]}]}',
    "a corpus of no kind": '{"data": 3}',
    "many digits": '{"starts": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_manifest_that_is_none_is_told(name: str, run: Path) -> None:
    (run / "manifest.json").write_text(RECORDS[name])
    for use in (resume, compare):
        refused(lambda use=use: use(run), "manifest.json|damaged")


@pytest.mark.parametrize("value", ["1e400", "-1", "9" * 400, "NaN", "[]", '"x"', "{}"])
def test_a_number_that_is_none_stops_no_comparison_but_its_own(value: str, run: Path) -> None:
    (run / "results.json").write_text(f'{{"test": {{"sentences_per_second": {value}}}}}')
    values = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(
        json.dumps(values | {"parameters": 0}).replace('"parameters": 0', f'"parameters": {value}')
    )
    try:
        compare(run)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
    untouched()


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
