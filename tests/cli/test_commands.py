"""The commands nmt-train, nmt-evaluate and nmt-translate as a user runs them."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from forks import call, error_of, worked

import nmt
from nmt.data.corpus import DemoPairs

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    done = worked("nmt-train", *TINY, "training.max_steps=6", "validation.samples=1", cwd=home)
    *_, pictures, board, translate, last = done.stdout.decode().splitlines()
    assert last.startswith("run: outputs/train/")
    assert (home / pictures.removeprefix("alignments: ") / "test").is_dir()
    assert board == f"tensorboard: tensorboard --logdir {last[5:]} --host localhost"
    assert translate == f"translate: nmt-translate run={last[5:]}"
    return home / last[5:]


def content(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text()))


def evaluated(run: Path, *words: str) -> dict[str, Any]:
    """Run nmt-evaluate, and return the object in the last line of its output."""
    done = worked("nmt-evaluate", f"run={run}", "threads=1", *words, cwd=run.parent)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_evaluate_ends_in_one_json_object_that_equals_the_results(run: Path) -> None:
    written = content(run / "results.json")
    assert written.keys() == {"validation", "test"}
    printed = evaluated(run, "split=validation")
    assert printed["split"] == "validation"
    for key in ("bleu", "chrf", "ter", "signatures", "aer", "search"):
        assert printed[key] == written["validation"][key]
    assert printed["sentences_per_second"] > 0


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = shutil.copytree(run, tmp_path / "locked")
    monkeypatch.setattr(os, "access", lambda path, _: path != locked)  # it allows all to root
    done = call("nmt-evaluate", f"run={locked}", cwd=tmp_path)
    saving = "cannot be written; give output=FOLDER to save the results elsewhere"
    assert (error_of(done), done.stdout) == (f"nmt-evaluate: error: {locked}: {saving}", b"")


def test_scores_that_cannot_be_saved_are_printed(run: Path, tmp_path: Path) -> None:
    full = shutil.copytree(run, tmp_path / "full")
    (full / "hypotheses" / "test.txt").unlink()
    (full / "hypotheses" / "test.txt").mkdir()
    done = call("nmt-evaluate", f"run={full}", cwd=tmp_path)
    assert json.loads(done.stdout)["bleu"] == content(run / "results.json")["test"]["bleu"]
    assert error_of(done) == f"nmt-evaluate: error: {full}/hypotheses/test.txt: Is a directory"


def test_translate_scores_and_aligns_references(run: Path, home: Path) -> None:
    sources, targets = ["the cat sleeps .", "a dog"], ["le chat dort .", "un chien"]
    (home / "references").write_text("".join(f"{line}\n" for line in targets))
    given = [f"run={run}", "references=references", "alignments=forced.align", "buffer_lines=1"]
    done = worked("nmt-translate", *given, stdin="\n".join(sources).encode(), cwd=home)
    forced = nmt.Translator.load(run).score(sources, targets)
    assert [float(score) for score in done.stdout.split()] == pytest.approx([f.log_prob for f in forced], abs=1e-3)
    aligned = (home / "forced.align").read_text()
    assert aligned.splitlines() == [each.word_alignment() for each in forced]
    error_of(call("nmt-translate", f"run={run}", "nbest=9", "alignments=forced.align", stdin=b"a\n", cwd=home))
    assert (home / "forced.align").read_text() == aligned  # a refused request does not empty the file


@pytest.mark.parametrize("key", ["references", "constraints", "prefix", "glossary", "forbidden"])
def test_alignments_replace_no_file_that_is_read(key: str, run: Path, home: Path) -> None:
    text = "cat\tchat\n" if key == "glossary" else "chat\n"
    (home / "read").write_text(text)
    done = call("nmt-translate", f"run={run}", f"{key}=read", "alignments=read", stdin=b"a\n", cwd=home)
    assert f"alignments=read: is also {key}=; name another file" in error_of(done)
    assert (home / "read").read_text() == text


@pytest.mark.slow
def test_translate_starts_without_heavy_imports(run: Path, home: Path) -> None:
    code = (
        "import sys; sys.argv=['nmt-translate', 'run=" + str(run) + "'];"
        "heavy={'datasets','tensorboard','matplotlib','pandas','pyarrow','sacrebleu','sympy','torch._dynamo'};"
        "import atexit; atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr));"
        "from nmt.cli.translate import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], input=b"the cat\n", capture_output=True, cwd=home, check=True)
    assert done.stderr.decode().splitlines()[-1] == "[]"


def test_compare_ranks_runs_and_other_systems(run: Path, home: Path) -> None:
    worked("nmt-train", *TINY, "attention=none", "training.max_steps=2", "hydra.run.dir=other", cwd=home)
    (home / "their.fr").write_bytes((run / "data" / "test.target").read_bytes())
    quick = ["bootstrap_samples=100", "randomisation_trials=100"]
    done = worked("nmt-compare", f"runs=[{run},oth*]", "systems=['their system=their.fr']", *quick, cwd=home)
    title, _, head, _, *others, page = done.stdout.decode().splitlines()
    rows = [*itertools.takewhile(str.strip, others)]
    assert title.startswith("test: 8 sentences, BLEU nrefs:1|case:mixed")
    assert head.split()[:4] == ["#", "system", "seeds", "BLEU"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert rows[0].split()[1:5] == ["their", "system", "-", "100.00"]
    assert {row.split()[1] for row in rows[1:]} == {"bahdanau", "none"}
    assert page.startswith("page: outputs/compare/")
    assert (home / page.removeprefix("page: ")).is_file()


def test_resume_by_run(run: Path, home: Path) -> None:
    command = ["nmt-train", f"run={run}", "training.max_steps=8", "threads=1"]
    done = worked(*command, cwd=home)
    assert done.stdout.decode().splitlines()[-1] == f"run: {run.relative_to(home)}"
    assert b"resumed at step 6 of 8" in done.stderr
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = worked(*command, cwd=home)
    assert (again.stdout, again.stderr) == (done.stdout, b"already finished: skipped\n")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    pruned = {**content(run / "manifest.json"), "status": "pruned"}  # as if a sweep had ended it
    (run / "manifest.json").write_text(json.dumps(pruned))
    assert b"resumed at step 8 of 8" in worked(*command, cwd=home).stderr
    assert content(run / "manifest.json")["status"] == "finished"
    assert "encoder.hidden: run=" in error_of(call("nmt-train", f"run={run}", "encoder.hidden=9", cwd=home))


@pytest.mark.slow
def test_resume_by_run_where_the_corpus_has_moved(home: Path) -> None:
    (home / "old").mkdir()
    for name, pairs in (("train", DemoPairs(10, 200)), ("valid", DemoPairs(0, 10))):
        for side, lang in enumerate(("en", "de")):
            (home / "old" / f"{name}.{lang}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
    corpus = ["data=files", "data.train=old/train", "data.validation=old/valid", "tokenizer.vocab_size=300"]
    tiny = [value for value in TINY if not value.startswith(("data.", "tokenizer."))]
    worked("nmt-train", *corpus, *tiny, "training.max_steps=2", "hydra.run.dir=moved", cwd=home)
    (home / "old").rename(home / "new")
    again = ["nmt-train", "run=moved", "training.max_steps=4"]
    assert "old/train.en: no such file" in error_of(call(*again, cwd=home))
    done = worked(*again, "data.train=new/train", "data.validation=new/valid", cwd=home)
    assert b"resumed at step 2 of 4" in done.stderr
    assert f"train:\n  - {home}/new/train\n" in (home / "moved" / "config.yaml").read_text()
    assert "data: run=moved resumes with its saved configuration" in error_of(call(*again, "data=demo", cwd=home))


MISTAKES: list[tuple[list[str], str]] = [
    (["nmt-train", "attention=bahdanaw"], "attention=bahdanaw: not one of bahdanau, chorowski, coverage, entmax, "),
    (["nmt-train", "--cfg", "job", "--resolve", "data=files"], "set size=small, base or large to see"),
    (["nmt-evaluate"], "run: missing; give it as run=..."),
    (["nmt-evaluate", "run={run}", "output={run}"], "holds files other than an evaluation; name another folder"),
    (["nmt-translate", "run={run}", "references=/dev/null"], "references=/dev/null: line 1 is missing in this file"),
    (["nmt-translate", "run={run}", "alignments=/dev/stdin"], "is also the input"),
    (["nmt-compare", "runs=occupied"], "runs=occupied: is neither a run nor a folder that holds runs"),
    (["nmt-compare", "runs={run}", "sentences=99"], "sentences=99: the held-out set has 8"),
]


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[" ".join(command) for command, _ in MISTAKES])
def test_a_mistake_is_one_line_and_status_2(command: list[str], message: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.tex").write_text("precious")
    before = sorted(run.rglob("*"))
    done = call(*(part.format(run=run) for part in command), stdin=b"a\n", cwd=tmp_path)
    assert message in error_of(done)
    assert done.stdout == b""
    assert not list(tmp_path.glob("outputs/*/*/*"))
    assert command[0] == "nmt-train" or not (tmp_path / "outputs").exists()
    assert sorted(path.name for path in (tmp_path / "occupied").iterdir()) == ["thesis.tex"]
    assert sorted(run.rglob("*")) == before
