"""A run that starts from a model with another vocabulary."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch
from conftest import TINY, values_of

from nmt.config.compose import validated
from nmt.config.schema import TrainConfig
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.model.checkpoints import BEST, read_checkpoint
from nmt.training.job import train
from nmt.training.transfer import origins_of, transfer_weights

Config = Callable[..., TrainConfig]
SHORT = ["training.max_steps=2", "validation.unit=steps", "validation.every=2"]
STILL = ["optimizer.lr=1e-30", "schedule=constant"]


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


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("first")
    assert train(validated(TrainConfig, values_of("train", [*TINY, *SHORT])), run, []) == 0
    return run


def test_a_run_with_another_tokenizer_starts_from_shared_vectors(
    first: Path, train_config: Config, tmp_path: Path
) -> None:
    overrides = [*SHORT, *STILL, "tokenizer.vocab_size=410", "seed=5", f"training.start_from={first}"]
    run = tmp_path / "moved"
    assert train(train_config(*overrides), run, []) == 0
    new, old = (Tokenizer.load(path / "tokenizer.model") for path in (run, first))
    origins = origins_of(new, old)
    moved, weights = (read_checkpoint(path / "checkpoints" / BEST)["model"] for path in (run, first))
    assert moved.keys() == weights.keys()
    for name in weights:
        if name in {"source_embedding.weight", "target_embedding.weight", "output.weight", "output.bias"}:
            assert len(moved[name]) == 410 != len(weights[name])
            assert torch.equal(moved[name][list(origins.kept)], weights[name][list(origins.kept.values())])
        else:
            assert torch.equal(moved[name], weights[name])
    assert len(origins.kept) > 300
    (start,) = json.loads((run / "manifest.json").read_text())["starts"]
    assert start["start_from"]["vocabulary"]["source"] == origins.counts()
    log = (run / "train.log").read_text()
    assert f"another target tokenizer: {origins.describe()}" in log
