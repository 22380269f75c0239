"""What a run records of where it was started."""

import importlib.metadata
import platform
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("nmt", "torch", "numpy", "sentencepiece", "sacrebleu", "datasets", "hydra-core")


def environment() -> dict[str, Any]:
    """Time, Python, platform, package versions and the code's commit, for the manifest."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "git": _git_commit(),
    }


def _git_commit() -> str | None:
    """The commit of the checkout that the code runs from, "+" if it has changes; None for an installed package."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
