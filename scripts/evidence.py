"""Pack the evidence for the scores of finished runs, without any text of the corpus; check it, and compare the runs.

    python scripts/evidence.py pack SWEEP FOLDER     # one small file for each finished run below SWEEP
    python scripts/evidence.py table FOLDER          # compare the runs: table, pictures and page in FOLDER/comparison
    python scripts/evidence.py check FOLDER          # recompute every score, and every figure of that comparison

A file NAME.npz holds, for validation and test set, each metric's statistics of each sentence (`test/bleu` (10, N),
`test/chrf` (18, N), `test/ter` (2, N), ...) and the number of words of each source (`test/words` (N,)). Its `record` is
JSON: the configuration, the results, the learning curves and the machine of the run. Existing files are kept.

Runs that trained beside other work, or on several machines, have times that do not compare. If FOLDER has the
benchmark.json of `scripts/benchmark.py --presets`, the speeds of each preset are read there.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import packing

from nmt.compare.compare import ALL, Comparison, compare, find, group
from nmt.compare.entry import Entry, HeldOut, Training, describe_machine, read_metrics, read_settings
from nmt.compare.report import tables, write_files
from nmt.config.errors import UserError
from nmt.evaluate.metrics import METRICS, Counted, signatures
from nmt.export.contents import shared_config, shared_manifest
from nmt.system.files import to_json, write_atomically
from nmt.system.run import FINISHED, RunDirectory, load_values, read_json, runs_below
from nmt.system.text_table import markdown

SPEEDS = "benchmark.json"  # file with the speed of every preset, beside the files of the runs
PAIRS = "pairs.json"  # the differences of all pairs, in the folder of the comparison
CHECKED = ("budget", "machines", "systems", "differences", "unequal", "runs")  # keys of a comparison
SAMPLES = 10_000  # bootstrap samples, and trials of the randomisation


def pack_run(run: RunDirectory, file: Path) -> None:
    """Pack a finished run."""
    arrays, results = dict[str, Any](), read_json(run.results)
    for split, held_out, counts in packing.count_splits(run.path, results):
        arrays |= {name: rows.T.astype(np.uint16) for name, rows in counts.items()}
        arrays[f"{split}/words"] = np.array([len(source.split()) for source in held_out.sources], np.uint16)
    record = {
        "config": shared_config(load_values(run.config)),
        "manifest": shared_manifest(run.read_manifest()),
        "results": packing.without_details(results),
        "metrics": read_metrics(run.metrics),
    }
    packing.write(file, arrays, record)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def pack(sweep: Path, folder: Path) -> int:
    """Pack every finished run below `sweep` that `folder` lacks. Returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in runs_below(sweep):
        run, file = RunDirectory(path), folder / f"{packing.name_of(path, sweep)}.npz"
        if run.status() == FINISHED and not file.exists():
            pack_run(run, file)
    return check(folder)


def unpack(file: Path, split: str) -> tuple[Entry, HeldOut]:
    """Read a packed run as nmt-compare reads the directory of a run. Each source consists of placeholders, as many as
    the source had words, and each reference of as many as its first metric counts: tokens for BLEU."""
    record, arrays = packing.read(file)
    counts = {name: arrays[f"{split}/{name}"].T for name in METRICS if f"{split}/{name}" in arrays}
    sources, references = (
        [" ".join("x" * int(words)) for words in lengths]
        for lengths in (arrays[f"{split}/words"], next(iter(counts.values()))[:, packing.OF_REFERENCE])
    )
    record["config"]["evaluation"]["metrics"] = [*counts]
    settings, result = read_settings(record["config"]), record["results"][split]
    entry = packing.entry_of(
        file.stem,
        record,
        aer=100 * result["aer"] if "aer" in result else None,
        training=Training.read(record["manifest"], record["metrics"]),
        sentences_per_second=result["sentences_per_second"],
        counted=Counted(counts, signatures(settings)),
    )
    return entry, HeldOut(sources, references, settings)


