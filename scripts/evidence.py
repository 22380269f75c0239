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

import argparse
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_LZMA, ZipFile

import numpy as np

from nmt.compare.compare import ALL, Comparison, compare, find, group
from nmt.compare.entry import (
    Entry,
    HeldOut,
    Training,
    count_sentences,
    describe_machine,
    read_metrics,
    read_run,
    read_settings,
)
from nmt.compare.report import tables, write_files
from nmt.config.errors import UserError
from nmt.config.schema.commands import NO_EFFECT_KEYS
from nmt.config.validation import flatten
from nmt.evaluate.metrics import METRICS, Counted, Counts, corpus_score, signatures
from nmt.export.contents import shared_config, shared_manifest
from nmt.system.files import to_json, write_atomically
from nmt.system.run import (
    FINISHED,
    RunDirectory,
    digest,
    load_values,
    read_json,
    runs_below,
    start_choices,
)
from nmt.system.text_table import markdown

SPLITS = ("validation", "test")
NOT_PACKED = ("by_length", "search", "directions")  # keys of the results that follow from the other values
SPEEDS = "benchmark.json"  # file with the speed of every preset, beside the files of the runs
COMPARISON = "comparison"  # folder of the comparison, beside the files of the runs
PAIRS = "pairs.json"  # the differences of all pairs, in the folder of the comparison
CHECKED = ("budget", "machines", "systems", "differences", "unequal", "runs")  # keys of a comparison
SAMPLES = 10_000  # bootstrap samples, and trials of the randomisation
OF_REFERENCE = 1  # column of each metric's statistics that is the same for all outputs, such as the reference's length
ROUNDING = 1e-4  # largest difference between a recorded and a recomputed score that counts as equal
RELATIVE = 1e-9  # the same for the figures of a comparison, relative to the figure


def packed(run: RunDirectory) -> dict[str, Any]:
    """Collect the arrays of a finished run by name, among them its `record`."""
    arrays: dict[str, Any] = {}
    results = read_json(run.results)
    for split in (split for split in SPLITS if split in results):
        entry, held_out = read_run(run.path, split)
        counted = count_sentences(entry, held_out)
        arrays |= {f"{split}/{name}": rows.T.astype(np.uint16) for name, rows in counted.counts.items()}
        arrays[f"{split}/words"] = np.array([len(source.split()) for source in held_out.sources], np.uint16)
    record = {
        "config": shared_config(load_values(run.config)),
        "manifest": shared_manifest(run.read_manifest()),
        "results": {
            split: {key: value for key, value in scores.items() if key not in NOT_PACKED}
            for split, scores in results.items()
        },
        "metrics": read_metrics(run.metrics),
    }
    return {**arrays, "record": np.frombuffer(json.dumps(record).encode(), np.uint8)}


