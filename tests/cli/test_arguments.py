"""Values that are easily lost: each is used, or refused by its name."""

import os
import sys
from functools import reduce
from importlib.metadata import version
from pathlib import Path

import pytest
import quick_hydra
from hydra._internal.hydra import Hydra

from nmt.cli import app, arguments
from nmt.config.errors import UserError
from nmt.config.schema import CompareConfig, EvaluateConfig, ExportConfig, ServeConfig, TrainConfig, TranslateConfig

SCHEMAS = {"train": TrainConfig, "evaluate": EvaluateConfig, "translate": TranslateConfig, "compare": CompareConfig}
SCHEMAS |= {"export": ExportConfig, "serve": ServeConfig}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.setattr(Hydra, "get_mode", quick_hydra.mode)


def taken(monkeypatch: pytest.MonkeyPatch, *given: str, command: str = "train") -> TrainConfig | None:
    """What the command would work with; None if it refuses."""
    found: list[TrainConfig] = []
    monkeypatch.setattr(sys, "argv", [f"nmt-{command}", *given])
    os.environ["HYDRA_FULL_ERROR"] = ""
    with pytest.raises(SystemExit) as exit_:
        app.run_command(command, SCHEMAS[command], lambda config, _: found.append(config))  # type: ignore[arg-type, type-var]
    assert exit_.value.code in {0, 2}
    return found[0] if exit_.value.code == 0 else None


def test_of_two_values_the_last_counts_and_the_other_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = taken(monkeypatch, "encoder=lstm", "encoder.hidden=3", "encoder.hidden=5", "encoder=gru")
    assert config is not None
    assert (config.encoder.hidden, config.encoder.cell) == (5, "gru")
    assert capsys.readouterr().err.splitlines() == [
        "encoder.hidden=3: overridden by the later encoder.hidden=5",
        "encoder=lstm: overridden by the later encoder=gru",
    ]


def test_a_value_stays_whatever_is_chosen_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = taken(monkeypatch, "encoder.hidden=3", "decoder.attend=after", "encoder=lstm", "attention=bahdanau")
    assert config is not None
    assert (config.encoder.hidden, config.encoder.cell, config.decoder.attend) == (3, "lstm", "after")


def test_a_value_may_refer_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    config = taken(monkeypatch, "encoder.hidden=${decoder.hidden}", "decoder.hidden=24")
    assert config is not None
    assert config.encoder.hidden == 24


@pytest.mark.parametrize(
    ("word", "value"),
    [("run=a/b", "a/b"), ("run='a=b'", "a=b"), ('run="it\'s"', "it's"), ("run=a=b", "a=b"), ("run=", "")],
)
def test_the_value_of_a_word(word: str, value: str) -> None:
    assert arguments.value_of(word) == value


NUMBERS = ["2024_01_15", "3_3", "1e5", "-5", "1.0", "nan", "inf", "true", "False"]  # text that Hydra reads otherwise


