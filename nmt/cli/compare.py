"""nmt-compare: rank trained runs."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.cli.app import run
from nmt.config.errors import UserError
from nmt.config.schema import CompareConfig

if TYPE_CHECKING:
    from nmt.run import RunDirectory

# Overrides that tell one attention from another of the same preset.
OF_ATTENTION = (
    "attention/",
    "attention.",
    "encoder/self_attention",
    "encoder.self_attention",
    "decoder.attend=",
    "decoder.input_feeding=",
    "decoder.readout=",
    "decoder.bridge=",
    "training.guided_alignment=",
)
log = logging.getLogger(__name__)


def main() -> None:
    """Entry point."""
    run("compare", CompareConfig, _compare)


def _compare(config: CompareConfig, overrides: list[str]) -> None:
    from nmt.report import table
    from nmt.report.table import Column, decimals

    rows = [row for given in config.runs for row in _rows(given, config.split)]
    rows.sort(key=lambda row: -row["bleu"])
    for what in ("test set", "signature", "checkpoint", "search"):
        if len({str(row[what]) for row in rows}) > 1:
            log.warning("these runs differ in %s: their scores do not compare", what)
    for rank, row in enumerate(rows, 1):
        row["rank"] = rank
    columns = [
        Column("rank", "#"),
        Column("run", "run"),
        Column("attention", "attention"),
        Column("bleu", "BLEU", decimals(2)),
        Column("chrf", "chrF", decimals(2)),
        Column("bleu_long", "BLEU, longest quarter", decimals(2)),
        Column("aer", "AER %", decimals(1)),
        Column("parameters", "parameters", table.human_count),
        Column("epoch", "s an epoch", decimals(1)),
        Column("seconds", "training time", table.human_duration),
    ]
    print((table.markdown if config.markdown else table.terminal)(rows, columns))


def _rows(name: str, split: str) -> list[dict[str, Any]]:
    """The run itself, or the finished runs in a folder such as a sweep's. Raises UserError if there is none."""
    folder = Path(name).expanduser()
    if not folder.is_dir() or (folder / "config.yaml").is_file():
        return [_row(name, split)]
    rows = []
    depths = ("*", "*/*", "*/*/*")  # such as outputs/sweep/DATE/TIME/NUMBER
    for path in sorted(path for depth in depths for path in folder.glob(f"{depth}/config.yaml")):
        try:
            rows.append(_row(str(path.parent), split))
        except UserError as error:
            log.warning("left out: %s", error)
    if not rows:
        raise UserError(f"runs={name}: is neither a run nor a folder that holds finished runs")
    return rows


def _row(name: str, split: str) -> dict[str, Any]:
    """One run's line. Raises UserError if it has no result for the split."""
    from nmt.run import RunDirectory, read_json

    directory = RunDirectory.existing(name, "runs")
    results, manifest = read_json(directory.results), read_json(directory.manifest)
    if split not in results:
        directory.held_out(split)  # tells if there is nothing to score
        raise UserError(f"{name}: has no {split} results; run nmt-evaluate run={name} split={split}")
    result, training = results[split], manifest.get("training", {})
    return {
        "run": name,
        "attention": _attention(directory, manifest),
        "bleu": result["bleu"],
        "chrf": result["chrf"],
        "bleu_long": result["bleu_by_length"][-1]["bleu"] if "bleu_by_length" in result else None,
        "aer": 100 * result["aer"] if "aer" in result else None,
        "signature": result["signature"],
        "checkpoint": result["checkpoint"],
        "search": result["search"],
        "test set": directory.held_out(split)[:2],
        "parameters": manifest.get("parameters"),
        "epoch": training["seconds"] / training["epochs"] if training.get("epochs") else None,
        "seconds": training.get("seconds"),
    }


def _attention(directory: "RunDirectory", manifest: dict[str, Any]) -> str:
    """The preset that was chosen, with what was changed in it; from Python, where nothing is chosen, the score."""
    from nmt.config.compose import load_values

    start = manifest["starts"][0]
    preset = start.get("choices", {}).get("attention")
    if preset is None:
        return str(load_values(directory.config)["attention"].get("score", {}).get("kind", "none"))
    return " ".join([preset, *(override for override in start["overrides"] if override.startswith(OF_ATTENTION))])
