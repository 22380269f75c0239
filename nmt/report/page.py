"""The comparison as one HTML file that needs nothing else: tables, charts, and translations with their attention."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nmt.report.chart import Series, key, line_chart, scatter_chart
from nmt.report.table import Column, decimals, human_count, human_duration

SIGNIFICANT = 0.05
SMALLEST_P = 0.001  # that is told exactly
EN_DASH = "\N{EN DASH}"


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p >= SMALLEST_P else f"< {SMALLEST_P}"


def _seeds(seeds: Sequence[int | None]) -> str:
    return ", ".join(str(seed) for seed in seeds if seed is not None) or EN_DASH


SCORES = (
    Column("bleu", "BLEU", decimals(2)),
    Column("chrf", "chrF", decimals(1)),
    Column("ter", "TER", decimals(1)),
    Column("aer", "AER %", decimals(1)),
    Column("p_bootstrap", "p, bootstrap", _p_value),
    Column("p_randomisation", "p, randomisation", _p_value),
)
OF_SYSTEMS = (
    Column("rank", "#"),
    Column("name", "system"),
    Column("seeds", "seeds", _seeds),
    SCORES[0],
    Column("bleu_ci", "95 %", "± {:.2f}".format),
    *SCORES[1:],
    Column("parameters", "parameters", human_count),
    Column("seconds", "training time", human_duration),
    Column("tokens_per_second", "training, tokens/s", "{:,.0f}".format),
    Column("sentences_per_second", "decoding, sentences/s", decimals(1)),
)
OF_RUNS = (
    Column("system", "system"),
    Column("seed", "seed"),
    *SCORES,
    Column("run", "run"),
    Column("baseline_run", "compared with"),
)
MORE_IS_BETTER = {"bleu", "chrf", "tokens_per_second", "sentences_per_second"}  # sorted so at the first click


@dataclass(frozen=True)
class Cell:
    """What a table shows in one place, and what it sorts by there; None is unknown and comes last."""

    text: str
    value: object
    spread: str | None
    significant: bool


@dataclass(frozen=True)
class Heading:
    """What is common to the cells of a column."""

    key: str
    text: str
    numeric: bool
    spread: int  # characters of the longest
    descending: bool


def page(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """The whole file. Runs that do not compare with each other come as several comparisons and stay apart."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(comparisons=[_section(each) for each in comparisons])


def _section(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison with what the template shows of it."""
    systems = comparison["systems"]
    numbers = {system["name"]: number for number, system in enumerate(systems)}
    return {
        **comparison,
        "system_table": _table(systems, OF_SYSTEMS),
        "run_table": _table(comparison["runs"], OF_RUNS),
        "numbers": numbers,
        "marks": {name: key(number) for name, number in numbers.items()},
        "charts": _charts(systems),
        "examples": [{**example, "words": _common_source(example)} for example in comparison["examples"]],
    }


def _table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]
) -> tuple[list[Heading], list[tuple[str, list[Cell]]]]:
    """The headings, and for each row its system and its cells, without the columns of which nothing is known."""
    shown = [column for column in columns if any(row[column.key] is not None for row in rows)]
    body = [(row.get("name", row.get("system")), [_cell(row, column) for column in shown]) for row in rows]
    headings = []
    for index, column in enumerate(shown):
        cells = [cells[index] for _, cells in body]
        numeric = all(cell.value is None or isinstance(cell.value, int | float) for cell in cells)
        spread = max(len(cell.spread or "") for cell in cells)
        headings.append(Heading(column.key, column.heading, numeric, spread, column.key in MORE_IS_BETTER))
    return headings, body


def _cell(row: Mapping[str, Any], column: Column) -> Cell:
    value = row[column.key]
    if value is None:
        return Cell(EN_DASH, None, None, False)
    spread = row.get(f"{column.key}_sd", row.get(f"{column.key}_ci"))
    return Cell(
        column.show(value),
        value if isinstance(value, int | float) else column.show(value),
        None if spread is None else column.show(spread),
        column.key.startswith("p_") and value < SIGNIFICANT,
    )


def _charts(systems: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """Titles and drawings of what is known of any system."""
    unit, size = _unit(max((system["seconds"] or 0 for system in systems), default=0))

    def series(points: Callable[[Mapping[str, Any]], Sequence[Any]]) -> list[Series]:
        return [Series(number, system["name"], points(system)) for number, system in enumerate(systems)]

    lengths = series(lambda system: [(_middle(bucket), bucket["bleu"]) for bucket in system["bleu_by_length"]])
    curves = series(lambda system: system["curve"])
    costs = series(lambda system: [(system["seconds"] / size if system["seconds"] else None, system["bleu"])])
    charts = []
    if _anything(lengths):
        title, buckets = "BLEU by source length", [each for system in systems for each in system["bleu_by_length"]]
        ranges = {_middle(each): EN_DASH.join(map(str, sorted(set(each["words"])))) for each in buckets}
        charts.append((title, line_chart(lengths, title, "length of the source", "BLEU", ranges)))
    if _anything(curves):
        title = "Learning curves"
        charts.append((title, line_chart(curves, title, "epoch", "validation BLEU")))
    if _anything(costs):
        title = "BLEU by training time"
        charts.append((title, scatter_chart(costs, title, f"training time, {unit}", "BLEU", log_x=True)))
    return charts


def _anything(series: Sequence[Series]) -> bool:
    return any(each.known() for each in series)


def _middle(bucket: Mapping[str, Any]) -> float:
    shortest, longest = bucket["words"]
    return float(shortest + longest) / 2


def _unit(longest: float) -> tuple[str, int]:
    """The unit for times up to this one, and its seconds."""
    units = (("hours", 3600), ("minutes", 60))
    return next(((unit, size) for unit, size in units if longest >= 2 * size), ("seconds", 1))


def _common_source(example: Mapping[str, Any]) -> list[str] | None:
    """The source as words, as most systems saw it; None where no alignment is known."""
    alignments = [translation["alignment"] for translation in example["translations"]]
    sources = Counter(tuple(alignment["source"]) for alignment in alignments if alignment)
    return list(sources.most_common(1)[0][0]) if sources else None
