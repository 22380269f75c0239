"""How a run starts: the corpus report, another run's weights, another vocabulary, pretrained word vectors."""

import gzip
import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
from nmt.model.checkpoints import new_model
from nmt.system.run import RunDirectory
from nmt.training.start import corpus_report, load_pretrained, origins_of, round_trip_bleu, transfer_weights
from nmt.training.trainer import make_optimizer

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


def test_a_large_split_costs_no_more_than_a_part_of_it(prepared: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = prepared(["a b c d e f"] * 25)
    decoded = []
    tokenizer = made.tokenizers.target
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(ids) or "a b c d e f")
    settings = ScoreSettings("13a", lowercase=False)
    assert round_trip_bleu(made.splits["validation"], tokenizer, settings, sentences=10) == 100
    assert 5 < len(decoded) <= 10


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
    assert {"<unk>", "<s>", "</s>", "<pad>", "▁the", "▁"} <= {names[token] for token in origins.kept}
    for token, kept in origins.kept.items():
        assert names[token] == before[kept]
    for token, parts in origins.parts.items():
        assert names[token] not in before
        spelled = "".join(before[part] for part in parts)
        assert spelled == "".join(character for character in names[token] if character in before)
    assert origins.parts[names.index("▁houses")] == [before.index("▁house"), before.index("s")]
    assert names.index("ß") not in origins.kept.keys() | origins.parts.keys()
    assert len(origins.kept) + len(origins.parts) + origins.new == new.vocab_size


def test_case_and_bytes(tmp_path: Path) -> None:
    old = tokenizer(tmp_path, ENGLISH, 300, lowercase=True, byte_fallback=True)
    new = tokenizer(tmp_path, OTHER, 46)
    names, before = new.pieces(range(new.vocab_size)), old.pieces(range(old.vocab_size))
    origins = origins_of(new, old)
    assert origins.parts[names.index("ß")] == [before.index("<0xC3>"), before.index("<0x9F>")]
    upper = names.index("▁The")
    assert origins.parts[upper] == [before.index("▁the")]


def test_rows_of_the_tables(tmp_path: Path) -> None:
    old, new = tokenizer(tmp_path, ENGLISH, 40), tokenizer(tmp_path, OTHER, 45)
    before = {"output.weight": torch.randn(40, 3), "output.bias": torch.randn(40), "encoder.w": torch.randn(2, 2)}
    after = {"output.weight": torch.randn(45, 3), "output.bias": torch.randn(45), "encoder.w": torch.randn(2, 2)}
    weights, origins = transfer_weights(before, after, Tokenizers(old, old), Tokenizers(new, new))
    origin = origins["target"]
    assert torch.equal(weights["encoder.w"], before["encoder.w"])
    for name in ("output.weight", "output.bias"):
        for token in range(45):
            row = weights[name][token]
            if token in origin.kept:
                assert torch.equal(row, before[name][origin.kept[token]])
            elif token in origin.parts:
                parts = [before[name][part] for part in origin.parts[token]]
                torch.testing.assert_close(row, sum(parts[1:], parts[0]) / len(parts))
            else:
                assert torch.equal(row, after[name][token])


def test_a_run_with_another_tokenizer_starts_from_shared_vectors(
    first: Path, train_config: Config, tmp_path: Path
) -> None:
    overrides = [*SHORT, *STILL, "tokenizer.vocab_size=410", "seed=5", f"training.start_from={first}"]
    run = tmp_path / "moved"
    fitted(train_config(*overrides), run)
    new, old = (Tokenizer.load(path / "tokenizer.model") for path in (run, first))
    origins = origins_of(new, old)
    moved, old_weights = (weights(path, "best") for path in (run, first))
    assert moved.keys() == old_weights.keys()
    for name in old_weights:
        if name in {"source_embedding.weight", "target_embedding.weight", "output.weight", "output.bias"}:
            assert len(moved[name]) == 410 != len(old_weights[name])
            assert torch.equal(moved[name][list(origins.kept)], old_weights[name][list(origins.kept.values())])
        else:
            assert torch.equal(moved[name], old_weights[name])
    assert len(origins.kept) > 300
    (start,) = json.loads((run / "manifest.json").read_text())["starts"]
    assert start["start_from"]["vocabulary"]["source"] == origins.counts()
    log = (run / "train.log").read_text()
    assert f"another target tokenizer: {origins.describe()}" in log


