"""Check a finding on the systems of a comparison, and write it beside the published figures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nmt.compare.compare import Comparison, bleu_by_length
from nmt.compare.entry import Entry, HeldOut, System
from nmt.compare.finding_page import finding_page, interval, seed_list
from nmt.compare.findings import Finding, Model, find_finding
from nmt.compare.verdict import RULE, Measured, Scores, judge, overall
from nmt.config.errors import printable
from nmt.evaluate.bleu import Counts, count
from nmt.evaluate.significance import Resampling, paired_bootstrap, score
from nmt.system import text_table as table
from nmt.system.files import to_json, write_atomically
from nmt.system.text_table import Column, decimals

MODEL_COLUMNS = (
    Column("label", "model"),
    Column("published", "published BLEU", decimals(2)),
    Column("bleu", "BLEU here", decimals(2)),
    Column("bleu_sd", "±", decimals(2)),
    Column("seeds", "seeds", seed_list),
)


def check_finding(name: str, systems: Sequence[System], held_out: HeldOut, comparison: Comparison) -> Comparison:
    """The finding's published and measured figures and its verdict, as plain values.

    `comparison` is that of the systems. Raises UserError for an unknown name.
    """
    finding = find_finding(name)
    measured = _measure(finding, systems, held_out, comparison)
    checks = [judge(statement, measured) for statement in finding.statements]
    rows = {row["name"]: row for row in comparison["systems"]}
    return {
        "name": name,
        "verdict": overall(checks),
        **{key: getattr(finding, key) for key in ("title", "source", "setting", "caveat", "by_length")},
        "rule": RULE,
        **{key: comparison[key] for key in ("split", "sentences", "signature")},
        "models": [_model_row(model, rows, _matching(model, systems), measured) for model in finding.models],
        "statements": [asdict(check) for check in checks],
    }


def write_finding(result: Comparison, output: Path) -> str:
    """Write finding.html, .md and .json to the folder. Returns the text to print."""
    write_atomically(output / "finding.json", to_json(result, indent=1).encode())
    write_atomically(output / "finding.md", f"{_markdown(result)}\n".encode())
    write_atomically(output / "finding.html", finding_page(result).encode())
    columns = [column for column in _statement_columns() if column.key != "published"]
    return f"{_headline(result)}\n\n{table.terminal(_statement_rows(result), columns)}"


def _matching(model: Model, systems: Sequence[System]) -> list[System]:
    return [system for system in systems if _has_choices(system.entries[0].choices, model.choices)]


def _has_choices(choices: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    return all(str(choices.get(key)) == value for key, value in wanted.items())


def _of_equal_seeds(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of the first seed that several entries have; none if all seeds differ."""
    for entry in entries:
        twins = [other for other in entries if other.seed == entry.seed]
        if entry.seed is not None and len(twins) > 1:
            return twins
    return []


def _measure(finding: Finding, systems: Sequence[System], held_out: HeldOut, comparison: Comparison) -> Measured:
    """The runs of each model. A model that no system or several systems match has a problem in place of runs."""
    bleu = {row["run"]: row["bleu"] for row in comparison["runs"]}
    runs: dict[str, dict[int, Scores]] = {}
    problems: dict[str, str] = {}
    for model in finding.models:
        found = _matching(model, systems)
        chosen = " ".join(f"{key}={value}" for key, value in model.choices.items())
        if not found:
            problems[model.label] = f"no finished run with {chosen}"
        elif len(found) > 1:
            names = ", ".join(system.name for system in found)
            problems[model.label] = f"several systems have {chosen} ({names}); compare one of them"
        elif twins := _of_equal_seeds(found[0].entries):
            names = ", ".join(entry.name for entry in twins)
            problems[model.label] = (
                f"several runs have {chosen} and seed={twins[0].seed} ({names}); compare one of them"
            )
        else:
            for entry in found[0].entries:
                counts = count(entry.hypotheses, held_out.references, held_out.settings, ("bleu",)).counts["bleu"]
                by_length = bleu_by_length(counts, held_out) if finding.by_length else ()
                if entry.seed is not None:
                    of_model = runs.setdefault(model.label, {})
                    of_model[entry.seed] = Scores(bleu[entry.name], by_length, counts)
    resampling = Resampling(
        len(held_out.references), comparison["bootstrap_samples"], comparison["randomisation_trials"]
    )

    def p_value(one: Counts, other: Counts) -> float:
        samples = resampling.bootstrap([one, other], "bleu")
        bootstrap = paired_bootstrap(samples[0], samples[1], score(other, "bleu") - score(one, "bleu"))
        return max(bootstrap, resampling.paired_randomisation({"bleu": one}, {"bleu": other})["bleu"])

    return Measured(runs, problems, p_value)


def _model_row(
    model: Model, rows: Mapping[str, Comparison], systems: Sequence[System], measured: Measured
) -> Comparison:
    row = rows[systems[0].name] if model.label in measured.runs else {}
    shared = {key: row.get(key) for key in ("bleu", "bleu_sd", "bleu_by_length")}
    by_seed = {seed: scores.bleu for seed, scores in measured.runs.get(model.label, {}).items()}
    return {
        "label": model.label,
        "choices": dict(model.choices),
        "published": model.published,
        "seeds": list(by_seed),
        "bleu_by_seed": by_seed,
        **shared,
    }


def _headline(result: Comparison) -> str:
    return f"{result['name']}: {result['verdict']}"


def _statement_rows(result: Comparison) -> list[dict[str, Any]]:
    return [{**row, "interval": None if row["low"] is None else interval(row)} for row in result["statements"]]


def _statement_columns() -> list[Column]:
    return [
        Column("text", "statement"),
        Column("published", "published"),
        Column("value", "here", decimals(2)),
        Column("interval", "95 %"),
        Column("unit", "unit"),
        Column("seeds", "seeds", seed_list),
        Column("verdict", "verdict"),
        Column("reason", "reason"),
    ]


def _markdown(result: Comparison) -> str:
    parts = [
        f"# {result['title']}",
        f"Verdict: **{result['verdict']}**",
        f"Published: {result['source']}. {result['setting']}",
        printable(f"Here: {result['split']}, {result['sentences']} sentences, {result['signature']}"),
        table.markdown(_statement_rows(result), _statement_columns()),
        table.markdown(result["models"], MODEL_COLUMNS),
        result["caveat"],
        result["rule"],
    ]
    return "\n\n".join(parts)
