"""Plant faults in a copy of the package, one at a time, and see whether the tests notice.

python scripts/faults.py check             whether each fault of tests/faults.yaml still applies
python scripts/faults.py run [ID ...]      run the tests named for each fault (all faults without an ID)
  --slow          the slow tests too
  --output FILE   results as JSON (default: build/faults.json); those of earlier calls stay

A fault that no test notices shows behaviour that no test checks.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "faults.yaml"
# Libraries that are imported once, before the tests of each fault run in a fork. Each fork imports the package itself.
LARGE = ["torch", "hydra", "matplotlib", "sacrebleu", "sentencepiece", "pydantic", "hypothesis"]
TIMEOUT = 900  # seconds for all tests of a fault


class Fault(NamedTuple):
    """A mistake in the code, `new` in place of `old`, and the tests that must notice it."""

    id: str
    subpackage: str
    breaks: str
    old: str
    new: str
    tests: list[str]  # names of test files in any folder below tests/
    imports: str = ""  # import line that the mistake needs


def load() -> list[Fault]:
    """Read all faults."""
    return [Fault(**values) for values in yaml.safe_load(LIST.read_text(encoding="utf-8"))]


def files_with(fault: Fault, package: Path) -> list[Path]:
    """List the files that hold the fault's `old` text, each file once for every occurrence."""
    texts = ((path, path.read_text(encoding="utf-8")) for path in sorted((package / fault.subpackage).rglob("*.py")))
    return [path for path, text in texts for _ in range(text.count(fault.old))]


@cache
def test_files() -> dict[str, str]:
    """Map the name of each test file to its path."""
    return {path.stem: str(path) for path in (ROOT / "tests").rglob("test_*.py")}


def problems(faults: Iterable[Fault], package: Path = ROOT / "nmt") -> list[str]:
    """Describe why faults cannot be planted: their text or tests are gone, or the text is ambiguous."""
    found = []
    for fault in faults:
        if (count := len(files_with(fault, package))) != 1:
            found.append(f"{fault.id}: its text stands {count} times in {fault.subpackage}")
        found += [f"{fault.id}: no {name}.py" for name in fault.tests if name not in test_files()]
    return found


def run(fault: Fault, copy: Path, slow: bool) -> dict[str, Any]:
    """Plant the fault in the copy of the package, run its tests there, and remove the fault again."""
    (path,) = files_with(fault, copy / "nmt")
    whole = path.read_text(encoding="utf-8")
    planted = whole.replace(fault.old, fault.new)
    if fault.imports:
        planted = planted.replace("\nimport ", f"\n{fault.imports}\nimport ", 1)
    path.write_text(planted, encoding="utf-8")
    marks = ["-m", "not gpu"] if slow else []
    words = ["-x", "-q", "-p", "no:cacheprovider", *marks, *(test_files()[name] for name in fault.tests)]
    began = time.monotonic()
    try:
        status, output = pytest_in_a_fork(words, copy)
    finally:
        path.write_text(whole, encoding="utf-8")
    if status not in {0, 1, -signal.SIGALRM}:
        raise SystemExit(f"{fault.id}: pytest ended with {status}\n{output[-3000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    caught_by = next(iter(failed), None) if status == 1 else "the time limit" if status else None
    seconds = round(time.monotonic() - began, 1)
    return {"subpackage": fault.subpackage, "breaks": fault.breaks, "caught_by": caught_by, "seconds": seconds}


def pytest_in_a_fork(words: list[str], copy: Path) -> tuple[int, str]:
    """Run pytest on the copy in a fork of this process, which has imported the large libraries. Returns the exit status
    and the output."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            signal.alarm(TIMEOUT)
            os.setsid()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os.chdir(ROOT)
            os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
            sys.path.insert(0, str(copy))
            os._exit(pytest.main(words))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        return status, file.read().decode(errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    runs = commands.add_parser("run")
    runs.add_argument("ids", nargs="*")
    runs.add_argument("--slow", action="store_true")
    runs.add_argument("--output", type=Path, default=ROOT / "build" / "faults.json")
    options = parser.parse_args()
    faults = load()
    if options.command == "check":
        found = problems(faults)
        print(*found, f"{len(faults)} faults, {len(found)} problems", sep="\n")
        return 1 if found else 0
    if unknown := set(options.ids) - {fault.id for fault in faults}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in faults if not options.ids or fault.id in options.ids]
    if found := problems(chosen):
        parser.error("; ".join(found))
    for name in LARGE:
        importlib.import_module(name)
    results = json.loads(options.output.read_text()) if options.output.is_file() else {}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "nmt", copy / "nmt", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "configs").symlink_to(ROOT / "configs")
        for fault in chosen:
            results[fault.id] = result = run(fault, copy, options.slow)
            options.output.write_text(f"{json.dumps(results, indent=1)}\n")
            print(
                f"| {fault.subpackage} | {fault.id} | {result['caught_by'] or '**missed**'} "
                f"| {result['seconds']:.0f} s |",
                flush=True,
            )
    missed = [fault.id for fault in chosen if results[fault.id]["caught_by"] is None]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
