"""The commands and programs of README and docs/, run as they are written; small values keep training short."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from conftest import TINY, run_config
from documents import ROOT, blocks, name_of, pages
from forks import call

from nmt.training.job import train

pytestmark = pytest.mark.system
TRAINED = [*TINY, "training.max_steps=2"]
NOT_RUN = {"ls", "make", "source", "tensorboard", "docker"}  # start a server, change the shell or take long
OURS = re.compile(r"(echo .* \| )?nmt-\w+ |python scripts/\w+\.py |torchrun |curl |for SET in .* awk ")
NOUNS = [("the dog", "der Hund"), ("the cat", "die Katze"), ("the horse", "das Pferd"), ("the bird", "der Vogel")]
NOUNS += [("the mouse", "die Maus"), ("the old man", "der alte Mann"), ("the queen", "die Königin"), ("she", "sie")]
VERBS = [("sees", "sieht"), ("hears", "hört"), ("finds", "findet"), ("likes", "mag"), ("knows", "kennt")]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that the pages assume: a corpus, texts to translate, and a trained run named DIR."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "corpus").mkdir()
    pairs = list(product(NOUNS, VERBS, NOUNS))
    for split, some in (("test", pairs[::25]), ("valid", pairs[1::25]), ("train", pairs[2::2])):
        for lang, side in (("en", 0), ("de", 1)):
            text = "".join(f"{' '.join(word[side] for word in words)} .\n" for words in some)
            (folder / "corpus" / f"{split}.{lang}").write_text(text)
    columns = {"train": pairs[2::2], "valid": pairs[1::25]}
    for name, some in columns.items():
        rows = [(" ".join(word[0] for word in words), " ".join(word[1] for word in words)) for words in some]
        table = "".join(f"{english} .\t{german} .\n" for english, german in rows)
        (folder / "corpus" / f"{name}.tsv").write_text(f"english\tgerman\n{table}")
        (folder / "corpus" / f"bare{'' if name == 'train' else '-valid'}.tsv").write_text(table)
        for lang in ("en", "de"):
            text = (folder / "corpus" / f"{name}.{lang}").read_text()
            (folder / "corpus" / f"medical{'' if name == 'train' else '-valid'}.{lang}").write_text(text)
    for name in ("input", "input.en", "other.en", "other.de"):
        (folder / name).write_text("the cat sleeps .\n")
    (folder / "glossary").write_text("dog\tchien\nred house\tmaison rouge\n")
    (folder / "forbidden").write_text("petit\n")
    write_words(folder)
    shutil.copytree(ROOT / "docs" / "results" / "leaderboard", folder / "docs" / "results" / "leaderboard")
    assert train(run_config(*TRAINED), folder / "DIR") == 0
    return folder


def write_words(folder: Path) -> None:
    """Write the tables of words that a page takes from a shared task: spelled with sounds, and inflected verbs."""
    words = ["".join(letters) for letters in product("bdfgk", ("a", "e", "o", "ij"), "lmnr")]
    for number, split in enumerate(("train", "dev", "test")):
        some = [word for place, word in enumerate(words) if min(place % 10, 2) == 2 - number]
        sounds = "".join(f"{word}en\t{' '.join(word.replace('ij', 'ɛ'))} ə n\n" for word in some)
        verbs = "".join(
            f"{word}en\t{word}{end}\tV;PST;{n};SG\n" for word in some for n, end in enumerate(("te", "test"))
        )
        table = folder / "sigmorphon" / "task1" / "data" / split / f"dut_{split}.tsv"
        table.parent.mkdir(parents=True)
        table.write_text(sounds, encoding="utf-8")
        (folder / f"verbs-{split}.tsv").write_text(verbs, encoding="utf-8")


def shell(command: str, folder: Path) -> str:
    """Run a command in bash, and return its standard output."""
    command = command.replace("python scripts/", f"python {ROOT}/scripts/")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def shortened(command: str) -> str:
    """Add small values to a training command, except for keys that the page sets."""
    launcher, name, arguments = f"{command} ".partition("nmt-train ")
    if not name or "run=DIR" in command:
        return command
    for pattern, fewer in ((r"--nproc-per-node=\d+", "--nproc-per-node=2"), (r"--nnodes=\S+", "--nnodes=1")):
        launcher = re.sub(pattern, fewer, launcher)
    arguments = re.sub(r"processes=\d+", "processes=2", arguments)
    arguments = re.sub(r"(attention=\w+,\w+),bahdanau\S*(.*) seed=1,2(,3)?", r"\1\2 seed=1", arguments)
    small = dict(word.split("=", 1) for word in TRAINED)
    if re.search(r"data=(files|multilingual)", arguments):
        small = {key: value for key, value in small.items() if not key.startswith("data.")}
        small["tokenizer.vocab_size"] = "90"
    elif "experiment=g2p" in arguments:
        small = {key: value for key, value in small.items() if not key.startswith(("data.", "tokenizer."))}
    if "tokenizer=sides" in arguments:
        small["tokenizer.source.vocab_size"] = small["tokenizer.target.vocab_size"] = small.pop("tokenizer.vocab_size")
    if "experiment=attention_study" in arguments:
        small |= {"seed": "1", "attention": "none,luong_dot"}
    own = {word.partition("=")[0] for word in shlex.split(arguments)} - {"training.max_steps"}
    values = [f"{key}={value}" for key, value in small.items() if key not in own]
    return f"{launcher.replace('HOST:29500', 'localhost:0')}{name}{arguments} {' '.join(values)}"


class Served:
    """The last nmt-serve that a page starts, on a free port, for the page's calls of curl."""

    def __init__(self) -> None:
        self.address, self.process = "", None

    def start(self, command: str, folder: Path) -> None:
        self.stop()
        program = [Path(sys.executable).with_name("nmt-serve"), *shlex.split(command)[1:], "port=0"]
        self.process = subprocess.Popen(program, cwd=folder, stderr=subprocess.PIPE, text=True)
        self.address = re.split(" at |/;", self.process.stderr.readline())[1]

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages() if any(b.lines for b in blocks(page))], ids=name_of)
def test_every_command_runs(page: Path, prepared: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Commands run in the page's order in one folder, because later ones use files of earlier ones."""
    commands = [line for block in blocks(page) if block.kind == "bash" and not block.long for line in block.lines]
    folder, served = tmp_path / "folder", Served()
    shutil.copytree(prepared, folder)
    if not any("hydra.run.dir=my-run" in command for command in commands):
        shutil.copytree(folder / "DIR", folder / "my-run")
    request.addfinalizer(served.stop)
    for command in (command for command in commands if command.split()[0] not in NOT_RUN):
        assert OURS.match(command), f"not a command of ours: {command}"
        if command.startswith("nmt-serve"):
            served.start(command, folder)
        elif command.startswith("curl"):
            assert shell(f"{command.replace('http://127.0.0.1:8080', served.address)} -sS --fail-with-body", folder)
        else:
            output = shell(shortened(command), folder)
            if command.startswith("nmt-train"):
                last = "sweep: " if re.search(r" -m |experiment=attention_study", command) else "run: "
                last = "dry run: " if "--dry-run" in command else last
                assert output.splitlines()[-1].startswith(last), command
    for jobs in folder.glob("outputs/sweep/*/*/jobs.json"):
        assert (jobs.parent / "comparison" / "index.html").is_file()
        assert "failed" not in jobs.read_text()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * ("nmt.train(" in page.read_text()))
        for page in pages()
        if "```python" in page.read_text()
    ],
)
def test_every_program_runs(page: Path, prepared: Path, tmp_path: Path) -> None:
    """Runs all Python blocks of a page as one program."""
    lines = [line for block in blocks(page) if block.kind == "python" for line in block.lines]
    program = tmp_path / "program.py"
    program.write_text("\n".join(lines).replace('"my-run"', '"DIR"').replace('"model.nmt"', '"DIR"'), encoding="utf-8")
    done = call(program, cwd=prepared)
    assert done.returncode == 0, done.stderr.decode()