@pytest.mark.parametrize("text", NUMBERS)
@pytest.mark.parametrize(
    ("command", "key", "others"),
    [
        ("train", "data.source_lang", []),
        ("train", "data.train", ["data=files", "data.validation=b"]),
        ("train", "tokenizer.source_model", ["tokenizer=file"]),
        ("train", "training.start_from", []),
        ("evaluate", "output", ["run=a"]),
        ("translate", "references", ["run=a"]),
        ("translate", "shortlist", ["run=a"]),
        ("translate", "target_lang", ["run=a"]),
        ("export", "output", ["run=a"]),
        ("compare", "baseline", ["runs=a"]),
    ],
)
def test_paths_and_names_arrive_as_typed(
    text: str, command: str, key: str, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if key == "data.source_lang":
        others = ["data=files", "data.train=a", "data.validation=b"]
    config = taken(
        monkeypatch, *others, f"{key}={text}", *(["size=small"] if command == "train" else []), command=command
    )
    assert config is not None
    value = reduce(getattr, key.split("."), config)
    assert value in (text, [text])


def test_elements_of_lists_and_sweeps_arrive_as_typed() -> None:
    keys = {"runs", "data.target_lang"}
    assert arguments.as_typed("runs=[2024_01,'1_0',a/b]", keys) == "runs=['2024_01','1_0',a/b]"
    assert arguments.as_typed("data.target_lang=nan,de", keys) == "data.target_lang='nan',de"
    assert arguments.as_typed("seed=1_0", keys) == "seed=1_0"
    assert arguments.as_typed("runs=${x}_1", keys) == "runs=${x}_1"


def test_the_run_directory_is_named_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    monkeypatch.setattr(arguments, "new_folders", lambda words: folders.extend(words) or [])
    taken(monkeypatch, "hydra.run.dir=2024_01_15", "size=small")
    assert "hydra.run.dir='2024_01_15'" in folders
    assert arguments.value_of("hydra.run.dir=2024_01_15") == "2024_01_15"


def test_new_folders_are_those_of_the_value_without_its_quotes() -> None:
    Path("there").mkdir()
    assert arguments.new_folders(["hydra.run.dir='there/x=1/y'"]) == [Path("there/x=1/y"), Path("there/x=1")]


def test_home_is_put_in_as_hydra_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/müller (2)")
    (word,) = arguments._parsed([arguments.with_home("data.train=~/corpus/train")])
    assert word.value() == "/home/müller (2)/corpus/train"
    assert arguments.with_home("data.train=corpus~/train") == "data.train=corpus~/train"
    monkeypatch.setenv("HOME", "/home/ada")
    assert arguments.with_home("data.train=~/a,b") == "data.train=/home/ada/a,b"


def test_what_an_experiment_sets_of_another_choice_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = taken(monkeypatch, "experiment=multi30k_en_de_best", "search=greedy", "search.max_length=9")
    assert config is not None
    assert config.search.model_dump().keys() & {"beam_size", "max_length"} == {"max_length"}
    assert capsys.readouterr().err == "search.beam_size=12: ignored, not a value of search=greedy\n"


def test_what_a_corpus_sets_of_another_tokenizer_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["data=multi30k_lc_tok", "data.path=FOLDER", "tokenizer=file", "tokenizer.source_model=MODEL"]
    config = taken(monkeypatch, *own, "size=small")
    assert config is not None
    assert (config.tokenizer.kind, config.evaluation.tokenize) == ("file", "none")
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "tokenizer.normalization=identity: ignored, not a value of tokenizer=file",
        "tokenizer.split_punctuation=false: ignored, not a value of tokenizer=file",
    ]


