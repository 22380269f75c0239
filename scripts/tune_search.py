"""Try beam sizes, length penalties and then coverage penalties for a trained run or ensemble on its validation set.

python scripts/tune_search.py RUN [RUN ...] [OPTION ...]

All beam sizes are tried with all length penalties, then coverage penalties with the best of these. Prints a table, best
BLEU first, and the command that translates with the best values, and writes both to tune_search.json and
tune_search.md. Other settings, such as the maximum length, are those of the (first) run. The test set is not read.
"""

import argparse
import logging
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nmt.cli.evaluate import output_folder
from nmt.config.errors import UserError
from nmt.config.schema import training as schema
from nmt.evaluate.evaluation import evaluate, score_settings
from nmt.system.files import to_json, write_atomically
from nmt.system.machine import tune_memory
from nmt.system.run import RunDirectory, load_config
from nmt.system.text_table import Column, decimals, markdown, short
from nmt.translate.search import merge_search
from nmt.translate.translator import Translator

MOST_THREADS = 1024
COVERAGE_PENALTIES = [0.05, 0.1, 0.2, 0.4]
WARM_UP = 32  # sentences translated before timing starts
COLUMNS = [
    Column("beam_size", "beam"),
    Column("length_penalty", "length penalty"),
    Column("alpha", "alpha", short),
    Column("coverage_penalty", "coverage penalty", short),
    Column("bleu", "BLEU", decimals(2)),
    Column("chrf", "chrF", decimals(2)),
    Column("brevity_ratio", "brevity ratio", decimals(3)),
    Column("seconds", "seconds", decimals(1)),
]


def settings_to_try(options: argparse.Namespace) -> list[dict[str, Any]]:
    """List settings of beam search without a coverage penalty. Beam size 1 is tried once: a length penalty has no
    effect on it, because it stops at the first EOS (unless search.stop=exact)."""
    penalties: list[tuple[str, float | None]] = [("none", None)] if options.none else []
    penalties += [(kind, alpha) for kind in ("average", "gnmt") for alpha in getattr(options, kind)]
    return [
        {"beam_size": beam, "length_penalty": kind, "alpha": alpha, "coverage_penalty": 0.0}
        for beam in dict.fromkeys(options.beams)
        for kind, alpha in (penalties[:1] if beam == 1 else penalties)
    ]


def coverage_to_try(options: argparse.Namespace, *, attends: bool) -> list[dict[str, Any]]:
    """List the coverage penalties to try, as values that replace those of the best setting without coverage."""
    default = COVERAGE_PENALTIES if attends else []
    penalties = default if options.coverage is None else options.coverage
    return [{"coverage_penalty": strength} for strength in penalties]


def changes(setting: dict[str, Any], trained: schema.Search) -> dict[str, Any]:
    """Return the values that turn the search settings of training into this setting."""
    base = {} if isinstance(trained, schema.Beam) else {"kind": "beam", "alpha": 0.0, "stop": "beam"}
    return base | {key: value for key, value in setting.items() if value is not None}