def pack(sweep: Path, folder: Path) -> int:
    """Pack every finished run below `sweep` that `folder` lacks. Returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in runs_below(sweep):
        name = "_".join(path.relative_to(sweep).parts) or path.name
        run, file = RunDirectory(path), folder / f"{name}.npz"
        if run.status() == FINISHED and not file.exists():
            arrays = packed(run)
            write_atomically(file, partial(write_arrays, arrays))
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
    return check(folder)


def write_arrays(arrays: dict[str, Any], stream: BinaryIO) -> None:
    """Write arrays as np.savez_compressed does, but with LZMA, whose files are a third smaller."""
    with ZipFile(stream, "w", ZIP_LZMA) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)


def unpack(file: Path, split: str) -> tuple[Entry, HeldOut]:
    """Read a packed run as nmt-compare reads the directory of a run.

    Each source consists of placeholders, as many as the source had words, and each reference of as many as its first
    metric counts: tokens for BLEU.
    """
    with np.load(file, allow_pickle=False) as arrays:
        record = json.loads(arrays["record"].tobytes())
        counts = {name: arrays[f"{split}/{name}"].T.astype(np.int64) for name in METRICS if f"{split}/{name}" in arrays}
        sources, references = (
            [" ".join("x" * int(words)) for words in lengths]
            for lengths in (arrays[f"{split}/words"], next(iter(counts.values()))[:, OF_REFERENCE])
        )
    config, manifest, result = record["config"], record["manifest"], record["results"][split]
    config["evaluation"]["metrics"] = [*counts]
    settings, start = read_settings(config), manifest["starts"][0]
    entry = Entry(
        name=file.stem,
        hypotheses=[file.stem],  # differs between runs, since `group` leaves out equal outputs of a seed
        seed=config["seed"],
        config=digest({key: value for key, value in flatten(config) if key not in {"seed", *NO_EFFECT_KEYS}}),
        choices=start_choices(start),
        aer=100 * result["aer"] if "aer" in result else None,
        parameters=manifest["parameters"],
        training=Training.read(manifest, record["metrics"]),
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
    (folder / COMPARISON).mkdir(exist_ok=True)
    write_files(comparison, folder / COMPARISON)
    write_atomically(folder / COMPARISON / PAIRS, to_json({"pairs": pairs(folder, "test")}, indent=1).encode())
    print(tables(comparison, markdown))
    return 0


def check(folder: Path) -> int:
    """Recompute all scores, and the comparison if there is one. Returns 1 if a figure differs from the recorded one."""
    wrong, files = [], sorted(folder.glob("*.npz"))
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            results = json.loads(arrays["record"].tobytes())["results"]
            keys = [name for name in arrays if name.rpartition("/")[2] in METRICS]
            wrong += [line for key in keys if (line := wrong_score(str(file), key, arrays[key].T, results))]
    print("\n".join([*wrong, f"{len(files)} runs checked, {len(wrong)} scores differ"]))
    written = folder / COMPARISON / "comparison.json"
    return int(bool(wrong) | (written.is_file() and _comparison_differs(folder, written)))


def wrong_score(run: str, key: str, counts: Counts, results: dict[str, Any]) -> str:
    """Say how the recorded score of a split and metric, such as "test/bleu", differs from the one that the sentence
    statistics (N, k) give; empty if the two are equal."""
    split, _, metric = key.partition("/")
    score, recorded = corpus_score(counts, metric), results[split][metric]
    equal = abs(score - recorded) <= ROUNDING
    return "" if equal else f"{run}: {split} {metric} is {recorded}, its statistics give {score:.4f}"


def _comparison_differs(folder: Path, written: Path) -> bool:
    """Check the figures of a written comparison against the packed runs, and print those that differ."""
    (recorded,) = read_json(written)["comparisons"]
    # Without a named baseline, all pairs were tested, and the recorded baseline is the best system.
    named = recorded["comparisons"] < len(recorded["systems"])
    again = compared(folder, recorded["split"], recorded["baseline"] if named else None)
    before = {key: recorded.get(key) for key in CHECKED} | read_json(folder / COMPARISON / PAIRS)
    after = {key: again[key] for key in CHECKED} | {"pairs": pairs(folder, recorded["split"])}
    wrong = differing(before, after)
    print("\n".join([*wrong, f"{folder / COMPARISON}: {len(wrong)} figures differ"]))
    return bool(wrong)


def differing(recorded: object, again: object) -> list[str]:
    """Say for each figure of recorded values how it differs from the recomputed one. The last digits of floats may
    differ, as the order of sums decides them."""
    before, after = (dict(_leaves("", json.loads(to_json({"": values})))) for values in (recorded, again))
    return [
        f"{name.lstrip('.')} is {before.get(name)}, the runs give {after.get(name)}"
        for name in before | after
        if not _equal(before.get(name), after.get(name))
    ]


def _equal(recorded: object, again: object) -> bool:
    if isinstance(recorded, float) and isinstance(again, float):
        return math.isclose(recorded, again, rel_tol=RELATIVE)
    return recorded == again


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:  # noqa: ANN401
    """List the figures in nested lists and mappings, each with its place, such as "systems[0].bleu"."""
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in _leaves(f"{name}.{key}", part)]
    if isinstance(value, list):
        return [leaf for number, part in enumerate(value) for leaf in _leaves(f"{name}[{number}]", part)]
    return [(name, value)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, places in (("pack", ("sweep", "folder")), ("table", ("folder",)), ("check", ("folder",))):
        command = commands.add_parser(name)
        for place in places:
            command.add_argument(place, type=Path)
        if name == "table":
            command.add_argument("--baseline", help="a system of the table; without: the best")
    options = parser.parse_args()
    try:
        if options.command == "pack":
            return pack(options.sweep, options.folder)
        return table(options.folder, options.baseline) if options.command == "table" else check(options.folder)
    except UserError as error:
        print(f"evidence: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
