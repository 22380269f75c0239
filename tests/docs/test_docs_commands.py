"""The commands and programs of README and docs/, run as they are written; small values keep training short."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, values_of
from documents import ROOT, blocks, name_of, pages
from forks import call

from nmt.config.compose import validated
from nmt.config.schema import CompareConfig, TrainConfig, TranslateConfig

pytestmark = pytest.mark.system
FASTER = ["data.validation_size=10", "data.test_size=10", "validation.samples=0"]
SMALL = [value for value in TINY if value.partition("=")[0] not in {each.partition("=")[0] for each in FASTER}] + FASTER
NOT_RUN = {"ls", "make", "source", "tensorboard", "docker"}  # what starts a server, changes the shell or takes long
NOUNS = [("the dog", "der Hund"), ("the cat", "die Katze"), ("the horse", "das Pferd"), ("the bird", "der Vogel")]
NOUNS += [("the mouse", "die Maus"), ("the old man", "der alte Mann"), ("the queen", "die Königin"), ("she", "sie")]
VERBS = [("sees", "sieht"), ("hears", "hört"), ("finds", "findet"), ("likes", "mag"), ("knows", "kennt")]
SWEEPS = ("-m", "experiment=attention_study")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages assume: a corpus, texts to translate, and a trained run named DIR."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "corpus").mkdir()
    pairs = list(product(NOUNS, VERBS, NOUNS))
    for split, some in (("test", pairs[::25]), ("valid", pairs[1::25]), ("train", pairs[2::2])):
        for lang, side in (("en", 0), ("de", 1)):
            text = "".join(f"{' '.join(word[side] for word in words)} .\n" for words in some)
            (folder / "corpus" / f"{split}.{lang}").write_text(text)
    for name in ("input", "input.en", "other.en", "other.de"):
        (folder / name).write_text("the cat sleeps .\n")
    (folder / "glossary").write_text("dog\tchien\nred house\tmaison rouge\n")
    (folder / "forbidden").write_text("petit\n")
    shell(f"nmt-train {' '.join(SMALL)} training.max_steps=2 hydra.run.dir=DIR", folder)
    return folder


def shell(command: str, folder: Path) -> str:
    """Its standard output. A command of ours runs in a fork of this process, unless it is part of a pipe."""
    words = shlex.split(command)
    if "|" in words or words[0] == "torchrun":
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr.decode()}"
        return done.stdout.decode()
    files = {sign: words[words.index(sign) + 1] for sign in ("<", ">") if sign in words}
    stdin = (folder / files["<"]).read_bytes() if "<" in files else b""
    for sign, file in files.items():
        at = words.index(sign)
        assert words[at + 1] == file
        del words[at : at + 2]
    if words[0] == "python":
        words = [str(ROOT / words[1]), *words[2:]]
    done = call(*words, stdin=stdin, cwd=folder)
    assert done.returncode == 0, f"{command}\n{done.stderr.decode()}"
    if ">" in files:
        (folder / files[">"]).write_bytes(done.stdout)
    return done.stdout.decode()


def shortened(command: str) -> str:
    """A training command with small values, except for those that the page sets itself."""
    name, *arguments = shlex.split(command)
    if name == "torchrun":
        options, _, job = command.partition(" --no-python ")
        options = re.sub(r"--nproc-per-node=\d+", "--nproc-per-node=2", options)
        options = re.sub(r"--nnodes=\S+", "--nnodes=1", options).replace("HOST:29500", "localhost:0")
        return f"{options} --no-python {shortened(job)}"
    if name != "nmt-train" or "run=DIR" in arguments:
        return command
    arguments = ["processes=2" if word.startswith("processes=") else word for word in arguments]
    files = not {"data=files", "data=multilingual"}.isdisjoint(arguments)
    small = [value for value in SMALL if not (files and value.startswith("data."))]
    own = {argument.partition("=")[0] for argument in arguments}
    values = [value for value in small if value.partition("=")[0] not in own]
    if files:
        values = [value for value in values if not value.startswith("tokenizer.vocab_size")] + [
            "tokenizer.vocab_size=90"
        ]
    if "tokenizer=unigram" in arguments:
        values.append("tokenizer.vocab_size=400")  # so little text has no more pieces
    if "experiment=attention_study" in arguments:
        values += ["seed=1", "attention=none,luong_dot"]
    if any(argument.startswith("attention=none,luong_dot,bahdanau") for argument in arguments):
        arguments = [argument.replace(",bahdanau", "").replace("seed=1,2", "seed=1") for argument in arguments]
    return shlex.join([name, *arguments, *dict.fromkeys(values), "training.max_steps=2"])


def compose(command: str) -> None:
    """Check that a command that takes long is one: its values compose, and its script has its options."""
    name, *arguments = shlex.split(command)
    if name == "nmt-compare":
        validated(CompareConfig, values_of("compare", arguments))
        return
    if name == "nmt-translate":
        validated(TranslateConfig, values_of("translate", arguments[: arguments.index("<")]))
        return
    students: list[list[str]] = []
    if name == "python":
        script = (ROOT / arguments[0]).read_text(encoding="utf-8") + (ROOT / "scripts" / "runs.py").read_text()
        options = [word for word in arguments if word.startswith("--")]
        assert all(f'"{option}"' in script for option in options), command
        of_students = [value for option, value in pairwise(arguments) if option == "--student"]
        students = [shlex.split(value) for value in of_students]
        arguments = [word for word in arguments[1:] if "=" in word and word not in of_students]
    values = [word for word in arguments if word != "-m" and not word.startswith("hydra") and "glob(" not in word]
    choices = [word for word in values if re.fullmatch(r"[\w/]+=\w+(,\w+)+", word)]
    single = [word for word in values if word not in choices]
    for overrides in [[], *students, *([choice.split(",")[0]] for choice in choices)]:
        own = {word.partition("=")[0] for word in overrides}
        validated(TrainConfig, values_of("train", [*(w for w in single if w.partition("=")[0] not in own), *overrides]))


class Served:
    """The last nmt-serve of a page, on a free port, for the page's calls of curl."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, ""
        self.process: subprocess.Popen[str] | None = None

    def run(self, command: str) -> None:
        """Start the service, or call it."""
        words = shlex.split(command)
        if words[0] == "nmt-serve":
            self.stop()
            program = [Path(sys.executable).parent / words[0], *words[1:], "port=0"]
            self.process = subprocess.Popen(program, cwd=self.folder, stderr=subprocess.PIPE, text=True)
            assert self.process.stderr is not None
            line = self.process.stderr.readline()
            assert " at http://" in line, line
            self.address = line.split(" at ")[1].split("/;")[0]
            return
        called = [word.replace("http://127.0.0.1:8080", self.address) for word in words]
        assert called != words, command
        done = subprocess.run([*called, "-sS", "--fail-with-body"], capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout.decode()}{done.stderr.decode()}"
        assert done.stdout

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def quick_first(chosen: list[Path]) -> list[Any]:
    """README with every change, the other pages with the slow tests."""
    quick = {"README"}
    return [
        pytest.param(page, marks=[] if page.stem in quick else [pytest.mark.slow], id=name_of(page)) for page in chosen
    ]


