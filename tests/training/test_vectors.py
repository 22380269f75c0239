"""Pretrained word vectors as initial embeddings."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, values_of

from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.model.checkpoints import LAST, new_model
from nmt.training import checkpoint
from nmt.training.job import train
from nmt.training.optimizer import make_optimizer
from nmt.training.vectors import _read, load_pretrained

Config = Callable[..., TrainConfig]
SHORT = ["training.max_steps=2", "validation.unit=steps", "validation.every=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    assert train(validated(TrainConfig, values_of("train", [*TINY, "tokenizer.vocab_size=600", *SHORT])), path, []) == 0
    return path


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
def test_words_get_their_vectors(header: bool, packed: bool, run: Path, train_config: Config, tmp_path: Path) -> None:
    known = words_of(run)[::2]
    generator = np.random.default_rng(0)
    vectors = {word: generator.normal(size=16).astype(np.float32) for _, word in known}
    (_, one), (_, two) = [known[-1], words_of(run)[1]]
    last = vectors.popitem()
    vectors[f"{one} {two}"] = np.zeros(16, np.float32)  # a name with a space
    vectors |= [last]
    path = tmp_path / ("vectors.vec.gz" if packed else "vectors.txt")
    repeated = text_of({known[0][1]: np.zeros(16)}, False)
    text = (text_of(vectors, header) + repeated).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    model, own = model_of(run, train_config)
    before = model.source_embedding.weight.clone()
    found = load_pretrained(model, [str(path), None], Tokenizers(own, own))  # type: ignore[arg-type]
    filled = {token for token, _ in known}
    # A word without its case may serve several pieces.
    assert filled <= {t for t in range(len(before)) if not torch.equal(before[t], model.source_embedding.weight[t])}
    for token, word in known:
        np.testing.assert_allclose(model.source_embedding.weight[token].detach().numpy(), vectors[word], rtol=1e-6)
    assert found["source"].pieces >= len(known)
    unchanged = {token for token, _ in words_of(run)[1::2]} - {
        token for token, word in words_of(run) if word.lower() in vectors
    }
    assert unchanged
    assert all(torch.equal(before[token], model.source_embedding.weight[token]) for token in unchanged)


def test_of_a_shared_table_the_target_fills_what_is_left(run: Path, train_config: Config, tmp_path: Path) -> None:
    (first, one), (second, two) = [(token, word) for token, word in words_of(run) if word.islower()][:2]
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text(text_of({one: np.full(16, 1.0)}, False))
    target.write_text(text_of({one: np.full(16, 2.0), two: np.full(16, 3.0)}, False))
    model, own = model_of(run, train_config, "embedding.tie_source_target=true")
    load_pretrained(model, [str(source), str(target)], Tokenizers(own, own))  # type: ignore[arg-type]
    table = model.target_embedding.weight
    assert table[first].tolist() == [1.0] * 16
    assert table[second].tolist() == [3.0] * 16


def test_frozen_embeddings_stay_as_they_start(run: Path, train_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_text(text_of({word: np.full(16, 0.1) for _, word in words_of(run)}, False))
    options = ["tokenizer.vocab_size=600", *SHORT, f"embedding.pretrained={path}", "optimizer=adamw"]
    options += ["optimizer.weight_decay=0.1", "optimizer.lr=0.1", "schedule=constant"]
    weights = {}
    for frozen in ("false", "true"):
        assert train(train_config(*options, f"embedding.frozen={frozen}"), tmp_path / frozen, []) == 0
        weights[frozen] = checkpoint.load(tmp_path / frozen / "checkpoints" / LAST)["model"]["source_embedding.weight"]
    frozen_model, _ = model_of(run, train_config, f"embedding.pretrained={path}", "embedding.frozen=true")
    groups = make_optimizer(train_config().optimizer, frozen_model).param_groups
    assert not any(p is frozen_model.source_embedding.weight for group in groups for p in group["params"])
    token = words_of(run)[0][0]
    assert weights["true"][token].tolist() == pytest.approx([0.1] * 16)
    assert (weights["false"][token] - 0.1).abs().max() > 0.01
    (start,) = json.loads((tmp_path / "true" / "manifest.json").read_text())["starts"]
    assert start["pretrained"]["source"]["pieces"] >= len(words_of(run))
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
    text: str | bytes, message: str, run: Path, train_config: Config, tmp_path: Path
) -> None:
    word = words_of(run)[0][1]
    path = tmp_path / "v.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.replace("{word}", word).encode())
    with pytest.raises(UserError, match=message) as error:
        train(train_config("tokenizer.vocab_size=600", *SHORT, f"embedding.pretrained={path}"), tmp_path / "new", [])
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_number_of_words_is_not_taken_for_a_word(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_text(text_of({"dog": np.full(16, 2.0)}, header=True))
    assert [*_read(str(path), {"dog", "1"}, 16)] == ["dog"]


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
            train(train_config(*SHORT, f"embedding.pretrained={path}"), tmp_path / "new", [])


def test_what_makes_no_sense_is_refused(train_config: Config) -> None:
    with pytest.raises(UserError, match=r"embedding\.frozen=true would keep random embeddings"):
        train_config("embedding.frozen=true")
    for given in (["[null,null]"], ["[a,null]", "embedding.tie_source_target=false"]):
        with pytest.raises(UserError, match=r"embedding\.frozen=true would keep random embeddings"):
            train_config("embedding.frozen=true", f"embedding.pretrained={given[0]}", *given[1:])
    train_config("embedding.frozen=true", "embedding.pretrained=[a,null]")  # both languages share the table
    with pytest.raises(UserError, match="leave one out"):
        train_config("embedding.pretrained=a", "training.start_from=b")
    paths = train_config("embedding.pretrained=[a,null]").with_absolute_paths().embedding.pretrained
    assert paths == [str(Path.cwd() / "a"), None]
