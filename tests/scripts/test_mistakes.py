"""Wrong arguments of scripts give a one-line error before any work."""

from pathlib import Path

import pytest
from conftest import TINY, script
from forks import call_text

SCRIPTS = Path(script("runs").__file__).parent
FILES = ["data=files", "data.train=a", "data.validation=b"]
STUDENT = ["out", "seed=1", "--student"]
LARGER = ["--student", "encoder.hidden=8"]
FILES_OUT, SEVERAL = ["out", *FILES, "size=demo"], ["data=multilingual", "data.corpora=[a-b,b-a]", *FILES[1:]]

MISTAKES = [
    ("ablation", ["out", "seed=1", "--changes", "no-dropuot"], "no such change: no-dropuot"),
    ("ablation", ["out", "seed=1", "--add", "wide=encoder.hiden=3"], "did you mean 'encoder.hidden'?"),
    ("benchmark", ["decoder.hiden=3"], "decoder.hidden"),
    ("benchmark", ["objective=distillation", "objective.teachers=DIR"], "has no teachers; leave it out"),
    ("distill", ["out", "seed=1"], "the following arguments are required: --student"),
    ("distill", [*STUDENT, "a='b"], 'error: --student "a=\'b": no closing quotation'),
    ("distill", ["out", *TINY, *LARGER], "(encoder.hidden is 16 there, 8 here); with"),
    ("distill", [*STUDENT, "tokenizer.vocab_size=900"], "another corpus gives another tokenizer"),
    ("distill", ["out", "attention=hard", "--student", ""], "objective.kind=distillation needs positions that need no"),
    ("diversify", ["out", "seed=1"], "data=demo: has one direction only"),
    ("diversify", ["out", "size=demo", *SEVERAL], "has several directions"),
    ("diversify", [*FILES_OUT, "data.alignments=a"], "data.alignments: would be for one direction only"),
    ("diversify", [*FILES_OUT, "--search", "search.beam_size=0"], "search.beam_size=0: input should be"),
    ("draw_alignment", ["nowhere", "the dog", "here.png"], "run=nowhere: no such directory"),
    ("draw_presets", ["sweep", "pictures"], "sweep: has no runs"),
    ("find_lr", [*TINY, "--start", "1", "--end", "0.1"], "--start 1: must be below --end 0.1"),
    ("find_lr", ["--updates", "3"], "--updates must be at least 20"),
    ("find_lr", ["processes=2"], "find_lr tests a new run in one process"),
    ("scaling", ["--processes", "1"], "--processes must be at least 2, the others above 0"),
    ("tune_search", ["nowhere", "--no-none", "--average", "--gnmt"], "leaves nothing to try"),
]
FIRST = [*{mistake[0]: mistake for mistake in reversed(MISTAKES)}.values()]
OTHERS = [pytest.param(*mistake, marks=pytest.mark.slow) for mistake in MISTAKES if mistake not in FIRST]


@pytest.mark.parametrize(("name", "words", "told"), [*FIRST, *OTHERS])
def test_a_mistake_is_told_in_a_line(name: str, words: list[str], told: str, tmp_path: Path) -> None:
    done = call_text(SCRIPTS / f"{name}.py", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
