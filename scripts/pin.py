"""Write constraints.txt: the versions in this environment, with the SHA-256 of each of their files in the index.

python scripts/pin.py [--index https://pypi.org/simple]

torch gets no hashes: its wheel depends on the machine and may come from PyTorch's own index. Files for
Pythons that this package does not support are left out.
"""

import argparse
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "constraints.txt"
WITHOUT_HASHES = {"torch"}
OURS = {"nmt", "pip"}
HEAD = """\
# The exact versions this package is developed and tested with, and their files' hashes (scripts/pin.py).
# pyproject.toml has the ranges. The Makefile installs no other files, except torch and its own dependencies.
"""
LINK = re.compile(r"#sha256=([0-9a-f]{64})[^>]*>\s*([^<\s]+)")
OF_PYTHON = re.compile(
    r"\.tar\.gz$|\.zip$|-(py3|py2\.py3|py3\d*|cp3(1[1-9])[^-]*|[^-]+-abi3)-[^-]*|-abi3-", re.IGNORECASE
)


def installed() -> dict[str, str]:
    """The installed packages: name -> version."""
    words = [sys.executable, "-m", "pip", "list", "--format=freeze", "--exclude-editable"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    pins = dict(line.split("==", 1) for line in lines if "==" in line)
    return {name: version.partition("+")[0] for name, version in pins.items() if name.lower() not in OURS}


def hashes(index: str, name: str, version: str) -> list[str]:
    """Hashes of a version's files for the supported Pythons. Exits if there are none."""
    normal = re.sub(r"[-_.]+", "-", name).lower()
    with urllib.request.urlopen(f"{index}/{normal}/", timeout=60) as page:
        links = LINK.findall(page.read().decode("utf-8"))
    stem = re.compile(re.sub("-", "[-_.]+", normal) + "-" + re.escape(version) + r"(-|\.tar\.|\.zip)", re.IGNORECASE)
    digests = sorted({digest for digest, file in links if stem.match(file) and OF_PYTHON.search(file)})
    if not digests:
        sys.exit(f"{index}/{normal}/ has no file of {name}=={version}")
    return digests


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default="https://pypi.org/simple")
    index = parser.parse_args().index.rstrip("/")
    pins = installed()
    hashed = [name for name in pins if name not in WITHOUT_HASHES]
    with ThreadPoolExecutor(8) as pool:
        digests = dict(zip(hashed, pool.map(lambda name: hashes(index, name, pins[name]), hashed), strict=True))
    lines = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in digests.get(name, []))])
        for name, version in sorted(pins.items(), key=lambda pin: pin[0].lower())
    ]
    TARGET.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(pins)} versions, {sum(map(len, digests.values()))} hashes")


if __name__ == "__main__":
    main()