@pytest.mark.parametrize(
    "given",
    [
        ["experiment=multi30k_en_de_best", "search=greedy", "search.beam_size=3"],
        ["search=greedy", "+search.beam_size=3"],
        ["search=greedy", "+search.beem_size=3"],
    ],
)
def test_a_value_of_another_choice_is_refused_where_the_user_gives_it(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken(monkeypatch, *given) is None
    error = capsys.readouterr().err
    assert error.startswith(f"nmt-train: error: {given[-1].lstrip('+').partition('=')[0]}: unknown key")


@pytest.mark.parametrize("run", ["null", "[]", "{}"])
def test_no_place_is_refused_as_run(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken(monkeypatch, f"run={run}", command="evaluate") is None
    assert "nmt-evaluate: error: run" in capsys.readouterr().err


def test_the_environment_says_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NMT_CACHE", "123")
    config = taken(monkeypatch)
    assert config is not None
    assert config.data.cache_dir == "123"
    monkeypatch.setenv("NMT_CACHE", "")
    assert taken(monkeypatch) is None
    assert "data.cache_dir=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["Encoder.hidden=3"], "Encoder.hidden: unknown key; did you mean 'encoder.hidden'?"),
        (["ENCODER=gru"], "ENCODER: unknown key"),
        (["attention=none", "attention.score.dim=3"], "attention.score.dim: not a key of the chosen attention"),
        (["attention=none", "attention/score=dot"], "attention/score"),
        (["tokenizer=file", "tokenizer.vocab_size=99"], "tokenizer.vocab_size: not a key of the chosen tokenizer"),
        (["search=greedy", "search.beam_size=3"], "search.beam_size: not a key of the chosen search"),
        (["decoder.lexical=yes"], "decoder.lexical=yes: input should be true or false"),
        (["encoder.residual=yes"], "encoder.residual=yes: input should be true, false or the number of a layer from 2"),
        (["encoder.bidirectional=yes"], "encoder.bidirectional=yes: not one of true, false, first"),
        (["training=3"], "training=3: is a section; set its values one by one: training.KEY=VALUE"),
        (["search.length_penalty=1.0"], "not one of none, average, gnmt; its exponent is search.alpha"),
        (["device=gpu"], "device=gpu: not one of auto, cpu, cuda, mps; did you mean 'cuda'?"),
        (["batch_size=32"], "batch_size: unknown key; did you mean 'training.batch_sentences'?"),
        (["lr=1"], "lr: unknown key; did you mean 'optimizer.lr'?"),
        (["+training.batch_size=32"], "training.batch_size: unknown key; did you mean 'batch_sentences'?"),
        (["out_dir=x"], "out_dir: unknown key; did you mean 'hydra.run.dir'?"),
        (["data.train=x"], "not a key of the chosen data; available with data=files"),
        (["seed=010"], "seed=010: input should be a valid integer"),
        (["encoder.hidden=1000000000"], "encoder.hidden=1000000000: input should be less than or equal to 16384"),
        (["optimizer.lr=1e308"], "optimizer.lr=1e+308"),
        (["training.start_from='a\nb'"], "training.start_from"),
        (["seed=${x}"], "seed: Interpolation key 'x' not found"),
        (["seed=${seed}"], "seed: Recursive interpolation"),
        (["encoder=../train"], "encoder=../train: not one of gru, lstm, rnn"),
        (["hydra.searchpath=[file:///nope]"], "hydra.searchpath"),
    ],
)
def test_what_would_change_nothing_is_refused(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert taken(monkeypatch, *given) is None
    told = capsys.readouterr().err.splitlines()
    assert message in told[0]
    assert all(line.startswith("nmt-train: error: ") for line in told)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("train", ["seed"], "seed: expected KEY=VALUE or GROUP=CHOICE"),
        ("train", ["=3"], "=3: has no key before the ="),
        ("train", ["seed = 3"], "seed = 3: cannot be parsed .*; write no spaces around ="),
        ("train", ["seed =3"], "write no spaces around ="),
        (
            "train",
            ["data.train=a^b"],
            r"data.train=a\^b: cannot be parsed \('\^' is unexpected\); quote values with characters other",
        ),
        ("train", ["data.train=ü"], r"cannot be parsed \('ü' is unexpected\)"),
        ("train", ["data.train=a=b"], r"cannot be parsed \('=' is unexpected\)"),
        ("train", ["data.train='a"], r"cannot be parsed \(unbalanced '\)"),
        ("train", ["data.train=[a"], r"cannot be parsed \(unbalanced \[\]\)"),
        ("train", ["data.train=a=b"], r"as in \"key='a=b'\""),
        ("train", [f"seed={'9' * 5000}"], r"seed=999+ \.\.\. 9+: cannot be parsed"),
        ("train", [f"data.train={'x' * 1_000_000}"], r"data.train=x+ \.\.\. x+: has 1,000,011 characters"),
        ("train", [f"seed={'[' * 100}"], "nests brackets deeper than"),
        ("train", ["data.train=\udcff"], "control characters or bytes that are not UTF-8"),
        ("train", ["-m", "seed=range(1,100000000)"], "makes more than 10,000 jobs"),
        ("train", ["-m", "seed=range(0,1000)", "encoder.hidden=range(1,1000)"], "makes more than 10,000 jobs"),
        ("train", ["-m", "seed=range(0,1,0)"], "never ends with a step of 0"),
        ("train", ["data=files", "-m", "seed=1,2"], "seed=1,2: comes after an option; options such as -m come first"),
        ("train", ["data=files", "-m", "--ifno"], "--ifno; did you mean '--info'"),
        ("train", ["--ifno"], "--ifno; did you mean '--info'"),
        ("train", ["--experimental-rerun=x"], "run=DIR"),
        ("train", ["hydra.output_subdir=x"], "hydra.output_subdir=x: a run writes its own config.yaml"),
        (
            "train",
            ["attention.score=dot"],
            "attention.score=dot: a choice sets several values; write attention/score=dot",
        ),
        ("train", ["+optimizer.kind=sgd"], "optimizer.kind=sgd: .* write optimizer=sgd$"),
        ("train", ["-m", "optimizer.kind=adam,sgd"], "write optimizer=adam,sgd$"),
        ("train", ["attention.kind=attention"], "write attention=CHOICE, one of bahdanau, chorowski, "),
        ("train", ["encoder.self_attention=attention"], "write encoder/self_attention=attention$"),
        (
            "train",
            ["encoder.self_attention.score.kind=dot"],
            "write attention/score@encoder.self_attention.score=dot$",
        ),
        ("evaluate", ["search=-0.0"], "search=-0.0: not one of as_trained, beam, greedy, mbr, sampling"),
        ("train", ["encoder=../train"], "encoder=../train: not one of gru, lstm, rnn"),
        ("train", ["hydra.job.num=3"], "hydra.job.num=3: Hydra sets this itself"),
        ("train", ["run=a", "hydra.run.dir=b"], "hydra.run.dir=b: run= resumes in the run's own directory"),
        ("evaluate", ["hydra.run.dir=b"], "hydra.run.dir=b: is for nmt-train only; output= sets"),
        ("translate", ["hydra.sweep.dir=b"], "hydra.sweep.dir=b: is for nmt-train"),
        ("translate", ["-m", "run=a"], "-m: is for nmt-train"),
        ("compare", ["-m", "runs=a"], "-m: .*one comparison takes all runs"),
    ],
)
def test_words_that_cannot_be_meant(command: str, given: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        arguments.check(given, command)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments.check(["--version"], "train")
    assert capsys.readouterr().out == f"nmt {version('nmt')} (Hydra {version('hydra-core')})\n"


def test_words_that_are_fine() -> None:
    arguments.check(["search.kind=greedy"], "translate")
    arguments.check(["attention.score={dim:3}", "~attention.score.dim", "+encoder.self_attention.score.dim=3"], "train")
    runs = ",".join(f"outputs/sweep/2026-11-21/13-45-00-000000/attention-bahdanau_seed-{n}" for n in range(200))
    arguments.check([f"runs=[{runs}]"], "compare")
    arguments.check(["-m", "seed=1,2,3", "encoder.hidden=range(8,64,8)", "attention=glob(*)"], "train")
    arguments.check(["-m", "optimizer.lr=tag(log,interval(0.001,0.01))"], "train")


def test_a_search_draws_from_its_ranges_and_does_not_list_them() -> None:
    ranges = ["seed=range(1,300)", "encoder.hidden=range(8,400)"]
    arguments.check(["-m", "hydra/sweeper=optuna", *ranges], "train")
    with pytest.raises(UserError, match=r"makes more than 10,000 jobs in one sweep"):
        arguments.check(["-m", *ranges], "train")


def test_a_new_folder_of_a_refused_run_is_taken_away_and_an_old_one_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    assert taken(monkeypatch, "hydra.run.dir=old/new/newer", "seed=-1") is None
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
    assert taken(monkeypatch, "hydra.run.dir=old", "seed=-1") is None
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
