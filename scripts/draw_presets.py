"""Draw the pictures of the documentation from trained runs of the attention presets.

python scripts/draw_presets.py SWEEP OUTPUT [--sentence "the sentence"]

Writes for each run below SWEEP the picture OUTPUT/NAME.png, where NAME is its preset: the attention over one sentence,
or the gradients if the model has no attention. Of `bahdanau`, it also draws the gradients (OUTPUT/gradients.png). If
SWEEP has a comparison of the three presets in the chart of lengths, it draws this chart too (OUTPUT/length.png).
"""

import argparse
import json
from pathlib import Path

from draw_alignment import draw
from matplotlib.figure import Figure

from nmt.config.errors import UserError
from nmt.system.run import RunDirectory, load_values, runs_below, start_choices

SENTENCE = (
    "the old man who does not visit the European Economic Area sees a small red house because the famous hospital is "
    "white ."
)
IN_CHART = {"none": "o", "bahdanau": "s", "luong_dot": "^"}  # presets in the chart of lengths, and their markers


def preset_runs(sweep: Path) -> dict[str, Path]:
    """Return the run of each preset below a folder. Raises UserError if there is none."""
    starts = {path: RunDirectory(path).read_manifest()["starts"][0] for path in runs_below(sweep)}
    if not starts:
        raise UserError(f"{sweep}: has no runs")
    return {start_choices(start)["attention"]: path for path, start in starts.items()}


def draw_lengths(comparison: Path, output: Path) -> None:
    """Draw BLEU by source length, for the presets of IN_CHART that were compared."""
    (compared,) = json.loads(comparison.read_text(encoding="utf-8"))["comparisons"]
    systems = {system["name"].partition(" ")[0]: system for system in compared["systems"]}
    figure = Figure(figsize=(6.4, 3.6), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot(xlabel="words in the source sentence", ylabel="test BLEU", ylim=(0, 100))
    for name, marker in IN_CHART.items():
        points = [(sum(part["words"]) / 2, part["score"]) for part in systems[name]["by_length"]]
        axes.plot(*zip(*points, strict=True), marker=marker, label=name)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    figure.savefig(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder with the runs")
    parser.add_argument("output", type=Path, help="folder of the pictures")
    parser.add_argument("--sentence", default=SENTENCE, help="source sentence")
    arguments = parser.parse_args()
    try:
        runs = preset_runs(arguments.sweep)
        arguments.output.mkdir(parents=True, exist_ok=True)
        for name, run in runs.items():
            gradients = load_values(RunDirectory(run).config)["attention"]["kind"] == "none"
            draw(run, arguments.sentence, arguments.output / f"{name}.png", gradients)
            print(arguments.output / f"{name}.png")
        if "bahdanau" in runs:
            draw(runs["bahdanau"], arguments.sentence, arguments.output / "gradients.png", gradients=True)
        comparison = arguments.sweep / "comparison" / "comparison.json"
        if comparison.is_file() and IN_CHART.keys() <= runs.keys():
            draw_lengths(comparison, arguments.output / "length.png")
    except (UserError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
