"""Write the parts of the documentation that come from other files, so that it reads the same on disk and on the site.

docs/configuration/ is a reference of every value, from the comments of configs/ and the types of the schema. Each page
of an attention preset has a line of its figures, from the leaderboard, which `scripts/evidence.py table` writes, and
from docs/results/demo.md. The tables of the study of pronunciations are those that `scripts/corpora.py table` writes.
The pages on Python come from docstrings.

    python scripts/write_pages.py           # writes the files that differ
    python scripts/write_pages.py --check   # names the files that differ, and then exits with status 1
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from python_reference import reference

Json = dict[str, Any]
GRAMMAR = """\
`KEY=VALUE` sets one value, `GROUP=CHOICE` picks the file `CHOICE` of the folder `GROUP` in `configs/`. The tables below
come from those files and from the types in `nmt/config/schema`. The default is the value in the file. Values outside
the limits are refused with a message that names the key. `nmt-train --help` prints the same values for any choice of
groups.
"""
GROUPS = {  # page -> groups on it, which are folders of configs/
    "data": ["data"],
    "size": ["size"],
    "tokenizer": ["tokenizer"],
    "encoder": ["encoder", "encoder/self_attention"],
    "decoder": ["decoder"],
    "attention": [
        "attention",
        "attention/score",
        "attention/window",
        "attention/normalizer",
        "attention/alignment",
        "attention/coverage",
        "attention/projection",
    ],
    "objective": ["objective"],
    "optimizer": ["optimizer"],
    "schedule": ["schedule"],
    "search": ["search"],
    "experiment": ["experiment"],
    "hydra": ["hydra/launcher", "hydra/sweeper"],
}
SIGNIFICANT = 0.05  # a star marks a smaller p
SMALLEST_P = 0.001  # smaller values of p are not written out
BOARDS = Path("docs", "results", "leaderboard")  # a folder for each corpus
MAIN_BOARD = "multi30k"
STUDY = Path("results", "words")  # the runs of all presets on the languages of docs/results/words.md, below docs/
FILLED = (
    "quickstart",
    "results/leaderboard",
    "results/words",
    "api/translator",
    "api/attention",
)  # pages of docs/ with text in markers
COMMANDS = ("evaluate", "translate", "compare", "serve", "export")
SEARCHING = ("evaluate", "translate", "serve")  # the commands with the group `search`


class Key(NamedTuple):
    """A key of a YAML file with its default and its comment."""

    name: str  # key with its sections, as on the command line
    default: str
    comment: str


@dataclass
class ConfigFile:
    """The content of a YAML file of configs/."""

    comment: str  # comment above the first key
    base: list[str]  # files of the same group whose values this file inherits
    keys: list[Key]
    kind: str | None


def read(path: Path, configs: Path) -> ConfigFile:
    """Read the keys of a file with their comments."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    is_global = "@package _global_" in text
    # A bare # ends the description; examples follow it.
    head = [line for line in takewhile(lambda line: line.startswith("# "), lines) if "@package" not in line]
    values = yaml.safe_load(text) or {}
    base = [each.partition("@")[0] for each in values.get("defaults", []) if isinstance(each, str) and each != "_self_"]
    package = "" if is_global or path.parent == configs else ".".join([*path.parent.relative_to(configs).parts, ""])
    keys = [
        Key(f"{package}{name}", default, comment)
        for name, default, comment in _keys(text, lines)
        if name.partition(".")[0] not in {"defaults", "hydra", "_target_"}
    ]
    section = package or f"{path.parent.name}."
    kinds = [key.default for key in keys if key.name == f"{section}kind"]
    return ConfigFile(_joined(head), base, keys, kinds[0] if kinds else None)


def _keys(text: str, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    def walk(node: Any, prefix: str) -> Iterator[tuple[str, str, str]]:  # noqa: ANN401
        for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
            if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
                yield from walk(value, f"{prefix}{key.value}.")
            else:
                default = text[value.start_mark.index : value.end_mark.index].strip()
                yield f"{prefix}{key.value}", default, _comment(lines, key.start_mark, value.end_mark)

    return walk(yaml.compose(text, yaml.SafeLoader), "")


def _comment(lines: list[str], start: Any, end: Any) -> str:  # noqa: ANN401
    """Return the comment beside a value with its further lines, or else the comment above the key."""
    rest = lines[end.line][end.column :]
    if "#" in rest:
        column = lines[end.line].index("#", end.column)
        return _joined([rest.strip(), *_comment_lines(lines[end.line + 1 :], column)])
    above = [*_comment_lines(lines[: start.line][::-1], start.column)][::-1]
    return "" if len(above) == start.line else _joined(above)  # a comment at the top describes the file


def _comment_lines(lines: list[str], column: int) -> Iterator[str]:
    return takewhile(lambda line: line.startswith(f"{'':{column}}#"), lines)


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip().removeprefix("#").strip() for line in lines)


