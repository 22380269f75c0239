"""Runs that begin with the parameters of another run, also with a changed vocabulary."""

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch
from conftest import TINY, run_config, tiny_config
from fitting import fitted, metrics, state, stopped, weights

from nmt.config.errors import UserError
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.system.run import RunDirectory
from nmt.training.other_runs import origins_of, transfer_weights

SHORT = ["training.max_steps=3", "validation.unit=steps", "validation.every=2"]
STILL = ["optimizer.lr=1e-30", "schedule=constant"]


# The parameters of another run


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("tokenizer.vocab_size=600", *SHORT)
    return fitted(config, tmp_path_factory.mktemp("first"))


def test_its_first_weights_are_the_best_of_the_other_run(first: Path, tmp_path: Path) -> None:
    tokenizer = ["tokenizer=file", f"tokenizer.source_model={first}/tokenizer.model"]
    tiny = [override for override in TINY if not override.startswith("tokenizer.")]
    overrides = [*tiny, *SHORT, *STILL, "data.test_size=100", *tokenizer, f"training.start_from={first}"]
    tuned = fitted(run_config(*overrides), tmp_path / "tuned")
    best = weights(first, "best")
    assert all(torch.allclose(weights(tuned)[name], best[name], atol=1e-9) for name in best | weights(tuned))
    (start,) = json.loads((tuned / "manifest.json").read_text())["starts"]
    assert start["start_from"]["run"] == str(first)
    assert start["start_from"]["system"] == RunDirectory(first).system_digest()
    assert start["start_from"]["step"] == state(first, "best")["step"]


def test_once_it_has_a_checkpoint_it_needs_the_other_run_no_more(first: Path, tmp_path: Path) -> None:
    """The initial parameters stay the best checkpoint until a validation is better."""
    gone = shutil.copytree(first, tmp_path / "gone")
    worse = ["optimizer.lr=1", "schedule=constant", "validation.monitor=loss"]
    config = tiny_config(*SHORT, "tokenizer.vocab_size=600", f"training.start_from={gone}", *worse)
    run = stopped(config, tmp_path / "run", 1)
    shutil.rmtree(gone)
    fitted(config, run)
    best, started = weights(run, "best"), weights(first, "best")
    assert all(torch.equal(best[name], started[name]) for name in best | started)
    losses = [(line["step"], line["validation/loss"]) for line in metrics(run) if "validation/loss" in line]
    assert [step for step, _ in losses] == [0, 2, 3]
    assert losses[1][1] > losses[0][1] + 1


def test_tables_that_differ_cannot_become_one(tmp_path: Path) -> None:
    apart = tiny_config(*SHORT, "embedding.tie_source_target=false", "embedding.tie_output=false")
    run = fitted(apart, tmp_path / "apart")
    differences = (
        "embedding.tie_source_target is False there, True here; embedding.tie_output is False there, True here"
    )
    with pytest.raises(UserError, match=f"its weights do not fit this model .{differences}"):
        fitted(tiny_config(*SHORT, f"training.start_from={run}"), tmp_path / "tied")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "encoder.hidden=8",
            r"^training\.start_from={run}: its weights do not fit this model \(encoder.hidden is 16 there, 8 here\)$",
        ),
        ("decoder.attend=after encoder.cell=lstm", "encoder.cell is gru there, lstm here; decoder.attend is before"),
        ("training.start_from=nowhere", "^training.start_from=nowhere: no such directory"),
        ("training.start_from={young}", "no such checkpoint; a run has one from its first validation on"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run_begins(
    overrides: str, message: str, first: Path, tmp_path: Path
) -> None:
    young = shutil.copytree(first, tmp_path / "young", ignore=shutil.ignore_patterns("checkpoints"))
    start = ["tokenizer.vocab_size=600", f"training.start_from={first}", *overrides.format(young=young).split()]
    with pytest.raises(UserError, match=message.format(run=first)):
        fitted(tiny_config(*SHORT, *start), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


# A changed vocabulary


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


def test_a_run_with_another_tokenizer_starts_from_shared_vectors(first: Path, tmp_path: Path) -> None:
    overrides = [*SHORT, *STILL, "tokenizer.vocab_size=410", "seed=5", f"training.start_from={first}"]
    run = tmp_path / "moved"
    fitted(tiny_config(*overrides), run)
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
