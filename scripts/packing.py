"""What the scripts of evidence share: the files of packed runs, the check of recorded figures, and the command line."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_LZMA, ZipFile

import numpy as np
from numpy.typing import NDArray

from nmt.compare.entry import Entry, HeldOut, count_sentences, read_run
from nmt.config.checks import flatten
from nmt.config.errors import UserError
from nmt.config.schema.commands import NO_EFFECT_KEYS
from nmt.evaluate.metrics import METRICS, Counts, corpus_score
from nmt.system.files import to_json, write_atomically
from nmt.system.run import digest, start_choices

SPLITS = ("validation", "test")
NOT_PACKED = ("by_length", "search", "directions")  # keys of the results that follow from the other values
COMPARISON = "comparison"  # folder of the comparison, beside the packed files
OF_REFERENCE = 1  # column of each metric's statistics that is the same for all outputs, such as the reference's length
ROUNDING = 1e-4  # largest difference between a recorded and a recomputed score that counts as equal
RELATIVE = 1e-9  # the same for the figures of a comparison, relative to the figure
Json = dict[str, Any]


def name_of(path: Path, sweep: Path) -> str:
    """Name a run after its folders below that of its sweep."""
    return "_".join(path.relative_to(sweep).parts) or path.name


def count_splits(path: Path, results: Json) -> Iterator[tuple[str, HeldOut, dict[str, Counts]]]:
    """Yield each held-out split of a run, its texts and the statistics (N, k) of its sentences, by split and metric,
    such as "test/bleu"."""
    for split in (split for split in SPLITS if split in results):
        entry, texts = read_run(path, split)
        yield split, texts, {f"{split}/{name}": rows for name, rows in count_sentences(entry, texts).counts.items()}


def without_details(results: Json) -> Json:
    """Leave out of the results of each split what follows from the other values."""
    return {
        split: {key: value for key, value in scores.items() if key not in NOT_PACKED}
        for split, scores in results.items()
    }


def write(file: Path, arrays: Mapping[str, NDArray[Any]], record: object) -> None:
    """Write arrays, and a record as JSON, to a file of NumPy that np.load reads."""
    encoded = np.frombuffer(json.dumps(record).encode(), np.uint8)
    write_atomically(file, partial(_write_arrays, {**arrays, "record": encoded}))


def _write_arrays(arrays: Mapping[str, NDArray[Any]], stream: BinaryIO) -> None:
    """Write arrays as np.savez_compressed does, but with LZMA, whose files are a third smaller."""
    with ZipFile(stream, "w", ZIP_LZMA) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)


def read(file: Path) -> tuple[Any, dict[str, NDArray[np.int64]]]:
    """Read the record and the other arrays of a packed file."""
    with np.load(file, allow_pickle=False) as arrays:
        record = json.loads(arrays["record"].tobytes())
        return record, {name: arrays[name].astype(np.int64) for name in arrays if name != "record"}


def entry_of(name: str, record: Json, **more: Any) -> Entry:  # noqa: ANN401
    """Describe a packed run as nmt-compare does, so that it groups the runs into systems and names them."""
    config, manifest = record["config"], record["manifest"]
    return Entry(
        name=name,
        hypotheses=[name],  # differs between runs, since `group` leaves out equal outputs of a seed
        seed=config["seed"],
        config=digest({key: value for key, value in flatten(config) if key not in {"seed", *NO_EFFECT_KEYS}}),
        choices=start_choices(manifest["starts"][0]),
        parameters=manifest["parameters"],
        **more,
    )


def wrong_scores(run: str, counts: Mapping[str, Counts], results: Json) -> list[str]:
    """Say which recorded scores differ, and how, from those that the sentence statistics (N, k) give. The keys of
    `counts` are splits and metrics, such as "test/bleu"."""
    wrong = []
    for key, rows in counts.items():
        split, _, metric = key.partition("/")
        if metric in METRICS and abs((score := corpus_score(rows, metric)) - results[split][metric]) > ROUNDING:
            wrong.append(f"{run}: {split} {metric} is {results[split][metric]}, its statistics give {score:.4f}")
    return wrong


def tell_wrong_scores(runs: int, wrong: list[str]) -> bool:
    """Print which scores of so many runs differ, and return whether any does."""
    print("\n".join([*wrong, f"{runs} runs checked, {len(wrong)} scores differ"]))
    return bool(wrong)


def tell_differences(place: Path, recorded: object, again: object) -> bool:
    """Print each figure of recorded values that differs from the recomputed one, and return whether any does. The last
    digits of floats may differ, as the order of sums decides them."""
    before, after = (dict(_leaves("", json.loads(to_json({"": values})))) for values in (recorded, again))
    wrong = [
        f"{name.lstrip('.')} is {before.get(name)}, the runs give {after.get(name)}"
        for name in before | after
        if not _equal(before.get(name), after.get(name))
    ]
    print("\n".join([*wrong, f"{place}: {len(wrong)} figures differ"]))
    return bool(wrong)


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


def run_command(
    usage: str | None,
    pack: Callable[[Path, Path], int],
    table: Callable[..., int],
    check: Callable[[Path], int],
    **options: Json,
) -> int:
    """Run the command that sys.argv asks for: pack SWEEP FOLDER, table FOLDER or check FOLDER. Returns the exit status.
    options: the settings of argparse for each option of `table`."""
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, work in (("pack", pack), ("table", table), ("check", check)):
        command = commands.add_parser(name)
        command.set_defaults(work=work)
        for place in ("sweep", "folder") if work is pack else ("folder",):
            command.add_argument(place, type=Path)
        for option, settings in options.items() if work is table else ():
            command.add_argument(f"--{option}", **settings)
    asked = vars(parser.parse_args())
    try:
        return asked.pop("work")(**asked)  # type: ignore[no-any-return]
    except UserError as error:
        print(f"{Path(sys.argv[0]).stem}: error: {error}", file=sys.stderr)
        return 2
