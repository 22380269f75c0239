"""Train every attention preset on the demo corpus and draw the pictures of the documentation.

python scripts/draw_presets.py SWEEP OUTPUT [OVERRIDE ...] [--presets NAME ...]

Writes OUTPUT/NAME.png for each preset (the attention over one sentence; for `none` the gradients), OUTPUT/gradients.png
(the gradients of `bahdanau` over the same sentence) and OUTPUT/length.png (BLEU by sentence length). The runs are one
sweep in the directory SWEEP, as by `nmt-train -m`; with the same directory again, finished runs are not trained again.
Overrides are those of nmt-train: hydra/launcher=parallel threads=1.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure
from runs import command

from nmt import Translator
from nmt.config.compose import config_dir
from nmt.config.errors import UserError, quoted
from nmt.explain.explanation import explain
from nmt.translate.heatmap import draw_alignment, save

SENTENCE = (
    "the old man who does not visit the European Economic Area sees a small red house because the famous hospital is "
    "white ."
)
IN_CHART = {"none": "o", "bahdanau": "s", "luong_dot": "^"}  # presets in the chart of lengths, and their markers


def train(sweep: Path, presets: list[str], overrides: list[str]) -> dict[str, Path]:
    """Run the sweep, or the unfinished runs of it. Returns the run of each preset. Raises UserError if a run fails."""
    words = ["-m", f"attention=choice({','.join(presets)})", f"hydra.sweep.dir={quoted(sweep)}", *overrides]
    if subprocess.run([command("nmt-train"), *words], check=False).returncode:
        raise UserError(f"{sweep}: a run failed, see the messages above")
    return {name: sweep / f"attention-{name}" for name in presets}


def draw_attention(run: Path, output: Path) -> None:
    """Draw the attention of the run over the sentence, or the gradients if it has no attention."""
    translator = Translator.load(run)
    translation = translator.translate([SENTENCE])[0]
    if translation.alignment is None:
        draw_gradients(run, output)
    else:
        save(draw_alignment(translation.alignment, translation.source_tokens, translation.tokens), output)


def draw_gradients(run: Path, output: Path) -> None:
    """Draw how much each output token depends on each source token: its shares of the gradient."""
    translator = Translator.load(run)
    (translation,) = translator.translate([SENTENCE])
    shares = explain(translator, SENTENCE, translation.tokens).saliency
    assert shares is not None  # only an ensemble has no saliency
    figure = draw_alignment(shares, translation.source_tokens, translation.tokens, meaning="share of the gradient")
    save(figure, output)


def draw_lengths(comparison: Path, output: Path) -> None:
    """Draw BLEU by source length, for the presets of IN_CHART that were compared."""
    (compared,) = json.loads(comparison.read_text(encoding="utf-8"))["comparisons"]
    systems = [system for system in compared["systems"] if system["name"] in IN_CHART]
    figure = Figure(figsize=(6.4, 3.6), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot(xlabel="words in the source sentence", ylabel="test BLEU", ylim=(0, 100))
    for system in sorted(systems, key=lambda system: list(IN_CHART).index(system["name"])):
        points = [(sum(part["words"]) / 2, part["score"]) for part in system["by_length"]]
        axes.plot(*zip(*points, strict=True), marker=IN_CHART[system["name"]], label=system["name"])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    figure.savefig(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="directory of the runs")
    parser.add_argument("output", type=Path, help="folder of the pictures")
    parser.add_argument("overrides", nargs="*", help="as for nmt-train")
    presets = sorted(path.stem for path in (config_dir() / "attention").glob("*.yaml"))
    parser.add_argument("--presets", nargs="+", choices=presets, default=presets, metavar="NAME")
    arguments = parser.parse_intermixed_args()
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        runs = train(arguments.sweep, arguments.presets, arguments.overrides)
        for name, run in runs.items():
            draw_attention(run, arguments.output / f"{name}.png")
            print(arguments.output / f"{name}.png")
        if "bahdanau" in runs:
            draw_gradients(runs["bahdanau"], arguments.output / "gradients.png")
        if len(runs) > 1:  # otherwise there is no comparison
            draw_lengths(arguments.sweep / "comparison" / "comparison.json", arguments.output / "length.png")
    except (UserError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
