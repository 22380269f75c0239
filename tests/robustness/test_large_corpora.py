"""Millions of pairs are prepared and trained on in memory that hardly depends on how many they are."""

import os
import random
import re
import time
from pathlib import Path

import pytest
from forks import Work, forked

MILLION = 1_000_000
OVERRIDES = [
    "data=files",
    "size=demo",
    "tokenizer.vocab_size=3000",
    "search=greedy",
    "training.max_steps=20",
    "validation.samples=0",
    "threads=1",
    "precision=fp32",
    "device=cpu",
]


def write_corpus(folder: Path, pairs: int) -> None:
    """Words with the frequencies of a language's; the target is the source backwards."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    for name, count in (("train", pairs), ("valid", 300)):
        with (folder / f"{name}.en").open("w") as source, (folder / f"{name}.de").open("w") as target:
            for _ in range(-(-count // 10_000)):
                drawn = rng.choices(words, weights, k=70_000)
                for start in range(0, 70_000, 7):
                    sentence = drawn[start : start + 7]
                    source.write(f"{' '.join(sentence)}\n")
                    target.write(f"{' '.join(reversed(sentence))} .\n")


def peak(work: Work, output: Path) -> int:
    """Bytes of memory that the process needed for itself, without files that are mapped; it must succeed."""
    child, most = forked(work, output), 0
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, output.read_text()
            return most
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{child}/status").read_text())
        most = max(most, 1024 * int(found[1]) if found else 0)
        time.sleep(0.05)


def training(folder: Path) -> Work:
    def work() -> int:
        import sys

        from nmt.cli.train import main

        prefixes = [f"data.train={folder / 'train'}", f"data.validation={folder / 'valid'}"]
        places = [f"data.cache_dir={folder / 'cache'}", f"hydra.run.dir={folder / 'run'}"]
        sys.argv = ["nmt-train", *OVERRIDES, *prefixes, *places]
        main()
        return 0

    return work


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_preparing_and_training_need_no_more_memory_for_more_pairs(tmp_path: Path) -> None:
    peaks = []
    for pairs in (MILLION // 2, 2 * MILLION):
        folder = tmp_path / str(pairs)
        folder.mkdir()
        write_corpus(folder, pairs)
        peaks.append(peak(training(folder), tmp_path / "output.txt"))
    print([f"{size / 2**20:.0f} MiB" for size in peaks])
    assert max(peaks) < 1536 * 2**20
    assert peaks[1] - peaks[0] < 200 * 1.5 * MILLION  # bytes a pair; as Python strings a pair takes four times that
