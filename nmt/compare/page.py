"""The comparison as one self-contained HTML file: tables, charts, and translations with their attention."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nmt.compare.chart import Series, legend_key, line_chart, scatter_chart
from nmt.system.text_table import Column, decimals, human_count, human_duration

SIGNIFICANT = 0.05
MIN_P = 0.001  # smaller values are shown as "< 0.001"
EN_DASH = "\N{EN DASH}"


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p >= MIN_P else f"< {MIN_P}"


def _seeds(seeds: Sequence[int | None]) -> str:
    """How many there are."""
    return str(sum(seed is not None for seed in seeds) or EN_DASH)


def breakable(name: str) -> Markup:
    """A name such as attention/score=dot, which may be broken between its parts."""
    return Markup("<wbr>").join(re.split(r"(?<=[/=.,_])", name))


def _seeds_needed(count: float) -> str:
    return "inf" if math.isinf(count) else str(count)


def score_decimals(metric: str) -> Callable[[float], str]:
    """A formatter of scores and of differences between them."""
    return decimals(4 if metric == "comet" else 2)


NAMES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "comet": "COMET"}
SCORES = (
    Column("bleu", "BLEU", decimals(2)),
    Column("chrf", "chrF", decimals(1)),
    Column("ter", "TER", decimals(1)),
    Column("comet", "COMET", decimals(4)),
    Column("aer", "AER %", decimals(1)),
)
EXPLAINED = (
    Column("tau", "Kendall's tau", decimals(3)),
    Column("aer_attention", "AER %, attention", decimals(1)),
    Column("aer_saliency", "AER %, saliency", decimals(1)),
    Column("aer_both", "AER %, both", decimals(1)),
    Column("area_attention", "area, attention", decimals(3)),
    Column("area_saliency", "area, saliency", decimals(3)),
    Column("area_random", "area, random", decimals(3)),
)
EXPLAINED_COLUMNS = (Column("name", "system"), *EXPLAINED, Column("faithfulness_sentences", "sentences"))
MASKING_CHARTS = {
    "attention": "Masking the most attended first",
    "saliency": "Masking the most salient first",
    "random": "Masking at random",
}
RUN_COLUMNS = (
    Column("system", "system"),
    Column("seed", "seed"),
    *SCORES,
    Column("p_bootstrap", "p, bootstrap", _p_value),
    Column("p_randomisation", "p, randomisation", _p_value),
    Column("run", "run"),
    Column("baseline_run", "compared with"),
)
HIGHER_IS_BETTER = {"bleu", "chrf", "comet", "tokens_per_second", "sentences_per_second"}  # sorted descending first


@dataclass(frozen=True)
class Cell:
    """A table cell; `value` is its sort key, and None (unknown) sorts last."""

    text: str
    value: object
    spread: str | None
    significant: bool


@dataclass(frozen=True)
class Heading:
    """A table column."""

    key: str
    text: str
    numeric: bool
    spread_width: int  # characters
    descending: bool


def _system_columns(metric: str) -> list[Column]:
    first, *others = sorted(SCORES, key=lambda column: column.key != metric)
    return [
        Column("rank", "#"),
        Column("name", "system"),
        Column("seeds", "seeds", _seeds),
        first,
        Column("letters", "groups"),
        *_test_columns(metric),
        *others,
        Column("parameters", "parameters", human_count),
        Column("seconds", "training time", human_duration),
        Column("tokens_per_second", "training, tokens/s", "{:,.0f}".format),
        Column("sentences_per_second", "decoding, sentences/s", decimals(1)),
    ]


def _test_columns(metric: str) -> list[Column]:
    return [
        Column("difference", "difference", score_decimals(metric)),
        Column("p", "p", _p_value),
        Column("p_raw", "raw p", _p_value),
        Column("detectable", "detects", score_decimals(metric)),
        Column("seeds_needed", "seeds needed", _seeds_needed),
    ]


def power(comparison: Mapping[str, Any]) -> str:
    """Says how large a difference these seeds and sentences could have shown; empty where nothing varies."""
    rows, name = comparison["differences"], NAMES[comparison["metric"]]
    show, sizes = score_decimals(comparison["metric"]), [row["detectable"] for row in rows]
    if not any(sizes):  # no pair of systems, or outputs that are all equal
        return ""
    spread = f" (the median; {show(min(sizes))} to {show(max(sizes))})" if len(sizes) > 1 else ""
    base = "between two systems" if comparison["baseline"] is None else f"to {comparison['baseline']}"
    said = f"Detects a difference {base} of {show(median(sizes))} {name} with 80 %{spread}."
    if any(row["seeds_needed"] is None for row in rows):
        said += (
            " Where two systems have one seed each, p and interval know only the variance between sentences: other "
            "seeds may differ more."
        )
    return said


def page(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """The HTML file. Runs whose scores are not comparable come as several comparisons, one section each."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    sections = [_section(comparison) for comparison in comparisons]
    return environment.get_template("page.html").render(comparisons=sections)


