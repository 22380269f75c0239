"""Pack what proves the figures of finished runs, without any text of the corpus, and check what was packed.

    python scripts/evidence.py pack SWEEP FOLDER    # one small file for each finished run below SWEEP
    python scripts/evidence.py check FOLDER         # recompute every score from its statistics

A file NAME.npz holds, for validation and test set, sacreBLEU's statistics of each sentence (`test/bleu` (10, N),
`test/chrf` (18, N), `test/ter` (2, N)) and the number of words of each source (`test/words` (N,)). Its `record` is
JSON: the configuration, the results, the learning curves and the machine of the run. Files that exist are kept.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_LZMA, ZipFile

import numpy as np

from nmt.compare.entry import read_run
from nmt.config.errors import UserError
from nmt.evaluate.bleu import FORMULAS, METRICS, count
from nmt.export.contents import shared_config, shared_manifest
from nmt.system.files import write_atomically
from nmt.system.run import FINISHED, RunDirectory, read_json, runs_below
from nmt.system.saved_config import load_values

SPLITS = ("validation", "test")
NOT_PACKED = (
    "bleu_by_length",
    "search",
    "directions",
)  # of the results: they follow from the rest or are configuration


def packed(run: RunDirectory) -> dict[str, Any]:
    """The arrays of a finished run and its record, by name."""
    arrays: dict[str, Any] = {}
    results = read_json(run.results)
    for split in (split for split in SPLITS if split in results):
        entry, held_out = read_run(run.path, split)
        counted = count(entry.hypotheses, held_out.references, held_out.settings)
        arrays |= {f"{split}/{name}": rows.T.astype(np.uint16) for name, rows in counted.counts.items()}
        arrays[f"{split}/words"] = np.array([len(source.split()) for source in held_out.sources], np.uint16)
    record = {
        "config": shared_config(load_values(run.config)),
        "manifest": shared_manifest(run.read_manifest()),
        "results": {
            split: {key: value for key, value in scores.items() if key not in NOT_PACKED}
            for split, scores in results.items()
        },
        "metrics": [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()],
    }
    return {**arrays, "record": np.frombuffer(json.dumps(record).encode(), np.uint8)}


def pack(sweep: Path, folder: Path) -> int:
    """Pack every finished run below `sweep` that `folder` lacks. Returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in runs_below(sweep):
        run, file = RunDirectory(path), folder / f"{path.name}.npz"
        if run.status() == FINISHED and not file.exists():
            arrays = packed(run)
            write_atomically(file, partial(_write, arrays))
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
    return check(folder)


def _write(arrays: dict[str, Any], stream: BinaryIO) -> None:
    """As np.savez_compressed, but by LZMA, which takes a third less."""
    with ZipFile(stream, "w", ZIP_LZMA) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)


def check(folder: Path) -> int:
    """Recompute all scores from their statistics. Returns 1 if any differs from what its run recorded."""
    wrong, files = 0, sorted(folder.glob("*.npz"))
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            record = json.loads(arrays["record"].tobytes())
            for split in (split for split in SPLITS if f"{split}/bleu" in arrays):
                for metric in METRICS:
                    score = float(FORMULAS[metric](arrays[f"{split}/{metric}"].sum(1, dtype=np.float64)))
                    recorded = record["results"][split][metric]
                    if abs(score - recorded) > 1e-4:  # noqa: PLR2004
                        wrong += 1
                        print(f"{file}: {split} {metric} is {recorded}, its statistics give {score:.4f}")
    print(f"{len(files)} runs checked, {wrong} scores differ")
    return int(wrong > 0)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, places in (("pack", ("sweep", "folder")), ("check", ("folder",))):
        command = commands.add_parser(name)
        for place in places:
            command.add_argument(place, type=Path)
    options = parser.parse_args()
    try:
        return pack(options.sweep, options.folder) if options.command == "pack" else check(options.folder)
    except UserError as error:
        print(f"evidence: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
