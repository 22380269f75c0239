"""Command lines: each value is used as it was typed, or refused in one line that names the value."""

import os
import random
import sys
from argparse import Namespace
from functools import reduce
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from nmt import DISTRIBUTION
from nmt.cli.compose import RunRequest, compose, new_run, parse_arguments, resumed_run
from nmt.cli.config_files import known_keys
from nmt.cli.run_command import run_command
from nmt.config.checks import config_dir
from nmt.config.errors import UserError
from nmt.config.schema import CompareConfig, EvaluateConfig, ExportConfig, ServeConfig, TrainConfig, TranslateConfig

SCHEMAS = {"train": TrainConfig, "evaluate": EvaluateConfig, "translate": TranslateConfig, "compare": CompareConfig}
THRESHOLDS = yaml.safe_load((config_dir() / "size" / "auto.yaml").read_text(encoding="utf-8"))["thresholds"]
SCHEMAS |= {"export": ExportConfig, "serve": ServeConfig}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def taken(*arguments: str, command: str = "train") -> TrainConfig | None:
    """Return the configuration that the command would use, or None if it refuses the arguments."""
    seen: list[TrainConfig] = []

    def work(options: Namespace) -> None:
        words = options.overrides
        if command == "train":
            resumes = any(word.startswith("run=") for word in words)
            seen.append((resumed_run if resumes else new_run)(words).config)
        else:
            seen.append(compose(command, SCHEMAS[command], words))  # type: ignore[arg-type]

    with pytest.raises(SystemExit) as exit_:
        run_command(command, work, list(arguments))
    assert exit_.value.code in {0, 2}
    return seen[0] if exit_.value.code == 0 else None


def test_values_win_over_choices_and_may_refer_to_each_other() -> None:
    config = taken("encoder.hidden=${decoder.hidden}", "decoder.hidden=24", "encoder=lstm", "attention=bahdanau")
    assert config is not None
    assert (config.encoder.hidden, config.encoder.cell) == (24, "lstm")


@pytest.mark.parametrize(
    ("text", "command", "key", "others"),
    [  # texts that Hydra would read as numbers
        ("2024_01_15", "train", "data.train", ["size=small", "data=files", "data.validation=b"]),
        ("-5", "train", "training.start_from", ["size=small"]),
        ("7", "evaluate", "output", ["run=a"]),
        ("~/x", "compare", "baseline", ["runs=a"]),
    ],
)
def test_paths_and_names_arrive_as_typed(text: str, command: str, key: str, others: list[str]) -> None:
    config = taken(*others, f"{key}={text}", command=command)
    assert config is not None
    expected = text.replace("~", str(Path.home()))
    expected = os.path.abspath(expected) if command == "train" else expected
    assert reduce(getattr, key.split("."), config) in (expected, [expected])


def test_what_a_recipe_sets_for_another_choice_is_left_out_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = ["data.path=FOLDER", "tokenizer=file", "tokenizer.source_model=M", "size=small"]
    for arguments, dropped, choice in (
        (["experiment=multi30k_en_de_best", "search.max_length=9"], ["search.beam_size=12"], "search=greedy"),
        (
            ["data=multi30k_lc_tok", *tokenizer],
            ["tokenizer.normalization=none", "tokenizer.split_punctuation=false"],
            "tokenizer=file",
        ),
    ):
        assert taken(*arguments, choice) is not None
        told = {f"{value}: ignored, not a value of {choice}" for value in dropped}
        assert {*capsys.readouterr().err.splitlines()} == told


def test_the_environment_says_where_the_cache_and_the_home_directory_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NMT_CACHE", "123")
    config = taken()
    assert config is not None
    assert config.data.cache_dir == os.path.abspath("123")
    monkeypatch.setenv("HOME", "/home/me")
    assert new_run(["hydra.run.dir='~/my run'"]).directory == Path("/home/me/my run")
    monkeypatch.setenv("NMT_CACHE", "")
    assert taken() is None
    assert "data.cache_dir=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("attention=none attention.score.dim=3", "attention.score.dim: not a key of the chosen attention.score"),
        ("attention=none attention/score=dot", "attention/score: the chosen attention has no score; choose another"),
        ("optimizer.lr=1,2", "optimizer.lr=1,2: for a list give 'optimizer.lr=[1,2]'; for a sweep add -m"),
        ("experiment=multi30k_en_de_best search=greedy search.beam_size=3", "search.beam_size: unknown key"),
        ("seed=${x}", "seed: Interpolation key 'x' not found"),
        (".", ".: expected KEY=VALUE or GROUP=CHOICE; write run=."),
        ("seed =3", "write no spaces around ="),
        ("data.train=a^b", "data.train=a^b: cannot be parsed (token recognition error at: '^'); write no spaces"),
        ("--verison", "--verison; did you mean '--version'"),
        ("attention.score=dot", "set its values one by one: attention.score.KEY=VALUE, or choose attention/score="),
        ("run=demo optimizer.lrr=1", "run=demo: is a file; an archive cannot be resumed, but training.start_from="),
        ("evaluate: hydra.run.dir=b run=a", "hydra.run.dir=b: of Hydra's keys, nmt-evaluate takes only hydra.searchp"),
        ("compare: -m runs=a", "unrecognized arguments: -m"),
        ("hydra.run.dir=~nouser/x", "~nouser/x: there is no such home directory"),
        ("training={max_epoch:3}", "training.max_epoch: unknown key; did you mean 'training.max_epochs'"),
        ("tokenizer=sides tokenizer.vocab_size=500", "did you mean 'tokenizer.source.vocab_size' or 'tokenizer.target"),
    ],
)
def test_what_would_change_nothing_is_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command, colon, words = arguments.partition(": ")
    command, words = (command, words) if colon else ("train", arguments)
    parts = [words] if " =" in words else words.split()
    monkeypatch.setattr(sys, "argv", [f"nmt-{command}", *parts])  # messages quote the arguments
    assert taken(*parts, command=command) is None
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[0]
    assert all(line.startswith(f"nmt-{command}: error: ") and len(line) < 600 for line in lines)
    assert not list(tmp_path.iterdir())