def with_speeds(entry: Entry, benchmark: dict[str, Any]) -> Entry:
    """Replace the speeds of a run by those of its preset in a benchmark. Raises UserError if one is missing."""
    preset = entry.choices.get("attention")
    speeds = next((row for row in benchmark.get("presets", []) if row["attention"] == preset), {})
    if not {"milliseconds_an_update", "sentences_per_second"} <= speeds.keys():
        raise UserError(f"{SPEEDS}: lacks a speed of {preset}; run scripts/benchmark.py --presets, with decoding")
    update = speeds["milliseconds_an_update"] / 1000
    training = replace(entry.training, update_seconds=update, machine=describe_machine(benchmark["machine"]))
    return replace(entry, training=training, sentences_per_second=speeds["sentences_per_second"])


def compared(folder: Path, split: str, baseline: str | None) -> Comparison:
    """Compare all packed runs of a folder as nmt-compare does. Raises UserError if the folder has none."""
    runs = [unpack(file, split) for file in sorted(folder.glob("*.npz"))]
    if not runs:
        raise UserError(f"{folder}: has no packed runs")
    entries, (first, held_out) = [entry for entry, _ in runs], runs[0]
    for entry, other in runs:
        if (difference := held_out.difference(other)) is not None:
            raise UserError(f"{first.name} and {entry.name}: {difference}")
    if (folder / SPEEDS).is_file():
        benchmark = read_json(folder / SPEEDS)
        entries = [with_speeds(entry, benchmark) for entry in entries]
    systems = group(entries)
    base = baseline if baseline in (None, ALL) else find(baseline, systems)
    if baseline is not None and base is None:
        raise UserError(f"baseline={baseline}: not one of {', '.join(system.name for system in systems)}")
    settings = {"examples": 0, "sentences": [], "bootstrap_samples": SAMPLES, "randomisation_trials": SAMPLES}
    return {**compare(systems, held_out, split, baseline=baseline and base, **settings), "missing": []}


def pairs(folder: Path, split: str) -> list[dict[str, Any]]:
    """Return the difference of each pair of systems, with its interval and its p before any correction."""
    kept = ("system", "baseline", "difference", "difference_ci", "p_raw")
    return [{key: row[key] for key in kept} for row in compared(folder, split, ALL)["differences"]]


def table(folder: Path, baseline: str | None) -> int:
    """Compare the runs on the test set, and write the comparison to FOLDER/comparison. Returns the exit status."""
    comparison = compared(folder, "test", baseline)
    (folder / packing.COMPARISON).mkdir(exist_ok=True)
    write_files(comparison, folder / packing.COMPARISON)
    write_atomically(folder / packing.COMPARISON / PAIRS, to_json({"pairs": pairs(folder, "test")}, indent=1).encode())
    print(tables(comparison, markdown))
    return 0


def check(folder: Path) -> int:
    """Recompute all scores, and the comparison if there is one. Returns 1 if a figure differs from the recorded one."""
    wrong, files = list[str](), sorted(folder.glob("*.npz"))
    for file in files:
        record, arrays = packing.read(file)
        wrong += packing.wrong_scores(str(file), {key: rows.T for key, rows in arrays.items()}, record["results"])
    written, differs = folder / packing.COMPARISON / "comparison.json", packing.tell_wrong_scores(len(files), wrong)
    return int(differs | (written.is_file() and _comparison_differs(folder, written)))


def _comparison_differs(folder: Path, written: Path) -> bool:
    """Check the figures of a written comparison against the packed runs, and print those that differ."""
    (recorded,) = read_json(written)["comparisons"]
    # Without a named baseline, all pairs were tested, and the recorded baseline is the best system.
    named = recorded["comparisons"] < len(recorded["systems"])
    again = compared(folder, recorded["split"], recorded["baseline"] if named else None)
    before = {key: recorded.get(key) for key in CHECKED} | read_json(folder / packing.COMPARISON / PAIRS)
    after = {key: again[key] for key in CHECKED} | {"pairs": pairs(folder, recorded["split"])}
    return packing.tell_differences(folder / packing.COMPARISON, before, after)


def main() -> int:
    baseline = {"help": "a system of the table; without: the best"}
    return packing.run_command(__doc__, pack, table, check, baseline=baseline)


if __name__ == "__main__":
    sys.exit(main())
