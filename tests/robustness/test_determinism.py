"""Equal seeds and equal numbers of threads give equal bits, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY

from nmt.model.checkpoints import read_checkpoint

pytestmark = pytest.mark.system
TIMES = ("time", "tokens_per_second", "seconds")
SMALL = [
    *TINY,
    *("training.max_steps=5", "validation.unit=steps", "validation.every=3", "training.log_every=1"),
    *("data.train_size=200", "data.validation_size=6", "data.test_size=4", "tokenizer.vocab_size=300"),
]
CONFIGURATIONS = {
    "bahdanau": ["attention=bahdanau", "encoder.dropout=0.3", "embedding.word_dropout=0.1", "training.ema_decay=0.9"],
    "luong_local_p": ["attention=luong_local_p", "encoder=lstm", "decoder=lstm"],
    "hard": ["attention=hard", "tokenizer.sampling=0.1"],
    "scheduled sampling": ["training.scheduled_sampling=0.5", "training.scheduled_sampling_steps=1"],
    "r_drop": ["training.r_drop=1", "training.accumulate=2"],
    "search by sampling": ["search=sampling"],
}
EVERY = [pytest.param(name, threads, marks=pytest.mark.slow) for name in CONFIGURATIONS for threads in (1, 2)]


def outcome(home: Path, name: str, threads: int) -> dict[str, object]:
    """All that a run leaves but for times, trained in a process with its own hash seed."""
    given = {word.partition("=")[0]: word for word in [*SMALL, *CONFIGURATIONS[name], f"threads={threads}"]}
    if "search=sampling" in given.values():
        del given["search.beam_size"]
    subprocess.run(
        [Path(sys.executable).parent / "nmt-train", *given.values(), f"hydra.run.dir={home}"],
        # Passive: two threads that spin while they wait stand still on a machine that is busy otherwise.
        env=os.environ | {"PYTHONHASHSEED": "random", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        check=True,
        timeout=240,
    )
    lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    state = torch.load(home / "checkpoints" / "last.pt", weights_only=True)
    for timed in ("spent", "window"):
        del state[timed]
    texts = [path for folder in ("hypotheses", "alignments", "data") for path in (home / folder).glob("*.*")]
    return {
        "state": state,
        "best": read_checkpoint(home / "checkpoints" / "best.safetensors"),
        "metrics": [{key: line[key] for key in line if not key.endswith(TIMES)} for line in lines],
        "texts": {path.name: path.read_bytes() for path in texts},
        "tokenizer": (home / "tokenizer.model").read_bytes(),
    }


def differing(one: object, other: object, place: str = "") -> list[str]:
    """Where two outcomes are not the same to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(bits(one), bits(other)) else [place]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differing(one[key], other[key], f"{place}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in differing(*pair, f"{place}/{index}")]
    return [] if type(one) is type(other) and repr(one) == repr(other) else [place]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize(("name", "threads"), EVERY)
def test_equal_seeds_give_equal_bits(name: str, threads: int, tmp_path: Path) -> None:
    one, other = (outcome(tmp_path / part, name, threads) for part in ("one", "other"))
    assert one["texts"]
    assert one["metrics"]
    assert differing(one, other) == []


@pytest.mark.slow
def test_another_seed_gives_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = outcome(tmp_path / "one", "bahdanau", 1)
    monkeypatch.setitem(CONFIGURATIONS, "bahdanau", [*CONFIGURATIONS["bahdanau"], "seed=2"])
    found = differing(one, outcome(tmp_path / "other", "bahdanau", 1))
    assert any(place.startswith("/state/model") for place in found)
    assert not any(place.startswith("/tokenizer") for place in found)