class Types:
    """Types and limits, from the JSON schema of a command's configuration."""

    def __init__(self, schema: Json) -> None:
        self.schema, self.definitions = schema, schema.get("$defs", {})

    def describe(self, name: str, kind: str | None = None) -> str:
        """Describe the values of the key `name`; empty if there is no such key. `kind` chooses between the variants of
        the key's section."""
        *sections, key = name.split(".")
        candidates = [self.schema]
        for section in sections:
            candidates = [
                variant
                for candidate in candidates
                for variant in self._variants(candidate.get("properties", {}).get(section, {}))
            ]
        found = [each for each in candidates if key in each.get("properties", {})]
        chosen = [each for each in found if kind in self._kinds(each)] or found
        texts = [self._text(each["properties"][key]) for each in chosen]
        return " or ".join(dict.fromkeys(text for text in texts if text))

    def _kinds(self, section: Json) -> list[str]:
        kind = section.get("properties", {}).get("kind", {})
        return [kind["const"]] if "const" in kind else kind.get("enum", [])

    def _variants(self, schema: Json) -> list[Json]:
        """List the schemas of a value: those of the alternatives if it has several."""
        if "$ref" in schema:
            return self._variants(self.definitions[schema["$ref"].rpartition("/")[2]])
        parts = schema.get("oneOf") or schema.get("anyOf")
        return [section for part in parts for section in self._variants(part)] if parts else [schema]

    def _text(self, schema: Json) -> str:
        variants = self._variants(schema)
        if len(variants) > 1:
            return " or ".join(dict.fromkeys(self._text(each) for each in variants))
        (schema,) = variants
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        if values:
            return ", ".join(f"`{each}`" for each in values)
        kind = schema.get("type", "")
        if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}: {self._text(schema['prefixItems'][0])}"
        if kind == "array":
            return f"list of {self._text(schema['items'])}"
        names = {"boolean": "`true`, `false`", "string": "text", "null": "`null`", "object": "mapping"}
        return names.get(kind, f"{kind}{_limits(schema)}")


def _limits(schema: Json) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    texts = [
        f"at least {low:,}" if low is not None else "",
        f"above {above:,}" if above is not None else "",
        f"at most {high:,}" if high is not None else "",
        f"below {below:,}" if below is not None else "",
    ]
    if low is not None and high is not None:
        texts = [f"{low:,} to {high:,}"]
    return "".join(f", {re.sub(r'[.]0(?![0-9])', '', text)}" for text in texts if text)


def _escaped(text: str) -> str:
    """Escape text for Markdown, except code between backticks."""
    prose = text.split("`")
    for number in range(0, len(prose), 2):
        plain = prose[number].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        prose[number] = re.sub(r"([\\*_\[\]|$])", r"\\\1", plain)
    return "`".join(prose)


def all_meanings(configs: Path) -> dict[str, str]:
    """Collect the first comment on each key, for files that set the key without a comment."""
    meanings: dict[str, str] = {}
    paths = [path for path in sorted(configs.rglob("*.yaml")) if "hydra" not in path.parts]
    for path in [configs / "train.yaml", *paths]:
        for key in read(path, configs).keys:
            if key.comment and not meanings.get(key.name):
                meanings[key.name] = key.comment
    return meanings


def _code(text: str) -> str:
    return f"`{text}`" if text else "` `"


def table(keys: list[Key], types: Types, meanings: dict[str, str], kind: str | None = None) -> str:
    """Return a Markdown table with a row for each key. The values of Hydra's own keys are an empty cell."""
    rows = ["| Key | Default | Values | Meaning |", "|---|---|---|---|"]
    for key in keys:
        plain = {"???": "required", "by preset": "by preset"}
        default = plain.get(key.default) or _code(" ".join(key.default.split()))
        values = types.describe(key.name, kind)
        rows.append(f"| `{key.name}` | {default} | {values} | {_escaped(key.comment or meanings.get(key.name, ''))} |")
    return "\n".join(rows)