class Tuning:
    """A model with the validation set of its (first) run, and the results so far, best first."""

    def __init__(self, options: argparse.Namespace) -> None:
        run = RunDirectory.existing(options.runs[0])
        self.config = load_config(run.config)
        self.scoring = score_settings(self.config.evaluation, self.config.data.target_lang)
        self.sources, self.references, _ = run.held_out("validation")
        machine = {name: getattr(options, name) for name in ("device", "precision", "threads")}
        self.translator = Translator.load(options.runs, checkpoint=options.checkpoint, **machine)
        self.rows: list[dict[str, Any]] = []
        self.signature = ""

    def search(self, setting: dict[str, Any]) -> schema.Search:
        """Return the search settings. Raises UserError for values that are impossible or that the model cannot use."""
        search = merge_search(self.config.search, changes(setting, self.config.search))
        return self.translator.with_search(search).settings

    def measure(self, setting: dict[str, Any], bar: Any) -> None:  # noqa: ANN401
        """Translate and score the validation set with a setting, and add a row to the results."""
        bar.set_description(" ".join(str(value) for value in setting.values() if value is not None))
        translator = self.translator.with_search(self.search(setting))
        texts = self.sources, self.references
        result = evaluate(translator, *texts, self.scoring, ("bleu", "chrf"), bar.update)
        length, reference = result.counted.counts["bleu"][:, :2].sum(0)
        self.signature = result.counted.signatures["bleu"]
        self.rows.append(
            {
                **setting,
                "bleu": result.scores["bleu"],
                "chrf": result.scores["chrf"],
                "brevity_ratio": length / reference,
                "seconds": len(self.sources) / result.sentences_per_second,
                "override": " ".join(f"search.{k}={v}" for k, v in changes(setting, self.config.search).items()),
            }
        )
        self.rows.sort(key=lambda row: -row["bleu"])  # stable: of equal scores, the setting tried first comes first


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Translate and score the validation set with each setting, and return the results for tune_search.json."""
    tuning = Tuning(options)
    settings = settings_to_try(options)
    coverages = coverage_to_try(options, attends=tuning.translator.model.attends)
    for setting in [*settings, *(settings[-1] | coverage for coverage in coverages)]:
        tuning.search(setting)  # reports mistakes before anything is translated
    tuning.translator.translate(tuning.sources[:WARM_UP])
    total = len(settings) + len(coverages)
    with tqdm(total=total * len(tuning.sources), unit=" sent", disable=None) as bar:
        try:
            for setting in settings:
                tuning.measure(setting, bar)
            best = {key: tuning.rows[0][key] for key in settings[0]}
            for coverage in coverages:
                tuning.measure(best | coverage, bar)
        except KeyboardInterrupt:
            if not tuning.rows:
                raise
            bar.write(f"interrupted: {len(tuning.rows)} of {total} settings were tried", file=sys.stderr)
    runs = options.runs[0] if len(options.runs) == 1 else f"[{','.join(options.runs)}]"
    words = [f"run={runs}", *(["checkpoint=last"] if options.checkpoint == "last" else [])]
    override = tuning.rows[0]["override"]
    return {
        "runs": options.runs,
        "checkpoint": options.checkpoint,
        "split": "validation",
        "sentences": len(tuning.sources),
        "signature": tuning.signature,
        "machine": tuning.translator.machine.describe(),
        "settings": tuning.rows,
        "best": override,
        "command": f"nmt-translate {shlex.join(words)} {override} < input > output",
    }


def write(results: dict[str, Any], folder: Path) -> None:
    """Print the table and write it to the folder."""
    table = f"{markdown(results['settings'], COLUMNS)}\n\n{results['command']}\n"
    print(table)
    write_atomically(folder / "tune_search.json", f"{to_json(results, indent=1)}\n".encode())
    write_atomically(folder / "tune_search.md", table.encode())
    print(folder / "tune_search.json")


def threads(text: str) -> int:
    """Parse a number of CPU threads. Raises ArgumentTypeError."""
    if not (text.isdecimal() and 1 <= int(text) <= MOST_THREADS):
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1 to {MOST_THREADS}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory; several are an ensemble")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4, 5, 8, 12], help="beam sizes")
    parser.add_argument(
        "--average", type=float, nargs="*", default=[0.6, 1.0, 1.4], help="alphas: log p / length^alpha"
    )
    parser.add_argument("--gnmt", type=float, nargs="*", default=[0.6, 1.0], help="alphas of GNMT's length penalty")
    listed = " ".join(map(str, COVERAGE_PENALTIES))
    parser.add_argument(
        "--coverage", type=float, nargs="*", help=f"coverage penalties; default: {listed}, none without attention"
    )
    parser.add_argument("--none", action=argparse.BooleanOptionalAction, default=True, help="try without a penalty")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], help="default: as trained")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16", "fp16"], help="default: as trained")
    parser.add_argument("--threads", type=threads, help="CPU threads; default: as trained")
    parser.add_argument("--output", help="folder; default: outputs/tune_search/DATE/TIME")
    options = parser.parse_args()
    if not (options.none or options.average or options.gnmt):
        parser.error("--no-none without any --average or --gnmt leaves nothing to try")
    logging.getLogger("nmt").addHandler(logging.StreamHandler())
    tune_memory()
    output = options.output or f"outputs/tune_search/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"
    try:
        with output_folder(output, "tune_search.json", "the results of tune_search", "--output ") as folder:
            write(measure(options), folder)
    except (UserError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted before the first setting was complete\n")


if __name__ == "__main__":
    main()
