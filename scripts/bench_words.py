"""Compare the training of nmt and of yoyodyne on words: throughput, and with --epochs the error rate on the dev words.

python scripts/bench_words.py TRAIN.tsv DEV.tsv --yoyodyne PYTHON [OPTION ...]

The tables have a word and its phones, separated by spaces, in each row. PYTHON is the interpreter of a virtual
environment that has yoyodyne. The systems take turns, each in a process of its own. All train on batches of 64 words.
  --rounds N      rounds of the throughput (default 3)
  --updates N     timed updates of a round (default 50, after 10 for warm-up)
  --threads N     threads of each process (default 2)
  --epochs N      instead of the throughput, train each system for N epochs, and print the WER of its best epoch
  --only NAME     leave out the systems whose name does not contain NAME
Throughput is in target symbols per second of the updates and of loading their batches, ends of words included.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from nmt.config.errors import UserError
from nmt.system.text_table import Column, decimals, markdown

WARM_UP = 10  # updates before the timed ones
# As in yoyodyne's attentive LSTM: additive attention before the step, dropout of embeddings and readout. Only nmt has a
# readout layer and computes the first state, and so more parameters.
SAME_SIZES = [
    "experiment=g2p",
    "size=demo",
    "attention=bahdanau",
    "attention.score.dim=256",
    "embedding.dim=128",
    "encoder.hidden=256",
    "decoder.hidden=256",
    "decoder.bridge=mean",
    "decoder.readout=attentional",
    "embedding.tie_output=false",
    "embedding.dropout=0.2",
    "encoder.dropout=0",
    "decoder.dropout=0.2",
    "training.label_smoothing=0",
    "optimizer.lr=0.001",
    "schedule=constant",
    "training.batch_sentences=64",
    "training.batch_tokens=8192",
    "precision=fp32",
]
SYSTEMS = {"yoyodyne": None, "nmt, same sizes": SAME_SIZES, "nmt, experiment=g2p": ["experiment=g2p"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("dev", type=Path)
    parser.add_argument("--yoyodyne", metavar="PYTHON", required=True)
    for name, default in (("rounds", 3), ("updates", 50), ("threads", 2), ("epochs", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--only", default="", metavar="NAME")
    options = parser.parse_args()
    systems = {name: words for name, words in SYSTEMS.items() if options.only in name}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    try:
        for number in range(1 if options.epochs else options.rounds):
            for name, words in systems.items():
                found = yoyodyne(options) if words is None else nmt(words, options)
                results[name].append(found)
                print(f"round {number + 1}, {name}: {found}", file=sys.stderr, flush=True)
    except (UserError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    print(table(results))


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Lay out a row for each system, with the median over its rounds and the ratio to the first system."""
    rows = [
        {"system": name} | {key: median(round_[key] for round_ in rounds) for key in rounds[0]}
        for name, rounds in results.items()
    ]
    for row in rows:
        row["ratio"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    columns = [
        Column("system", "System", str),
        Column("parameters", "Parameters", "{:,.0f}".format),
        Column("tokens_per_second", "Target symbols per second", "{:,.0f}".format),
        Column("ratio", f"Ratio to {rows[0]['system']}", decimals(2)),
        Column("wer", "WER on the dev words, %", decimals(2)),
    ]
    return markdown(rows, [column for column in columns if column.key in rows[0]])


def nmt(overrides: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Train with nmt-train, and return what its run directory records."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        length = [f"training.max_epochs={options.epochs}", "validation.patience=null"] if options.epochs else []
        length = length or [f"training.max_steps={WARM_UP + options.updates}", "training.log_every=10"]
        data = [f"data.train={options.train}", f"data.validation={options.dev}", "logger=[]", "validation.samples=0"]
        words = [*overrides, *data, *length, f"threads={options.threads}", f"hydra.run.dir={run}"]
        command = [sys.executable, "-c", "from nmt.cli.entry import train; train()", *words]
        finish(command, options.threads)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        speeds = [record["train/tokens_per_second"] for record in records if "train/tokens_per_second" in record]
        count = re.search(r"model: ([\d,]+) parameters", (run / "train.log").read_text(encoding="utf-8"))
    assert count is not None
    found = {"parameters": float(count[1].replace(",", "")), "tokens_per_second": median(speeds[1:])}
    if options.epochs:
        found["wer"] = min(record["validation/wer"] for record in records if "validation/wer" in record)
    return found


def yoyodyne(options: argparse.Namespace) -> dict[str, float]:
    """Train with yoyodyne, and return what `bench_words_yoyodyne.py` prints."""
    worker = Path(__file__).with_name("bench_words_yoyodyne.py")
    words = [options.train, options.dev, WARM_UP, options.updates, options.threads, options.epochs]
    printed = finish([options.yoyodyne, str(worker), *map(str, words)], options.threads)
    return json.loads(printed.splitlines()[-1])


def finish(command: list[str], threads: int) -> str:
    """Run a command and return what it prints. Raises UserError, with its last line, if it fails."""
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"{command[0]} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.stdout


if __name__ == "__main__":
    main()
