"""What a run runs in: time, versions, platform, and the commit of the code."""

import importlib.metadata
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

PACKAGES = ("nmt", "torch", "numpy", "sentencepiece", "sacrebleu", "datasets", "hydra-core")


def surroundings() -> dict[str, Any]:
    """For the record of a run."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git": _git_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the checkout that the code runs from, "+" if it has changes; None for an installed package."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
