"""Run directories as training leaves them, written without training."""

import json
from collections.abc import Sequence
from pathlib import Path

from conftest import values_of

from nmt.system.run import RunDirectory, save_values

REFERENCES = [
    "der kleine hund schläft im garten .",
    "die frau liest ein buch .",
    "zwei kinder spielen heute am strand mit einem roten ball .",
    "ein mann steht auf der brücke und wartet .",
    "der zug kommt spät .",
    "sie trinkt kaffee in der küche .",
] * 10
SOURCES = [f"source {number} {'word ' * (number % 12)}".strip() for number in range(len(REFERENCES))]


def worsened(every: int) -> list[str]:
    """Return the references with two words exchanged in every `every`-th line."""
    lines = [line.split() for line in REFERENCES]
    for line in lines[::every]:
        line[1], line[2] = line[2], line[1]
    return [" ".join(line) for line in lines]


def make_run(path: Path, hypotheses: Sequence[str], *overrides: str, gold: bool = True, curve: bool = True) -> Path:
    """Write a finished run with these hypotheses on the test set."""
    run, values = RunDirectory(path), values_of("train", [*overrides])
    for folder in (run.path, run.data, run.hypotheses, run.alignments):
        folder.mkdir(parents=True, exist_ok=True)
    save_values(run.config, values)
    words = dict(override.split("=", 1) for override in overrides)
    choices = {"attention": words.get("attention", "bahdanau"), "encoder": words.get("encoder", "gru")}
    training = {"seconds": 60.0, "steps": 20, "epochs": 2.0, "target_tokens": 60000, "best_step": 20, "best_bleu": 20.0}
    training |= {"target_tokens_per_second": 1000.0}
    machine = {"name": "a CPU", "precision": "fp32", "threads": 1}
    start = {"choices": {**choices, "attention/score": "additive"}, "overrides": list(overrides), "machine": machine}
    run.update_json(
        run.manifest, {"starts": [start], "training": training, "parameters": 1234, "status": "finished", "data": {}}
    )
    run.update_json(run.results, {"test": {"sentences_per_second": 50.0, "bleu": 1.0}})
    write(run.data / "test.source", SOURCES)
    write(run.data / "test.target", REFERENCES)
    if gold:
        write(run.data / "test.alignments", ["0-0 1-1"] * len(REFERENCES))
        write(run.alignments / "test.references.pharaoh", ["0-0 1-2"] * len(REFERENCES))
    write(run.hypotheses / "test.txt", hypotheses)
    if values["attention"]["kind"] != "none":
        weights = {"source": ["source", "</s>"], "target": ["der", "</s>"], "weights": [[90, 10], [5, 95]]}
        write(run.alignments / "test.words.jsonl", [json.dumps(weights)] * len(REFERENCES))
    if curve:
        points = [{"step": 5, "epoch": 0.5, "train/tokens_per_second": speed} for speed in (1500.0, 2000.0, 10.0)]
        points += [
            {"step": 10 * n, "epoch": float(n), "validation/bleu": 10.0 * n, "validation/perplexity": 9.0 - n}
            for n in (1, 2)
        ]
        write(run.metrics, [json.dumps(point) for point in points])
    return path


def write(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
