"""README and docs/: the links, keys and presets that they name exist, and every preset has a page."""

import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
from documents import PRESETS, ROOT, blocks, links, markdown_files, name_of, pages, slugs
from test_layers import SUBPACKAGES

sys.path.append(str(ROOT / "scripts"))
import write_pages

KEY = re.compile(r"^([a-z_]+(?:[./][a-z_0-9]+)*)(@[a-z_.]+)?=")
GROUPS = {group for groups in write_pages.GROUPS.values() for group in groups}
OF_HYDRA = {"hydra.run.dir", "hydra.sweep.dir", "hydra.searchpath"}
OF_HYDRA |= {f"hydra.sweeper.{key}" for key in ("n_jobs", "n_trials", "pruner", "startup_trials")}
SECTIONS = ("attention", "data", "decoder", "embedding", "encoder", "evaluation", "objective", "optimizer", "schedule")
SECTIONS += ("search", "tokenizer", "training", "validation")


@cache
def known_keys() -> set[str]:
    configs = ROOT / "configs"
    paths = [path for path in configs.rglob("*.yaml") if "hydra" not in path.parts]
    keys = {key.name for path in paths for key in write_pages.read(path, configs).keys}
    sections = {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 1)}
    return keys | sections | GROUPS | OF_HYDRA


def words(code: str) -> list[str]:
    """Split code into words as a shell does."""
    try:
        return shlex.split(code)
    except ValueError:  # a single apostrophe
        return code.split()


def test_the_targets_of_make_that_pages_name_exist_and_contributing_lists_all() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    rows = re.findall(r"^\| `make .*$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    assert {*re.findall(r"`make ([a-z-]+)`", "\n".join(rows)), "help"} == targets
    for page in pages():
        assert {*re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8"))} <= targets, page


@pytest.mark.parametrize("page", markdown_files(), ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if heading and target.suffix == ".md":
            assert heading in slugs(target), link


@pytest.mark.parametrize("page", [page for page in pages() if "results" not in page.parts], ids=name_of)
def test_every_key_and_choice_exists(page: Path) -> None:
    """Pages of results are left out: they name keys of the version that was measured."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    codes = re.findall(r"`([^`\n]+)`", prose)
    lines = [line for block in blocks(page) if block.kind == "bash" for line in block.lines]
    codes += [line for line in lines if line.startswith(("nmt-", "python ", "torchrun "))]
    named = [word for code in codes for word in words(code)]
    keys = known_keys()
    for word in named:
        if match := KEY.match(word):
            key, value = match[1], word.partition("=")[2]
            assert key in keys or key.startswith("hydra.launcher."), word
            if key in GROUPS and re.fullmatch(r"\[?[\w/,]+\]?", value) and value not in {"NAME", "mine"}:
                choices = value.strip("[]").split(",")
                assert all((ROOT / "configs" / key / f"{choice}.yaml").exists() for choice in choices), word
        elif re.fullmatch(rf"({'|'.join(SECTIONS)})(\.\w+)+", word):
            assert word in keys or word.endswith((".model", ".png")), word  # or it names a file


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_file_of_the_project_exists(page: Path) -> None:
    named = re.findall(r"`((?:nmt|configs|scripts|tests|docs)/[\w./-]*)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_subpackages_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("## Subpackages")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", section, re.M))
    assert [(name, " ".join(re.findall(r"`(\w+)`", others))) for name, others in rows.items()] == [*SUBPACKAGES.items()]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_page(name: str) -> None:
    page = ROOT / "docs" / "attention" / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {name}: ")
    assert re.search(r"^\$\$\n.+\n\$\$$", text, re.M | re.S), "no equation"
    assert f"](images/{name}.png)" in text
    assert "arxiv.org/abs/" in text or "openreview.net/forum" in text
    assert any(f"attention={name}" in line.split() for block in blocks(page) for line in block.lines)
    assert re.findall(r"^<!-- (\w+) -->$", text, re.M) == ["figures", "end"]
    assert text.count("**Differs from the paper in:** ") == 1
    assert f"attention/{name}.md" in (ROOT / "mkdocs.yml").read_text()


def test_the_table_of_presets_is_complete() -> None:
    text = (ROOT / "docs" / "attention" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\) \|", text, re.M)
    assert sorted(rows) == [(name, name) for name in PRESETS]
    assert len(PRESETS) == 28, "correct README.md, docs/index.md and docs/comparison.md (84 runs) as well"


def test_the_table_of_parts_is_complete() -> None:
    text = (ROOT / "docs" / "attention" / "index.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `((?:attention|encoder)/\w+)`.*? \| (.*) \|$", text, re.M))
    assert len(rows) == 7
    for group, choices in rows.items():
        names = {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")}
        assert set(re.findall(r"`(\w+)`", choices)) == names, group


def test_the_reference_has_every_value_with_its_type() -> None:
    reference = write_pages.pages(ROOT / "configs")
    text = "\n".join(page for name, page in reference.items() if name != "hydra.md")
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \| (.*) \|$", text, re.M)
    named = {name for name, *_ in rows}
    sections = {name for name in known_keys() if name + "." in " ".join(known_keys())}
    presets_only = {"attention.kind", "attention.context"}
    assert known_keys() - sections - GROUPS - OF_HYDRA - named <= presets_only | {
        key for key in known_keys() if key.startswith(("size.", "hydra"))
    }
    assert [name for name, _, values, _ in rows if not values] == []
    assert "| `encoder.layers` | `1` | integer, above 0, at most 100 |" in reference["encoder.md"]
    assert "| `attention.score.layers` | `1` |" in reference["attention.md"]


def test_the_written_pages_are_up_to_date() -> None:
    for path, text in write_pages.written_pages(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python scripts/write_pages.py"
