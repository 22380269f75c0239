"""The README's commands, run as they stand there; training is kept short by extra values."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY
from forks import call

from nmt.data.demo import corpus as demo

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README, re.S)
SHORT = [value for value in TINY if not value.startswith("data.")]


def commands() -> list[str]:
    lines = [line.split(" #")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
    in_table = re.findall(r"^\|.*\| `(nmt-[^`]*)` \|$", README, re.M)
    return [line for line in [*lines, *in_table] if line.startswith("nmt-")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An own corpus, as the README describes it, and a trained run named DIR."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "corpus").mkdir()
    for name, pairs in zip(("train", "valid", "test"), demo.generate(300, 10, 10, 5), strict=True):
        for lang, side in (("en", 0), ("de", 1)):
            (folder / "corpus" / f"{name}.{lang}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
    (folder / "input.en").write_text("the cat sleeps .\n")
    shell(f"nmt-train {' '.join(TINY)} training.max_steps=2 hydra.run.dir=DIR", folder)
    (folder / "input").write_text("the cat sleeps .\n")
    return folder


def shell(command: str, folder: Path) -> str:
    """What it prints. A command of ours with nothing of the shell but < and > runs in a fork of this process."""
    words = shlex.split(command)
    if not words[0].startswith("nmt-") or "|" in words:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr.decode()}"
        return done.stdout.decode()
    files = {sign: words[words.index(sign) + 1] for sign in ("<", ">") if sign in words}
    given = (folder / files["<"]).read_bytes() if "<" in files else b""
    called = call(*(word for word in words if word not in {*files, *files.values()}), stdin=given, cwd=folder)
    assert called.returncode == 0, f"{command}\n{called.stderr.decode()}"
    if ">" in files:
        (folder / files[">"]).write_bytes(called.stdout)
    return called.stdout.decode()


def shortened(command: str) -> str:
    """A training command with small values first, so that those of the README win where they meet."""
    name, *arguments = shlex.split(command)
    if name != "nmt-train" or "run=DIR" in arguments:
        return command
    demo_only = [] if "data=files" in arguments else [value for value in TINY if value.startswith("data.")]
    values = [
        value for value in [*SHORT, *demo_only] if value.split("=")[0] not in {a.split("=")[0] for a in arguments}
    ]
    if "tokenizer=unigram" in arguments:
        values.append("tokenizer.vocab_size=400")  # finds no more in so little text
    if "attention=luong_dot" in arguments:
        values.append("decoder.hidden=32")
    if "experiment=attention_study" in arguments:
        values += ["seed=1", "attention=none,luong_dot"]
    return shlex.join([name, *arguments, *dict.fromkeys(values), "training.max_steps=2"])


def test_there_are_commands_to_run() -> None:
    assert len(commands()) >= 10


def test_every_command_runs(folder: Path) -> None:
    """In the README's order, in one folder: later lines use what earlier ones made."""
    for command in commands():
        printed = shell(shortened(command), folder)
        if command.startswith("nmt-train"):
            several = " -m " in command or "experiment=attention_study" in command
            assert printed.splitlines()[-1].startswith("sweep: " if several else "run: ")
    assert (folder / "output.de").read_text().count("\n") == 1
    sweeps = sorted((folder / "outputs" / "sweep").glob("*/*"))
    assert [len(list(sweep.glob("*/results.json"))) for sweep in sweeps] == [4, 2, 3]
    assert all((sweep / "comparison" / "index.html").is_file() for sweep in sweeps)


def test_the_python_example_runs(folder: Path) -> None:
    (example,) = (block for kind, block in BLOCKS if kind == "python")
    (folder / "example.py").write_text(example.replace("my-run", "DIR"))
    assert len(shell(f"{sys.executable} example.py", folder).splitlines()) == 3


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`?make ([a-z]+)`?", README)) - {"nothing"}
    assert named >= {"train", "test"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_table_of_choices_is_complete() -> None:
    for row in re.findall(r"^\| (`[\w/]+`(?:, `\w+`)*) \| (`.*) \|$", README, re.M):
        groups, listed = (re.findall(r"`([\w/]+)`", cell) for cell in row)
        for group in groups:
            choices = {path.stem for path in (ROOT / "configs" / group).glob("[!_]*.yaml")} - {"as_trained"}
            assert set(listed) - {"basic"} == choices, group  # basic: Hydra's own launcher and sweeper


def test_the_table_of_presets_is_complete() -> None:
    family = README.partition("## The attention family")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \| [^`|]", family, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {path.stem for path in (ROOT / "configs" / "attention").glob("*.yaml")}


def test_every_link_and_picture_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    for link in links:
        path, _, heading = link.partition("#")
        assert (ROOT / path).exists(), link
        if heading:
            text = (ROOT / (path or "README.md")).read_text()
            slugs = {
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
                for title in re.findall(r"^#+ (.*)$", text, re.M)
            }
            assert heading in slugs, link
