"""How a run starts: the corpus report, the weights of another run, another vocabulary."""

import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch
from conftest import TINY, values_of
from fitting import before_update, fitted, metrics, state, weights

from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.prepare import prepare
from nmt.data.prepared import Prepared
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.evaluate.bleu import ScoreSettings
from nmt.system.run import RunDirectory
from nmt.training.start import corpus_report, origins_of, round_trip_bleu, transfer_weights

Config = Callable[..., TrainConfig]
SHORT = ["training.max_steps=3", "validation.unit=steps", "validation.every=2"]
STILL = ["optimizer.lr=1e-30", "schedule=constant"]


# The corpus report: what the tokenizer loses of the references.

CHINESE = ["\u4f60\u597d\uff0c\u4e16\u754c\uff01", "\u4eca\u5929\uff08\u5468\u4e00\uff09\u4e0d\u6765\uff1f"]
PERSIAN = [
    "\u0645\u06cc\u200c\u0631\u0648\u0645 \u0628\u0647 \u062e\u0627\u0646\u0647 .",
    "\u06a9\u062a\u0627\u0628\u200c\u0647\u0627 \u0628\u0647 \u062e\u0627\u0646\u0647 \u0645\u06cc\u200c\u0631 .",
]
COMPOSED = ["le gar\u00e7on a \u00e9t\u00e9 l\u00e0 .", "il est d\u00e9\u00e7u , \u00e0 No\u00ebl ."]
FRENCH = [unicodedata.normalize("NFD", line) for line in COMPOSED]
LETTERS = ["a b c d e f g h", "A B C D E", "a\x01b c d e f g h"]
Make = Callable[..., tuple[Prepared, TrainConfig]]


@pytest.fixture
def prepared(tmp_path: Path) -> Make:
    """Prepares a corpus whose held-out targets are those of train, or others."""

    def make(targets: list[str], *overrides: str, held_out: list[str] | None = None) -> tuple[Prepared, TrainConfig]:
        for name, lines in (("train", targets), ("valid", held_out or targets)):
            (tmp_path / f"{name}.en").write_text("".join(f"line {n} here\n" for n in range(len(lines))))
            (tmp_path / f"{name}.xx").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        files = [f"data.{key}={tmp_path}/{name}" for key, name in (("train", "train"), ("validation", "valid"))]
        words = ["data=files", "data.target_lang=xx", *files, f"data.cache_dir={tmp_path}/cache", "tokenizer=char"]
        config = validated(TrainConfig, values_of("train", [*words, *overrides]))
        return prepare(config.data, config.tokenizer), config

    return make


@pytest.mark.parametrize(
    ("targets", "tokenize"), [(CHINESE, "zh"), (PERSIAN, "13a"), (FRENCH, "13a")], ids=["Chinese", "Persian", "NFD"]
)
def test_references_come_back_whole(targets: list[str], tokenize: str, prepared: Make) -> None:
    made, config = prepared(targets)
    report = corpus_report(made, config, ScoreSettings(tokenize, lowercase=False))
    assert report["splits"]["validation"]["round_trip_bleu"] == 100
    assert "round_trip_bleu" not in report["splits"]["train"]
    assert not [warning for warning in report["warnings"] if "themselves" in warning]


@pytest.mark.parametrize(
    ("overrides", "targets", "held_out", "remedy"),
    [
        (["tokenizer.normalization=nmt_nfkc"], PERSIAN, PERSIAN, "tokenizer.normalization=nfc"),
        (["tokenizer.lowercase=true"], LETTERS, LETTERS[1:2], "evaluation.lowercase=true"),
        ([], LETTERS, ["\u4e16 b \u754c d e"], "tokenizer.byte_fallback=true"),
        ([], LETTERS, LETTERS[2:], "tokenizer.normalization=identity"),
    ],
)
def test_what_is_lost_is_said_with_the_remedy(
    overrides: list[str], targets: list[str], held_out: list[str], remedy: str, prepared: Make
) -> None:
    overrides = ["evaluation.lowercase=false", *overrides]
    made, config = prepared(targets, *overrides, held_out=held_out)
    report = corpus_report(made, config, ScoreSettings("13a", config.evaluation.lowercase))
    bleu = report["splits"]["validation"]["round_trip_bleu"]
    (warning,) = [warning for warning in report["warnings"] if "themselves" in warning]
    assert warning.startswith(f"validation: the references have BLEU {bleu:.2f} against themselves")
    assert warning.endswith(f"; try {remedy}")
    better, config = prepared(targets, *overrides, remedy, held_out=held_out)
    report = corpus_report(better, config, ScoreSettings("13a", config.evaluation.lowercase))
    assert report["splits"]["validation"]["round_trip_bleu"] == pytest.approx(100)


