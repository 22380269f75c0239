"""The commands on the page of the leaderboard train the models of its rows: they compose the packed configurations."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import values_of
from documents import PRESETS, ROOT, blocks

from nmt.config.checks import flatten

RESULTS = ROOT / "docs" / "results"
FILES = {"data.path", "data.train", "data.validation", "data.test", "data.cache_dir"}  # where a user keeps them


def commands(corpus: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the presets and the other words of each command that trains the runs of a leaderboard."""
    lines = [line for block in blocks(RESULTS / "leaderboard.md") for line in block.lines]
    for line in (line for line in lines if line.startswith("nmt-train experiment=leaderboard ")):
        words = [word for word in shlex.split(line)[1:] if not word.startswith(("hydra.", "seed="))]
        (attention,) = [word for word in words if word.startswith("attention=")]
        names = re.findall(r"\w+", attention)[1:]
        if names[0] == "glob":
            assert attention.startswith("attention=glob(*,exclude=[")
            names = [name for name in PRESETS if name not in names]
        is_readouts = any(word.startswith("decoder.readout=") for word in words)
        of = "multi30k_readouts" if is_readouts else "tatoeba" if "data=files" in words else "multi30k"
        if of == corpus:
            yield names, [word for word in words if word != attention]


def recorded(corpus: str) -> dict[str, list[dict[str, Any]]]:
    """Return the configurations of the packed runs of each preset."""
    configs: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((RESULTS / "leaderboard" / corpus).glob("*.npz")):
        with np.load(file, allow_pickle=False) as arrays:
            record = json.loads(arrays["record"].tobytes())
        preset = record["manifest"]["starts"][0]["choices"]["attention"]
        configs.setdefault(preset, []).append(record["config"])
    return configs


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(("corpus", "runs"), [("multi30k", 84), ("tatoeba", 9), ("multi30k_readouts", 12)])
def test_the_commands_compose_what_was_trained(corpus: str, runs: int) -> None:
    """Keys that a later version added or retired are left out."""
    configs, compared = recorded(corpus), 0
    for names, words in commands(corpus):
        for name in names:
            for config in configs.pop(name):
                readout = [f"decoder.readout={config['decoder']['readout']}"] if corpus == "multi30k_readouts" else []
                kept = [word for word in words if not word.startswith("decoder.readout=")]
                now = dict(flatten(values_of("train", [*kept, *readout, f"attention={name}"])))
                then = dict(flatten(config))
                shared = (now.keys() & then.keys()) - {*FILES, "seed"}
                assert {key: now[key] for key in shared} == {key: then[key] for key in shared}, name
                assert len(shared) > 80
                compared += 1
    assert (compared, configs) == (runs, {})
