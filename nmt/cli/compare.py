"""nmt-compare: rank trained runs."""

import logging
from typing import Any

from nmt.cli.app import run
from nmt.config.errors import UserError
from nmt.config.schema import CompareConfig

log = logging.getLogger(__name__)


def main() -> None:
    """Entry point."""
    run("compare", CompareConfig, _compare)


def _compare(config: CompareConfig, overrides: list[str]) -> None:
    from nmt.report.table import Column, decimals, human_count, human_duration, terminal

    rows = sorted((_row(name, config.split) for name in config.runs), key=lambda row: -row["bleu"])
    for what in ("test set", "signature", "checkpoint", "search"):
        if len({str(row[what]) for row in rows}) > 1:
            log.warning("these runs differ in %s: their scores do not compare", what)
    for rank, row in enumerate(rows, 1):
        row["rank"] = rank
    columns = [
        Column("rank", "#"),
        Column("run", "run"),
        Column("attention", "score"),
        Column("bleu", "BLEU", decimals(2)),
        Column("chrf", "chrF", decimals(2)),
        Column("parameters", "parameters", human_count),
        Column("seconds", "training time", human_duration),
    ]
    print(terminal(rows, columns))


def _row(name: str, split: str) -> dict[str, Any]:
    """One run's line. Raises UserError if it has no result for the split."""
    from nmt.config.compose import load_values
    from nmt.run import RunDirectory, read_json

    directory = RunDirectory.existing(name, "runs")
    results, manifest = read_json(directory.results), read_json(directory.manifest)
    if split not in results:
        directory.held_out(split)  # tells if there is nothing to score
        raise UserError(f"{name}: has no {split} results; run nmt-evaluate run={name} split={split}")
    attention = load_values(directory.config).get("attention", {})
    return {
        "run": name,
        "attention": attention.get("score", {}).get("kind", "none"),
        "bleu": results[split]["bleu"],
        "chrf": results[split]["chrf"],
        "signature": results[split]["signature"],
        "checkpoint": results[split]["checkpoint"],
        "search": results[split]["search"],
        "test set": directory.held_out(split)[:2],
        "parameters": manifest.get("parameters"),
        "seconds": manifest.get("training", {}).get("seconds"),
    }
