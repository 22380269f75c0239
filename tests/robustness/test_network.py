"""Commands open no network connection, except for a corpus of the hub; nmt-serve listens on this machine only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parent.parent.parent
WATCH = '''
"""Every way to the network is written down and closed."""
import os, socket

def closed(name):
    def refuse(first, *rest, **named):
        if getattr(first, "family", None) != socket.AF_UNIX:
            with open(os.environ["NETWORK_LOG"], "a") as log:
                log.write(f"{name} {first} {rest}\\n")
            raise OSError(f"no network: {name} {rest or first}")
    return refuse

for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket.socket, "sendto"),
                    (socket, "getaddrinfo"), (socket, "gethostbyname"), (socket, "create_connection")):
    setattr(owner, name, closed(name))
'''


def watched(home: Path, *command: str | Path, stdin: bytes = b"") -> tuple[subprocess.CompletedProcess[bytes], str]:
    """Run a command. Returns its result and the addresses that it tried to connect to."""
    (home / "watch").mkdir(exist_ok=True)
    (home / "watch" / "sitecustomize.py").write_text(WATCH)
    log = home / "network.log"
    log.unlink(missing_ok=True)
    paths = os.pathsep.join(filter(None, [str(home / "watch"), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"PYTHONPATH": paths, "NETWORK_LOG": str(log), "HF_HOME": str(home / "hf")}
    done = subprocess.run(
        command, cwd=home, env=environment, input=stdin, capture_output=True, timeout=500, check=False
    )
    return done, log.read_text() if log.exists() else ""


@pytest.mark.slow
def test_no_command_connects_anywhere(tmp_path: Path) -> None:
    commands = [
        ["nmt-train", *TINY, "training.max_steps=2", "hydra.run.dir=run"],
        ["nmt-train", "run=run", "training.max_steps=3"],
        ["nmt-evaluate", "run=run"],
        ["nmt-translate", "run=run"],
        ["nmt-export", "run=run", "output=model.nmt"],
        ["nmt-translate", "run=model.nmt"],
        ["nmt-compare", "runs=run", "bootstrap_samples=100", "randomisation_trials=100"],
    ]
    for name, *arguments in commands:
        done, attempts = watched(tmp_path, Path(sys.executable).parent / name, *arguments, stdin=b"the cat .\n")
        assert done.returncode == 0, done.stderr.decode()
        assert attempts == ""
