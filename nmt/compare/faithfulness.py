"""What attention explains: the figures of nmt-evaluate faithfulness=true, read from results and averaged over seeds."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from nmt.explain.faithfulness import ORDERS, VIEWS
from nmt.explain.masking_curves import MASKS

PERCENTS = [f"aer_{view}" for view in VIEWS]
SHARES = [f"area_{order}" for order in ORDERS]
FIGURES = ("tau", *PERCENTS, *SHARES)
WITH_INTERVAL = ("tau", *SHARES)


def read_figures(values: Any) -> dict[str, Any]:  # noqa: ANN401
    """The entry in results.json, AER in percent; {} for a run without. Raises ValueError, TypeError, KeyError or
    AttributeError for anything else: the file may come from an untrusted source."""
    if values is None:
        return {}
    figures: dict[str, Any] = {"faithfulness_sentences": int(_between(values["sentences"], 1, 1e9) or 1)}
    for name in FIGURES:
        value = _between(values[name], -1 if name == "tau" else 0, 1)
        figures[name] = 100 * value if name in PERCENTS and value is not None else value
    for name in WITH_INTERVAL:
        figures[f"{name}_ci"] = _between(values[f"{name}_ci"], 0, 1e9)
    curves = {order: [_between(value, 0, 1) for value in values["curves"].get(order, [])] for order in ORDERS}
    if any(None in curve or len(curve) not in (0, MASKS + 1) for curve in curves.values()):
        raise ValueError(f"a masking curve has {MASKS + 1} values")
    return {**figures, "curves": curves}


def _between(value: Any, low: float, high: float) -> float | None:  # noqa: ANN401
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{value!r} is not a number from {low} to {high}")
    return float(value)


def of_run(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a run's row, None where it has no figure."""
    names = ["faithfulness_sentences", *FIGURES, *(f"{name}_ci" for name in WITH_INTERVAL)]
    return {name: _rounded(figures.get(name)) for name in names}


def of_system(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the runs that have a figure, with standard deviations, and the mean masking curves by order."""
    row: dict[str, Any] = {
        "faithfulness_sentences": min((run["faithfulness_sentences"] for run in runs if run), default=None),
        "masking_curves": {},
    }
    for name in FIGURES:
        known = [run[name] for run in runs if run.get(name) is not None]
        row[name] = _rounded(fmean(known)) if known else None
        row[f"{name}_sd"] = _rounded(stdev(known)) if len(known) > 1 else None
    for order in ORDERS:
        curves = [run["curves"][order] for run in runs if run and run["curves"][order]]
        if curves:
            row["masking_curves"][order] = [_rounded(fmean(values)) for values in zip(*curves, strict=True)]
    return row


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if isinstance(value, float) else value
