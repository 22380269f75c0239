"""Processes killed at a given change of the disk or at a random moment, and the comparison of their results."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fitting import TIMED
from forks import Work
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from nmt.model.checkpoints import read_checkpoint

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def watched(work: Work, below: Path, act: Callable[[int], object]) -> Work:
    """Return `work`, but call act(number) just before each change of the disk below a folder, counted from 1.

    A change opens a file for writing, renames or removes one, or makes a folder.
    """

    def watching() -> int:
        sys.addaudithook(_Changes(below, act))
        return work()

    return watching


class _Changes:
    """An audit hook, which Python calls before it opens, renames or removes a file."""

    def __init__(self, below: Path, act: Callable[[int], object]) -> None:
        self.below, self.act, self.count = f"{below}/", act, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            changing = bool(flags & WRITING)
        elif event in {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}:
            path, changing = arguments[0], True
        else:
            return
        if changing and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.below):
            self.count += 1
            self.act(self.count)


def outcome(run: Path) -> dict[str, Any]:
    """Collect by file all results of a run that must have the same bits after kills."""
    found: dict[str, Any] = {}
    last = found["last.pt"] = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    del last["spent"], last["seconds_of"], last["window"][-1]
    best = found["best.safetensors"] = read_checkpoint(run / "checkpoints" / "best.safetensors")
    best["bytes"] = (run / "checkpoints" / "best.safetensors").read_bytes()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = [{key: value for key, value in line.items() if key not in TIMED} for line in lines]
    for path in sorted([*(run / "hypotheses").iterdir(), *(run / "data").iterdir(), run / "config.yaml"]):
        found[path.name] = path.read_bytes()
    results = json.loads((run / "results.json").read_text())
    found["results"] = {
        split: {key: value for key, value in result.items() if "second" not in key} for split, result in results.items()
    }
    manifest = json.loads((run / "manifest.json").read_text())
    found["status"] = manifest["status"]
    found["files"] = sorted(
        str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.parent.name != "tensorboard"
    )
    return found


def curves(run: Path) -> dict[str, list[tuple[int, bytes]]]:
    """Collect what TensorBoard shows: for each tag the steps, and for curves the values."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    shown: dict[str, list[tuple[int, bytes]]] = {}
    for tag in events.Tags()["tensors"]:
        if tag.startswith("_hparams_"):
            content = events.SummaryMetadata(tag).plugin_data.content
            start = HParamsPluginData.FromString(content).session_start_info
            shown[tag] = [(0, f"{key}: {value}".encode()) for key, value in sorted(start.hparams.items())]
            continue
        is_curve = events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
        found = [(event.step, event.tensor_proto.SerializeToString()) for event in events.Tensors(tag)]
        shown[tag] = [(step, value if is_curve and tag not in TIMED else b"") for step, value in found]
    return shown


def differing(one: Any, other: Any, name: str = "") -> list[str]:  # noqa: ANN401
    """List the names of values whose bits differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in differing(one[key], other[key], f"{name}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for number, pair in pairs for line in differing(*pair, f"{name}/{number}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [name]
    same = type(one) is type(other) and not isinstance(one, dict | list | tuple) and one == other
    return [] if same else [f"{name}: {str(one)[:200]} is not {str(other)[:200]}"]
