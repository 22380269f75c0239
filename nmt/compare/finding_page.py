"""A published finding beside what was measured, as one self-contained HTML file."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nmt.compare.chart import Series, legend_key, line_chart
from nmt.compare.page import EN_DASH, centre, length_ticks, template


def finding_page(result: Mapping[str, Any]) -> str:
    """The HTML file, from the values that nmt/compare/finding_report.py gathers."""
    models = result["models"]
    return template("finding.html").render(
        finding=result,
        charts=_charts(result),
        marks={model["label"]: legend_key(number) for number, model in enumerate(models)},
        interval=interval,
        seed_list=seed_list,
    )


def interval(row: Mapping[str, Any]) -> str:
    """The ends of a statement's interval."""
    return f"{row['low']:.2f} to {row['high']:.2f}"


def seed_list(seeds: Sequence[int]) -> str:
    """Such as "1, 2, 3"."""
    return ", ".join(map(str, seeds)) or EN_DASH


def _charts(result: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """(title, chart): the published scores if the paper prints any, and the measured ones if there are runs."""
    models = result["models"]
    labels = {float(number): model["label"] for number, model in enumerate(models)}
    published = [
        Series(number, model["label"], [(float(number), model["published"])]) for number, model in enumerate(models)
    ]
    by_seed = [  # a line from the worst seed to the best
        Series(number, model["label"], [(float(number), bleu) for bleu in sorted(model["bleu_by_seed"].values())])
        for number, model in enumerate(models)
    ]
    charts = [
        ("Published: BLEU", published, "model", labels),
        ("Here: BLEU of each seed", by_seed, "model", labels),
    ]
    if result["by_length"]:
        buckets = [bucket for model in models for bucket in model["bleu_by_length"] or ()]
        by_length = [
            Series(number, model["label"], [(centre(part), part["bleu"]) for part in model["bleu_by_length"] or ()])
            for number, model in enumerate(models)
        ]
        charts.append(("Here: BLEU by source length", by_length, "length of the source", length_ticks(buckets)))
    return [
        (title, line_chart(series, title, x_label, "BLEU", ticks))
        for title, series, x_label, ticks in charts
        if any(each.complete_points() for each in series)
    ]