def own(kind: str, name: str, text: str) -> list[str]:
    """Write a file of configuration into the user's folder, and return the arguments that choose it."""
    (Path("cfg") / kind).mkdir(parents=True)
    (Path("cfg") / kind / f"{name}.yaml").write_text(text)
    return ["--config-dir=cfg", f"{kind}={name}"]


def test_a_recipe_without_its_first_line_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert taken(*own("experiment", "mine", "encoder: {layers: 2}\n")) is None
    assert "a recipe's file must begin with: # @package _global_" in capsys.readouterr().err


ODD = ["", "null", "true", "-1", "7", "0.1", "1e400", "9" * 5000, "[1,2]", "[a", "{a:1}", "{kind:none}", "${seed}"]
ODD += ["a b", "'a b'", "'\n'", "\udcff", "???", "1,2", "choice(1,2)", "x" * 50_000, "[" * 2000, "../x", "2026-01-31"]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 9))])
def test_any_value_of_any_key_is_used_or_refused(seed: int) -> None:
    draw = random.Random(seed)
    # Only size=auto reads its thresholds, and a configuration has no section of Hydra.
    keys = [key for key in known_keys("train") if not key.startswith(("size.thresholds", "hydra"))]
    for _ in range(12):
        key, value = draw.choice(keys), draw.choice(ODD)
        word = f"{draw.choice(('', '', '', '+', '++'))}{key}={value}"
        try:
            config = compose("train", TrainConfig, ["size=small", word])
        except UserError:
            continue
        wanted = OverridesParser.create().parse_override(word).value()
        if "." in key and "$" not in value and not isinstance(wanted, dict):
            used = reduce(getattr, key.split("."), config)
            assert used in (wanted, [wanted]) or str(used) == str(wanted), word


def test_composition_leaves_no_state_behind() -> None:
    HydraConfig.instance().cfg = None
    first = new_run(["seed=7", "attention=luong_dot"])
    assert (first.config.seed, first.choices["attention"], first.choices["size"]) == (7, "luong_dot", "demo")
    assert compose("train", TrainConfig, []).seed == 1
    assert not GlobalHydra.instance().is_initialized()
    assert not HydraConfig.initialized()


def test_options_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_arguments("train", ["seed=1,2", "-m", "data=demo"])
    assert (options.multirun, options.overrides) == (True, ["seed=1,2", "data=demo"])
    with pytest.raises(SystemExit):
        run_command("train", lambda _: None, ["data=demo", "--version"])
    assert capsys.readouterr().out == f"nmt {version(DISTRIBUTION)} (Hydra {version('hydra-core')})\n"


# size=auto: the size of the corpus chooses, unless the command line names a size.


def sized(pairs: int, *given: str) -> RunRequest:
    """Compose nmt-train's configuration for a corpus of `pairs` pairs."""
    for language in ("en", "de"):
        Path(f"corpus.{language}").write_text("a\n" * pairs, encoding="utf-8")
    return new_run(["data=files", "data.train=corpus", "data.validation=corpus", *given])


@pytest.mark.parametrize("size", THRESHOLDS)
def test_the_corpus_chooses_the_size(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    least = THRESHOLDS[size]
    if least > 200_000:  # without writing a large file
        monkeypatch.setattr("nmt.data.corpus.count_pairs", lambda _: least)
    request = sized(max(1, min(least, 200_000)))
    assert request.choices["size"] == size
    assert request.config == sized(1, f"size={size}").config


def test_where_a_size_begins_is_a_value_like_others() -> None:
    request = sized(5, "size.thresholds.base=5")
    assert request.choices["size"] == "base"
    assert request.config == sized(5, "size=base").config
    option, recipe = own("experiment", "mine", "# @package _global_\nsize: {thresholds: {base: 5}}\n")
    assert sized(5, *parse_arguments("train", [option, recipe]).overrides).config == request.config
    with pytest.raises(UserError, match="no size begins at or below 5 training pairs; set one to 0"):
        sized(5, "size.thresholds.small=9")