# Pretrained word vectors.


def words_of(run: Path) -> list[tuple[int, str]]:
    """Tokens of whole words, and the words."""
    own = Tokenizer.load(run / "tokenizer.model")
    pieces = enumerate(own.pieces(range(own.vocab_size)))
    return [(token, piece[1:]) for token, piece in pieces if piece.startswith("▁") and len(piece) > 2]


def text_of(vectors: dict[str, np.ndarray], header: bool) -> str:
    lines = [f"{len(vectors)} 16"] if header else []
    return (
        "\n".join(lines + [f"{word} {' '.join(map(str, vector.tolist()))} " for word, vector in vectors.items()]) + "\n"
    )


def model_of(run: Path, train_config: Config, *overrides: str) -> tuple[torch.nn.Module, Tokenizer]:
    own = Tokenizer.load(run / "tokenizer.model")
    torch.manual_seed(1)
    return new_model(train_config(*overrides), Tokenizers(own, own)), own


@pytest.mark.parametrize(("header", "packed"), [(True, False), (False, False), (True, True)])
def test_words_get_their_vectors(header: bool, packed: bool, first: Path, train_config: Config, tmp_path: Path) -> None:
    known = words_of(first)[::2]
    generator = np.random.default_rng(0)
    vectors = {word: generator.normal(size=16).astype(np.float32) for _, word in known}
    (_, one), (_, two) = [known[-1], words_of(first)[1]]
    last = vectors.popitem()
    vectors[f"{one} {two}"] = np.zeros(16, np.float32)  # a name with a space
    vectors |= [last]
    path = tmp_path / ("vectors.vec.gz" if packed else "vectors.txt")
    repeated = text_of({known[0][1]: np.zeros(16)}, False)
    text = (text_of(vectors, header) + repeated).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    model, own = model_of(first, train_config)
    before = model.source_embedding.weight.clone()
    found = load_pretrained(model, [str(path), None], Tokenizers(own, own))  # type: ignore[arg-type]
    filled = {token for token, _ in known}
    # A word without its case may serve several pieces.
    assert filled <= {t for t in range(len(before)) if not torch.equal(before[t], model.source_embedding.weight[t])}
    for token, word in known:
        np.testing.assert_allclose(model.source_embedding.weight[token].detach().numpy(), vectors[word], rtol=1e-6)
    assert found["source"].pieces >= len(known)
    unchanged = {token for token, _ in words_of(first)[1::2]} - {
        token for token, word in words_of(first) if word.lower() in vectors
    }
    assert unchanged
    assert all(torch.equal(before[token], model.source_embedding.weight[token]) for token in unchanged)


def test_of_a_shared_table_the_target_fills_what_is_left(first: Path, train_config: Config, tmp_path: Path) -> None:
    (token, one), (other, two) = [(token, word) for token, word in words_of(first) if word.islower()][:2]
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text(text_of({one: np.full(16, 1.0)}, False))
    target.write_text(text_of({one: np.full(16, 2.0), two: np.full(16, 3.0)}, False))
    model, own = model_of(first, train_config, "embedding.tie_source_target=true")
    load_pretrained(model, [str(source), str(target)], Tokenizers(own, own))  # type: ignore[arg-type]
    table = model.target_embedding.weight
    assert table[token].tolist() == [1.0] * 16
    assert table[other].tolist() == [3.0] * 16


