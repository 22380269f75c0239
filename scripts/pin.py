"""Write the versions of the packages in this environment, with the SHA-256 of each of their files in the index.

python scripts/pin.py [--index https://pypi.org/simple] [--docs]

docs/constraints.txt lists the packages that only the extra `docs` needs, constraints.txt all others. --docs writes
only docs/constraints.txt.
torch has no hashes: which wheel fits depends on the machine, and some wheels come from PyTorch's own index. Files for
Python versions that this package does not support are left out.
"""

import argparse
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_HASHES = {"torch"}
OURS = {"nmt-attention", "pip"}
HEAD = """\
# The exact versions this package is developed and tested with, and their files' hashes (scripts/pin.py).
# pyproject.toml has the ranges. The Makefile installs no other files, except torch and its own dependencies.
"""
DOCS_HEAD = """\
# The exact versions that only the documentation needs, and the hashes of their files (scripts/pin.py): for `make docs`.
"""
LINK = re.compile(r"#sha256=([0-9a-f]{64})[^>]*>\s*([^<\s]+)")
OF_PYTHON = re.compile(
    r"\.tar\.gz$|\.zip$|-(py3|py2\.py3|py3\d*|cp3(1[1-9])[^-]*|[^-]+-abi3)-[^-]*|-abi3-", re.IGNORECASE
)


def installed() -> dict[str, str]:
    """Return the versions of the installed packages, by name."""
    words = [sys.executable, "-m", "pip", "list", "--format=freeze", "--exclude-editable"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    pins = dict(line.split("==", 1) for line in lines if "==" in line)
    return {name: version.partition("+")[0] for name, version in pins.items() if name.lower() not in OURS}


def hashes(index: str, name: str, version: str) -> list[str]:
    """Fetch the hashes of a version's files for the supported Python versions. Exits if there are none."""
    normal = canonicalize_name(name)
    with urllib.request.urlopen(f"{index}/{normal}/", timeout=60) as page:
        links = LINK.findall(page.read().decode("utf-8"))
    stem = re.compile(re.sub("-", "[-_.]+", normal) + "-" + re.escape(version) + r"(-|\.tar\.|\.zip)", re.IGNORECASE)
    digests = sorted({digest for digest, file in links if stem.match(file) and OF_PYTHON.search(file)})
    if not digests:
        sys.exit(f"{index}/{normal}/ has no file of {name}=={version}")
    return digests


def needed(requirements: Iterable[str]) -> set[str]:
    """Return the names of the packages that requirements need in this environment, directly or indirectly."""
    names: set[str] = set()
    queue = [Requirement(text) for text in requirements]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in names:
            continue
        names.add(name)
        with suppress(PackageNotFoundError):
            dependencies = [Requirement(text) for text in requires(name) or []]
            extras = requirement.extras or {""}
            queue += [
                dependency
                for dependency in dependencies
                if dependency.marker is None or any(dependency.marker.evaluate({"extra": extra}) for extra in extras)
            ]
    return names


def docs_only() -> set[str]:
    """Return the names of the packages that only the extra `docs` needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = dict(project["optional-dependencies"])
    docs = needed(extras.pop("docs"))
    others = [text for extra in extras.values() for text in extra if not text.startswith("nmt-attention[")]
    return docs - needed([*project["dependencies"], *others])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default="https://pypi.org/simple")
    parser.add_argument("--docs", action="store_true", help="write docs/constraints.txt alone")
    options = parser.parse_args()
    pins, docs = installed(), docs_only()
    of_docs = {name: version for name, version in pins.items() if canonicalize_name(name) in docs}
    write(ROOT / "docs" / "constraints.txt", DOCS_HEAD, of_docs, options.index)
    if not options.docs:
        others = {name: version for name, version in pins.items() if name not in of_docs}
        write(ROOT / "constraints.txt", HEAD, others, options.index)


def write(path: Path, head: str, pins: dict[str, str], index: str) -> None:
    """Write a file of constraints: each version with the hashes of its files."""
    index = index.rstrip("/")
    hashed = [name for name in pins if name not in WITHOUT_HASHES]
    with ThreadPoolExecutor(8) as pool:
        digests = dict(zip(hashed, pool.map(lambda name: hashes(index, name, pins[name]), hashed), strict=True))
    lines = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in digests.get(name, []))])
        for name, version in sorted(pins.items(), key=lambda pin: pin[0].lower())
    ]
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {len(pins)} versions, {sum(map(len, digests.values()))} hashes")


if __name__ == "__main__":
    main()