def _section(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison, with the tables, charts and marks that the template needs."""
    systems, metric = comparison["systems"], comparison["metric"]
    numbers = {system["name"]: number for number, system in enumerate(systems)}
    return {
        **comparison,
        "metric_name": NAMES[metric],
        "system_table": _table(systems, _system_columns(metric), metric),
        "run_table": _table(comparison["runs"], RUN_COLUMNS),
        "difference_table": _table(
            comparison["differences"],
            [Column("system", "system"), Column("baseline", "from"), *_test_columns(metric)],
        ),
        "power": power(comparison),
        "numbers": numbers,
        "marks": {name: legend_key(number) for name, number in numbers.items()},
        "charts": _charts(systems),
        "explained": _table(systems, EXPLAINED_COLUMNS) if _is_explained(systems) else None,
        "masking_charts": _masking_charts(systems),
        "examples": [{**example, "words": _common_source(example)} for example in comparison["examples"]],
    }


def _table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], metric: str = ""
) -> tuple[list[Heading], list[tuple[str, list[Cell]]]]:
    """Headings, and each row as (system, cells). Columns without any value are left out.

    After a mean over seeds stands its standard deviation, after the metric that ranks the 95 % interval.
    """
    columns = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    body = [(row.get("name", row.get("system")), [_cell(row, column, metric) for column in columns]) for row in rows]
    headings = []
    for index, column in enumerate(columns):
        cells = [cells[index] for _, cells in body]
        numeric = all(cell.value is None or isinstance(cell.value, int | float) for cell in cells)
        spread_width = max(len(cell.spread or "") for cell in cells)
        headings.append(Heading(column.key, column.heading, numeric, spread_width, column.key in HIGHER_IS_BETTER))
    return headings, body


def _cell(row: Mapping[str, Any], column: Column, metric: str) -> Cell:
    value = row.get(column.key)
    if value is None:
        return Cell(EN_DASH, None, None, False)
    interval = row.get(f"{column.key}_ci")
    spread = interval if column.key == metric else row.get(f"{column.key}_sd", interval)
    return Cell(
        column.show(value),
        value if isinstance(value, int | float) else column.show(value),
        None if spread is None else column.show(spread),
        column.key == "p" and value < SIGNIFICANT,
    )


def _charts(systems: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """(title, chart) for each subject with at least one point."""
    unit, unit_seconds = _time_unit(max((system["seconds"] or 0 for system in systems), default=0))
    longest = max((system["bleu_by_length"] for system in systems), key=len)
    # One place for each range of lengths, however near they are.
    ranges = {float(place): EN_DASH.join(map(str, sorted({*part["words"]}))) for place, part in enumerate(longest)}

    def series(points: Callable[[Mapping[str, Any]], Sequence[Any]]) -> list[Series]:
        return [Series(number, system["name"], points(system)) for number, system in enumerate(systems)]

    lengths = series(lambda system: [(place, bucket["bleu"]) for place, bucket in enumerate(system["bleu_by_length"])])
    curves = series(lambda system: system["curve"])
    costs = series(lambda system: [(system["seconds"] / unit_seconds if system["seconds"] else None, system["bleu"])])
    charts = []
    if _has_points(lengths):
        title = "BLEU by source length"
        charts.append((title, line_chart(lengths, title, "length of the source", "BLEU", ranges)))
    if _has_points(curves):
        title = "Learning curves"
        charts.append((title, line_chart(curves, title, "epoch", "validation BLEU")))
    if _has_points(costs):
        title = "BLEU by training time"
        charts.append((title, scatter_chart(costs, title, f"training time, {unit}", "BLEU", log_x=True)))
    return charts


def _is_explained(systems: Sequence[Mapping[str, Any]]) -> bool:
    return any(system[column.key] is not None for system in systems for column in EXPLAINED)


def _masking_charts(systems: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """(title, chart) of the masking curves in each order, all with the same y axis."""
    labels = "masked source tokens", "share of the probability that is left"
    everything = [value for system in systems for curve in system["masking_curves"].values() for value in curve]
    charts = []
    for order, title in MASKING_CHARTS.items():
        curves = [list(enumerate(system["masking_curves"].get(order, []))) for system in systems]
        if any(curves):
            lines = [Series(number, system["name"], curves[number]) for number, system in enumerate(systems)]
            charts.append((title, line_chart(lines, title, *labels, y_values=everything)))
    return charts


def _has_points(series: Sequence[Series]) -> bool:
    return any(system.complete_points() for system in series)


def _time_unit(seconds: float) -> tuple[str, int]:
    """The unit for times up to this one, and its length in seconds."""
    units = (("hours", 3600), ("minutes", 60))
    return next(((unit, length) for unit, length in units if seconds >= 2 * length), ("seconds", 1))


def _common_source(example: Mapping[str, Any]) -> list[str] | None:
    """The source words as most systems segmented them; None without any alignment."""
    alignments = [translation["alignment"] for translation in example["translations"]]
    sources = Counter(tuple(alignment["source"]) for alignment in alignments if alignment)
    return list(sources.most_common(1)[0][0]) if sources else None