def test_frozen_embeddings_stay_as_they_start(first: Path, train_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_text(text_of({word: np.full(16, 0.1) for _, word in words_of(first)}, False))
    options = ["tokenizer.vocab_size=600", *SHORT, f"embedding.pretrained={path}", "optimizer=adamw"]
    options += ["optimizer.weight_decay=0.1", "optimizer.lr=0.1", "schedule=constant"]
    tables = {}
    for frozen in ("false", "true"):
        fitted(train_config(*options, f"embedding.frozen={frozen}"), tmp_path / frozen)
        tables[frozen] = weights(tmp_path / frozen)["source_embedding.weight"]
    frozen_model, _ = model_of(first, train_config, f"embedding.pretrained={path}", "embedding.frozen=true")
    groups = make_optimizer(train_config().optimizer, frozen_model).param_groups
    assert not any(p is frozen_model.source_embedding.weight for group in groups for p in group["params"])
    token = words_of(first)[0][0]
    assert tables["true"][token].tolist() == pytest.approx([0.1] * 16)
    assert (tables["false"][token] - 0.1).abs().max() > 0.01
    (start,) = json.loads((tmp_path / "true" / "manifest.json").read_text())["starts"]
    assert start["pretrained"]["source"]["pieces"] >= len(words_of(first))
    assert f"pieces of the source vocabulary have a vector in {path}" in (tmp_path / "true" / "train.log").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 2 3\n", "has vectors of 3 numbers, but embedding.dim=16; set embedding.dim=3 "),
        ("5 300\nthe 1\n", "has vectors of 300 numbers"),
        (b"\xff\xfe\x00\x01 binary", "line 1: is not a text file of vectors"),
        ("", "no piece of the source vocabulary has a vector in"),
        ("9 16\nzzzz " + "1 " * 16 + "\n", "no piece of the source vocabulary has a vector in"),
        ("2 16\nzz " + "1 " * 16 + "\n{word} 1 nan" + " 1" * 14 + "\n", "line 3: expected a word and 16 numbers"),
        ("2 16\n{word} 1 2 x" + " 1" * 13 + "\n", "line 2: expected a word and 16 numbers"),
    ],
)
def test_files_that_do_not_fit(
    text: str | bytes, message: str, first: Path, train_config: Config, tmp_path: Path
) -> None:
    word = words_of(first)[0][1]
    path = tmp_path / "v.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.replace("{word}", word).encode())
    with pytest.raises(UserError, match=message) as error:
        fitted(train_config("tokenizer.vocab_size=600", *SHORT, f"embedding.pretrained={path}"), tmp_path / "new")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(train_config: Config, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"5 16\n" * 10_000)[:-20])
    damaged = tmp_path / "damaged.gz"
    content = bytearray(gzip.compress(b"5 16\n" + bytes(range(256)) * 100))
    content[20:40] = b"\xff" * 20
    damaged.write_bytes(content)
    unreadable = ((tmp_path / "none", "No such file"), (cut, "end-of-stream marker"), (damaged, "decompressing"))
    for path, message in unreadable:
        with pytest.raises(UserError, match=f"embedding.pretrained={path}: cannot be read .*{message}"):
            fitted(train_config(*SHORT, f"embedding.pretrained={path}"), tmp_path / "new")


def test_what_makes_no_sense_is_refused(train_config: Config) -> None:
    with pytest.raises(UserError, match=r"embedding\.frozen=true needs trained embeddings"):
        train_config("embedding.frozen=true")
    for given in (["[null,null]"], ["[a,null]", "embedding.tie_source_target=false"]):
        with pytest.raises(UserError, match=r"embedding\.frozen=true needs trained embeddings"):
            train_config("embedding.frozen=true", f"embedding.pretrained={given[0]}", *given[1:])
    train_config("embedding.frozen=true", "embedding.pretrained=[a,null]")  # both languages share the table
    with pytest.raises(UserError, match="leave one of the two out"):
        train_config("embedding.pretrained=a", "training.start_from=b")
    paths = train_config("embedding.pretrained=[a,null]").with_absolute_paths().embedding.pretrained
    assert paths == [str(Path.cwd() / "a"), None]