@pytest.mark.parametrize("page", quick_first([page for page in pages() if any(b.lines for b in blocks(page))]))
def test_every_command_runs(page: Path, prepared: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In the page's order and in one folder, since later commands use what earlier ones left."""
    shells = [block for block in blocks(page) if block.kind == "bash"]
    lines = [line for block in shells for line in block.lines]
    folder = tmp_path / "folder"
    shutil.copytree(prepared, folder)
    if not any("hydra.run.dir=my-run" in line for line in lines):
        shutil.copytree(folder / "DIR", folder / "my-run")
    served = Served(folder)
    request.addfinalizer(served.stop)
    for block in shells:
        for command in block.lines:
            if command.split()[0] in NOT_RUN:
                continue
            if command.split()[0] in {"nmt-serve", "curl"}:
                served.run(command)
                continue
            assert re.match(r"nmt-\w+ |python scripts/\w+\.py |torchrun ", command), f"not a command of ours: {command}"
            if block.long:
                compose(command)
                continue
            output = shell(shortened(command), folder)
            if command.startswith("nmt-train"):
                sweep = any(word in shlex.split(command) for word in SWEEPS)
                assert output.splitlines()[-1].startswith("sweep: " if sweep else "run: "), command
    for jobs in folder.glob("outputs/sweep/*/*/jobs.json"):
        assert (jobs.parent / "comparison" / "index.html").is_file()
        assert "failed" not in jobs.read_text()


@pytest.mark.parametrize("page", [page for page in pages() if "```python" in page.read_text()], ids=name_of)
def test_every_program_runs(page: Path, prepared: Path, tmp_path: Path) -> None:
    """All Python blocks of a page as one program."""
    lines = [line for block in blocks(page) if block.kind == "python" for line in block.lines]
    program = tmp_path / "program.py"
    program.write_text("\n".join(lines).replace('"my-run"', '"DIR"').replace('"model.nmt"', '"DIR"'), encoding="utf-8")
    done = call(program, cwd=prepared)
    assert done.returncode == 0, done.stderr.decode()