def test_of_a_large_split_a_part_is_enough(prepared: Make) -> None:
    """Every third sentence loses its character in the tokenizer, and one of three is looked at."""
    made, _ = prepared(["a b c d e f"], held_out=["a b c d e f", "\u4e16 \u754c b c d e"] * 6)
    settings, tokenizer = ScoreSettings("13a", lowercase=False), made.tokenizers.target
    assert round_trip_bleu(made.splits["validation"], tokenizer, settings, sentences=6) == 100
    assert round_trip_bleu(made.splits["validation"], tokenizer, settings) < 100


# Another run's weights.


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = validated(TrainConfig, values_of("train", [*TINY, "tokenizer.vocab_size=600", *SHORT]))
    return fitted(config, tmp_path_factory.mktemp("first"))


def test_its_first_weights_are_the_best_of_the_other_run(first: Path, tmp_path: Path) -> None:
    tokenizer = ["tokenizer=file", f"tokenizer.source_model={first}/tokenizer.model"]
    tiny = [override for override in TINY if not override.startswith("tokenizer.")]
    overrides = [*tiny, *SHORT, *STILL, "data.seed=7", *tokenizer, f"training.start_from={first}"]
    tuned = fitted(validated(TrainConfig, values_of("train", overrides)), tmp_path / "tuned")
    best = weights(first, "best")
    assert all(torch.allclose(weights(tuned)[name], best[name], atol=1e-9) for name in best | weights(tuned))
    (start,) = json.loads((tuned / "manifest.json").read_text())["starts"]
    assert start["start_from"]["run"] == str(first)
    assert start["start_from"]["system"] == RunDirectory(first).system_digest()
    assert start["start_from"]["step"] == state(first, "best")["step"]


def kill() -> None:
    raise KeyboardInterrupt


