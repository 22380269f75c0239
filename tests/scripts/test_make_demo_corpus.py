"""The corpus that comes with the package: the text that published scores refer to, from the grammar of the script."""

import gzip
import hashlib
import itertools
from pathlib import Path

import pytest
from conftest import script

from nmt.data.corpus import DEMO


def rows_of(path: Path) -> list[tuple[str, ...]]:
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
    return [tuple(line.split("\t")) for line in lines]


def test_the_text_is_that_of_the_published_scores() -> None:
    assert hashlib.sha256(gzip.decompress(DEMO.read_bytes())).hexdigest()[:16] == "ec7e018ad4eb1b2c"
    assert DEMO.stat().st_size < 1_200_000


def test_the_grammar_writes_it_whatever_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, files = script("make_demo_corpus"), [tmp_path / name for name in ("a.tsv.gz", "b.tsv.gz")]
    monkeypatch.setattr(maker, "PAIRS", 200)
    for now, file in enumerate(files):
        monkeypatch.setattr("time.time", lambda now=now: 1e9 + now)
        monkeypatch.setattr("sys.argv", ["make_demo_corpus", str(file)])
        maker.main()
    assert files[0].read_bytes() == files[1].read_bytes()
    assert rows_of(files[0]) == rows_of(DEMO)[:201]


def test_no_sentence_repeats_and_every_word_is_linked() -> None:
    header, *rows = rows_of(DEMO)
    assert header == ("en", "fr", "alignment")
    assert len(rows) == len({english for english, _, _ in rows}) == 17_000
    for english, french, alignment in itertools.islice(rows, 2000):
        links = [tuple(map(int, link.split("-"))) for link in alignment.split()]
        assert links == sorted(set(links))
        assert {i for i, _ in links} == set(range(len(english.split(" "))))
        assert {j for _, j in links} == set(range(len(french.split(" "))))