def all_types() -> dict[str, Types]:
    """Return the types of each command's configuration, by command."""
    from nmt.config import schema
    from nmt.config.schema.model import SizeThresholds

    train = schema.TrainConfig.model_json_schema()
    thresholds = SizeThresholds.model_json_schema()
    size = train["$defs"]["Size"]
    # The schema of a run lacks the thresholds of size=auto, because a run chooses its size before the check.
    size["properties"] = {**size["properties"], "thresholds": thresholds}
    return {
        "train": Types(train),
        "evaluate": Types(schema.EvaluateConfig.model_json_schema()),
        "translate": Types(schema.TranslateConfig.model_json_schema()),
        "compare": Types(schema.CompareConfig.model_json_schema()),
        "serve": Types(schema.ServeConfig.model_json_schema()),
        "export": Types(schema.ExportConfig.model_json_schema()),
    }


def choices(configs: Path, group: str) -> dict[str, Path]:
    """Return the files of a group by the choice's name. Files of `experiment` may lie in subfolders."""
    folder = configs / group
    paths = sorted(folder.rglob("*.yaml") if group == "experiment" else folder.glob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def group_section(group: str, configs: Path, types: Types, meanings: dict[str, str]) -> str:
    """Return a Markdown section about a group: each choice with its values."""
    parts, preset_keys = [f"## `{group}=`\n"], dict[str, Key]()
    for name, path in choices(configs, group).items():
        file = read(path, configs)
        title = f"Common values of `{group}`" if path.stem.startswith("_") else f"`{group}={name}`"
        parts.append(f"### {title}\n" if group == "experiment" else f"### {title}\n\n{_escaped(file.comment)}\n")
        if group == "attention":
            parts.append(f"[The page of this preset](../attention/{path.stem}.md) shows its parts.\n")
            for key in file.keys:
                first = preset_keys.setdefault(key.name, key)
                if not key.name.startswith("attention.") or key.default != first.default:
                    preset_keys[key.name] = key._replace(default="by preset")
            continue
        bases = [
            f"the common values of `{group}`" if each.startswith("_") else f"the values of `{each}`"
            for each in file.base
        ]
        if bases:
            added = ", and:" if all(each.startswith("_") for each in file.base) else ", with these changes:"
            parts.append(f"It has {', '.join(bases)}{added if file.keys else '.'}\n")
        if group == "experiment":
            parts.append(f"```yaml\n{path.read_text(encoding='utf-8').strip()}\n```\n")
        elif file.keys:
            parts.append(table(file.keys, types, meanings, file.kind) + "\n")
    if preset_keys:  # all presets set the same few keys: one table for all
        parts.append(f"### Values that presets set\n\n{table([*preset_keys.values()], types, meanings)}\n")
    return "\n".join(parts)


def choices_table(configs: Path) -> str:
    """Return a Markdown table with a row for each group. The parts of an attention have the defaults of its preset."""
    defaults = default_choices(configs)
    rows = ["| Group | Default | Choices |", "|---|---|---|"]
    for page, groups in GROUPS.items():
        for group in groups:
            names = [name for name in choices(configs, group) if not name.startswith("_") and name != "as_trained"]
            listed = ", ".join(f"`{name}`" for name in names + (["basic"] if group.startswith("hydra/") else []))
            default = "by preset" if group.startswith("attention/") else f"`{defaults.get(group, 'basic')}`"
            rows.append(f"| [`{group}`]({page}.md) | {default} | {listed} |")
    return "\n".join(rows)


def default_choices(configs: Path) -> dict[str, str]:
    """Return the choice of each group in the defaults lists of nmt-train and of its encoder."""
    chosen = {}
    for name, prefix in (("train", ""), ("encoder/gru", "encoder/")):
        items = yaml.safe_load((configs / f"{name}.yaml").read_text(encoding="utf-8"))["defaults"]
        pairs = [pair for item in items if isinstance(item, dict) for pair in item.items()]
        chosen |= {f"{prefix}{group}": str(choice or "null") for group, choice in pairs}
    return chosen


def pages(configs: Path) -> dict[str, str]:
    """Return the pages of the whole reference: file name -> Markdown."""
    types, meanings = all_types(), all_meanings(configs)
    train = read(configs / "train.yaml", configs)
    sections = dict.fromkeys(key.name.partition(".")[0] if "." in key.name else "" for key in train.keys)
    index = [f"# Configuration\n\n{GRAMMAR}\n## Groups\n\n{choices_table(configs)}\n\n## Values of every run\n"]
    for section in sections:
        keys = [key for key in train.keys if (key.name.partition(".")[0] if "." in key.name else "") == section]
        index.append((f"### `{section}`\n\n" if section else "") + table(keys, types["train"], meanings) + "\n")
    found = {"index.md": "\n".join(index)}
    for page, groups in GROUPS.items():
        text = "\n".join(group_section(group, configs, types["train"], meanings) for group in groups)
        found[f"{page}.md"] = f"# {page.capitalize() if page != 'hydra' else 'Launchers and sweepers'}\n\n{text}"
    for command in COMMANDS:
        file = read(configs / f"{command}.yaml", configs)
        more = "\n`search=...` and its values are those of [search](search.md).\n" if command in SEARCHING else ""
        found[f"{command}.md"] = (
            f"# nmt-{command}\n\n{_escaped(file.comment)}\n{more}\n{table(file.keys, types[command], meanings)}\n"
        )
    return found


SECTION = re.compile(r"<!-- (\w+)((?: [\w.]+)*) -->\n.*?<!-- end -->", re.S)


def board(root: Path, corpus: str = MAIN_BOARD) -> Json:
    """Read the leaderboard of a corpus, as `scripts/evidence.py table` has written it."""
    written = root / BOARDS / corpus / "comparison" / "comparison.json"
    comparison: Json
    (comparison,) = json.loads(written.read_text(encoding="utf-8"))["comparisons"]
    return comparison


def p_cell(p: float) -> str:
    """Write a p value with three decimals, and a star if it is significant."""
    number = f"{p:.3f}" if p >= SMALLEST_P else f"< {SMALLEST_P}"
    return f"{number}{' *' if p < SIGNIFICANT else ''}"


def board_rows(root: Path, corpus: str = MAIN_BOARD) -> tuple[list[str], dict[str, str]]:
    """Return the two lines of a leaderboard's header, and the row of each preset in the order of BLEU. The columns of
    speed and of equal time need benchmark.json, with speeds that were measured one after the other."""
    comparison = board(root, corpus)
    with_speeds = (root / BOARDS / corpus / "benchmark.json").is_file()
    differences = {row["system"]: row for row in comparison["differences"]}
    minutes = comparison["budget"]["seconds"] / 60
    difference_title = f"Difference to `{comparison['baseline']}`"
    speed_titles = [f"Validation BLEU, {minutes:.1f} minutes", "ms an update", "Sentences/s"]
    titles = [
        *("`attention=`", "Seeds", "BLEU", difference_title, "p, corrected", "chrF", "Perplexity"),
        *("BLEU, longest fifth", *(speed_titles if with_speeds else []), "Parameters"),
    ]
    rows = {}
    for system in comparison["systems"]:
        difference = differences.get(system["name"])
        speeds = [
            "-" if system["equal_time"] is None else f"{system['equal_time']:.2f}",
            *(f"{system[key]:,.0f}" for key in ("update_milliseconds", "sentences_per_second")),
        ]
        cells = [
            f"`{system['name']}`",
            f"{len(system['seeds'])}",
            f"{system['bleu']:.2f} ± {system['bleu_ci']:.2f}",
            f"{difference['difference']:+.2f} ± {difference['difference_ci']:.2f}" if difference else "-",
            p_cell(difference["p"]) if difference else "-",
            *(f"{system[key]:.2f}" for key in ("chrf", "perplexity", "longest")),
            *(speeds if with_speeds else []),
            f"{system['parameters'] / 1e6:.1f} M",
        ]
        rows[system["name"]] = f"| {' | '.join(cells)} |"
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"], rows


def leaderboard(root: Path, corpus: str) -> str:
    """Return the table of all presets in the leaderboard of a corpus."""
    header, rows = board_rows(root, corpus)
    return "\n".join([*header, *rows.values()])


def preset_figures(root: Path, preset: str) -> str:
    """Return a preset's figures in the leaderboard and in docs/results/demo.md with their conditions, in one line."""
    comparison, parts = board(root), []
    difference = {row["system"]: row for row in comparison["differences"]}.get(preset)
    for system in (system for system in comparison["systems"] if system["name"] == preset):
        decoder = settings(root, preset)["decoder"]
        given = (
            f"{len(system['seeds'])} seeds, `decoder.readout={decoder['readout']} decoder.bridge={decoder['bridge']}`"
        )
        text = f"{system['bleu']:.2f} BLEU on the [Multi30k leaderboard](../results/leaderboard.md) ({given})"
        if difference:
            p = f"p {'<' if difference['p'] < SMALLEST_P else '='} {max(difference['p'], SMALLEST_P):.3f}"
            gain = f"{difference['difference']:+.2f} ± {difference['difference_ci']:.2f}"
            text += f", {gain} against `{comparison['baseline']}` ({p})"
        parts.append(f"{text}; {system['update_milliseconds']:,.0f} ms an update on one thread")
    demo = (root / "docs" / "results" / "demo.md").read_text(encoding="utf-8")
    if match := re.search(rf"^\| `{preset}`[^|]* \|(?:[^|]*\|){{2}} ([^|]*) \|[^|]*\| ([^|]*) \|", demo, re.M):
        bleu, aer = match.groups()
        aligned = "" if aer == "-" else f" and an AER of {aer}"
        corpus = "[demo corpus](../results/demo.md) (1 seed, trained as that page says)"
        parts.append(f"{bleu} BLEU{aligned} on the {corpus}")
    return f"**Figures:** {'; '.join(parts) or 'none yet'}."


def settings(root: Path, preset: str) -> Json:
    """Read the configuration with which the leaderboard's runs of a preset were trained."""
    with np.load(root / BOARDS / MAIN_BOARD / f"attention-{preset}_seed-1.npz", allow_pickle=False) as arrays:
        config: Json = json.loads(arrays["record"].tobytes())["config"]
    return config


def words(root: Path, metric: str) -> str:
    """Return the table and the picture of the study of pronunciations by a metric, as `scripts/corpora.py table` has
    written them, or a sentence if it has no finished runs."""
    written = root / "docs" / STUDY / "comparison" / f"{metric}.md"
    if not written.is_file():
        return "The study has no finished runs yet."
    picture = (
        f"![Average ranks, and groups without significant differences]({STUDY.name}/comparison/{metric}_ranks.svg)"
    )
    return f"{written.read_text(encoding='utf-8')}\n{picture}"


def headline(root: Path, names: str) -> str:
    """Return a table of some presets: what docs/attention/index.md says of them, and their BLEU in the leaderboard."""
    overview = (root / "docs" / "attention" / "index.md").read_text(encoding="utf-8")
    comparison = board(root)
    scores = {system["name"]: f"{system['bleu']:.1f}" for system in comparison["systems"]}
    differences = {
        row["system"]: f"{row['difference']:+.1f} ± {row['difference_ci']:.1f}{' *' if row['p'] < SIGNIFICANT else ''}"
        for row in comparison["differences"]
    }
    lines = ["| `attention=` | What it does | Paper | Test BLEU | Difference |", "|---|---|---|---|---|"]
    for name in names.split():
        match = re.search(rf"^\| \[`{name}`\]\((.*?)\) \| (.*?) \| (.*?) \|$", overview, re.M)
        if match is None:
            raise ValueError(f"docs/attention/index.md has no row of {name}")
        page, summary, paper = match.groups()
        figures = f"{scores.get(name, '-')} | {differences.get(name, '-')}"
        lines.append(f"| [`{name}`](docs/attention/{page}) | {summary} | {paper} | {figures} |")
    return "\n".join(lines)


def clone(root: Path, _: str) -> str:
    """Return the command that clones the project, with the address in pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return f"```sh\ngit clone {project['urls']['Repository']} nmt && cd nmt\n```"


def python(_: Path, names: str) -> str:
    """Return the Python reference of an object and of the members named after it."""
    name, *members = names.split()
    return reference(name, members)


FILLS = {  # by the NAME in `<!-- NAME -->`
    "figures": preset_figures,
    "leaderboard": leaderboard,
    "words": words,
    "headline": headline,
    "clone": clone,
    "python": python,
}


def filled(root: Path, path: Path) -> str:
    """Return the text of a page with new text between each `<!-- NAME WORDS -->` and `<!-- end -->`. Without words, the
    text is about what the page is named after."""

    def section(match: re.Match[str]) -> str:
        return f"<!-- {match[1]}{match[2]} -->\n{FILLS[match[1]](root, match[2].strip() or path.stem)}\n<!-- end -->"

    return SECTION.sub(section, path.read_text(encoding="utf-8"))


def preset_pages(root: Path) -> list[Path]:
    """List the page of each preset. Exits with a message if a page is missing."""
    presets = sorted((root / "configs" / "attention").glob("*.yaml"))
    files = [root / "docs" / "attention" / path.with_suffix(".md").name for path in presets]
    for path in files:
        if not path.is_file():
            sys.exit(f"{path.relative_to(root)}: is missing; each preset has a page, see CONTRIBUTING.md")
    return files


def written_pages(root: Path) -> dict[Path, str]:
    """Return the text of each file that this script writes."""
    reference = {root / "docs" / "configuration" / name: text for name, text in pages(root / "configs").items()}
    others = [*preset_pages(root), root / "README.md", *(root / "docs" / f"{page}.md" for page in FILLED)]
    return reference | {path: filled(root, path) for path in others}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a file differs")
    check = parser.parse_args().check
    root = Path(__file__).resolve().parents[1]
    stale = [
        (path, text)
        for path, text in written_pages(root).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        print(path.relative_to(root))
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