def test_once_it_has_a_checkpoint_it_needs_the_other_run_no_more(
    first: Path, train_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the initial weights stay the best until there are better ones."""
    gone = shutil.copytree(first, tmp_path / "gone")
    worse = ["optimizer.lr=1", "schedule=constant", "validation.monitor=loss"]
    config = train_config(*SHORT, "tokenizer.vocab_size=600", f"training.start_from={gone}", *worse)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        before_update(patch, 1, kill)
        with pytest.raises(KeyboardInterrupt):
            fitted(config, run)
    assert state(run)["logged_step"] == 0  # which need not be logged again
    shutil.rmtree(gone)
    fitted(config, run)
    best, started = weights(run, "best"), weights(first, "best")
    assert all(torch.equal(best[name], started[name]) for name in best | started)
    losses = [(line["step"], line["validation/loss"]) for line in metrics(run) if "validation/loss" in line]
    assert [step for step, _ in losses] == [0, 2, 3]
    assert losses[1][1] > losses[0][1] + 1


def test_the_saved_path_is_absolute(train_config: Config) -> None:
    settled = train_config("training.start_from=here/it/is").with_absolute_paths()
    assert settled.training.start_from == str(Path.cwd() / "here" / "it" / "is")
    assert train_config("data.extra=[a,/b]").with_absolute_paths().data.extra == [str(Path.cwd() / "a"), "/b"]
    assert train_config().with_absolute_paths().training.start_from is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["encoder.hidden=8"], r"do not fit this model \(encoder.hidden is 16 there, 8 here\)"),
        (
            ["decoder.attend=after", "encoder.cell=lstm"],
            "encoder.cell is gru there, lstm here; decoder.attend is before",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run_begins(
    overrides: list[str], message: str, first: Path, train_config: Config, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message.format(run=first)) as error:
        fitted(
            train_config(*SHORT, "tokenizer.vocab_size=600", *overrides, f"training.start_from={first}"),
            tmp_path / "run",
        )
    assert str(error.value).startswith(f"training.start_from={first}: ")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "run").iterdir())


def test_a_run_without_weights_or_no_run_is_refused(first: Path, train_config: Config, tmp_path: Path) -> None:
    young = shutil.copytree(first, tmp_path / "young")
    shutil.rmtree(young / "checkpoints")
    with pytest.raises(
        UserError, match=r"best\.safetensors: no such checkpoint; has the run reached its first validation"
    ):
        fitted(train_config(f"training.start_from={young}"), tmp_path / "run")
    with pytest.raises(UserError, match=r"training\.start_from=nowhere: no such directory"):
        fitted(train_config("training.start_from=nowhere"), tmp_path / "run")


# Another vocabulary.


def tokenizer(tmp_path: Path, text: str, size: int, lowercase: bool = False, byte_fallback: bool = False) -> Tokenizer:
    prefix = tmp_path / f"{size}"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((text.lower() if lowercase else text).split("\n")),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=size,
        pad_id=3,
        byte_fallback=byte_fallback,
        minloglevel=2,
    )
    return Tokenizer.load(prefix.with_suffix(".model"), lowercase)


ENGLISH = "\n".join(["the house is small", "the horse is in the house", "a mouse has a house"] * 5)
OTHER = "\n".join(["the houses are houses ß", "the horses ran", "The mice"] * 5)


def test_origins_by_hand(tmp_path: Path) -> None:
    old, new = tokenizer(tmp_path, ENGLISH, 40), tokenizer(tmp_path, OTHER, 45)
    origins = origins_of(new, old)
    names, before = new.pieces(range(new.vocab_size)), old.pieces(range(old.vocab_size))
    assert {"<unk>", "<s>", "</s>", "<pad>", "▁the", "▁"} <= {names[token] for token in origins}
    for token, parts in origins.items():
        if names[token] in before:
            assert parts == [before.index(names[token])]
        else:
            known = (character for character in names[token] if character in before)
            assert "".join(before[part] for part in parts) == "".join(known)
    assert origins[names.index("▁houses")] == [before.index("▁house"), before.index("s")]
    assert names.index("ß") not in origins


def test_case_and_bytes(tmp_path: Path) -> None:
    old = tokenizer(tmp_path, ENGLISH, 300, lowercase=True, byte_fallback=True)
    new = tokenizer(tmp_path, OTHER, 46)
    names, before = new.pieces(range(new.vocab_size)), old.pieces(range(old.vocab_size))
    origins = origins_of(new, old)
    assert origins[names.index("ß")] == [before.index("<0xC3>"), before.index("<0x9F>")]
    assert origins[names.index("▁The")] == [before.index("▁the")]


def test_a_token_starts_from_the_mean_of_those_that_spell_it(tmp_path: Path) -> None:
    old, new = tokenizer(tmp_path, ENGLISH, 40), tokenizer(tmp_path, OTHER, 45)
    before = {"output.weight": torch.randn(40, 3), "output.bias": torch.randn(40), "encoder.w": torch.randn(2, 2)}
    after = {"output.weight": torch.randn(45, 3), "output.bias": torch.randn(45), "encoder.w": torch.randn(2, 2)}
    moved, counts = transfer_weights(before, after, Tokenizers(old, old), Tokenizers(new, new))
    origins = origins_of(new, old)
    assert counts == {"source": len(origins), "target": len(origins)}
    assert torch.equal(moved["encoder.w"], before["encoder.w"])
    for name in ("output.weight", "output.bias"):
        for token in range(45):
            parts = [before[name][part] for part in origins.get(token, [])]
            expected = sum(parts[1:], parts[0]) / len(parts) if parts else after[name][token]
            torch.testing.assert_close(moved[name][token], expected)


def test_a_run_with_another_tokenizer_starts_from_shared_vectors(
    first: Path, train_config: Config, tmp_path: Path
) -> None:
    overrides = [*SHORT, *STILL, "tokenizer.vocab_size=410", "seed=5", f"training.start_from={first}"]
    run = tmp_path / "moved"
    fitted(train_config(*overrides), run)
    new, old = (Tokenizer.load(path / "tokenizer.model") for path in (run, first))
    whole = {token: parts[0] for token, parts in origins_of(new, old).items() if len(parts) == 1}
    moved, old_weights = (weights(path, "best") for path in (run, first))
    assert moved.keys() == old_weights.keys()
    for name in old_weights:
        if name in {"source_embedding.weight", "target_embedding.weight", "output.weight", "output.bias"}:
            assert len(moved[name]) == 410 != len(old_weights[name])
            assert torch.equal(moved[name][list(whole)], old_weights[name][list(whole.values())])
        else:
            assert torch.equal(moved[name], old_weights[name])
    log = (run / "train.log").read_text()
    count = len(origins_of(new, old))
    assert f"with another tokenizer: {count} source pieces and {count} target pieces start from its vectors" in log
