"""Saved configurations: read as data, without importing or calling anything that they name, and written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nmt.config import schema
from nmt.config.compose import validated
from nmt.config.errors import REMOVED, UserError, format_value
from nmt.system.files import read_bytes, write_atomically

MAX_BYTES = 1_000_000  # of a saved configuration, which has a few thousand
MAX_DEPTH = 50  # of nested sections; a saved configuration has four


class _Loader(yaml.SafeLoader):
    """YAML without aliases, which can expand a few lines to gigabytes, and without repeated keys, of which PyYAML
    silently drops the first."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not supported", problem_mark=mark)
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="too many nested sections")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"{format_value(key.value)} is repeated", problem_mark=key.start_mark
                )
            keys.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def load_values(path: Path) -> dict[str, Any]:
    """Read a saved configuration without importing or calling anything that it names. Raises UserError."""
    line = ""
    try:
        values = yaml.load(read_bytes(path, MAX_BYTES).decode("utf-8"), _Loader)
    except Exception as error:  # PyYAML raises anything, for example KeyError for !!bool x
        if isinstance(error, OSError):
            reason = error.strerror
        elif isinstance(error, yaml.MarkedYAMLError):
            reason = error.problem
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        else:
            reason = format_value(str(error).partition("\n")[0]) or type(error).__name__
        raise UserError(f"{path}{line}: cannot be read as a configuration ({reason})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a configuration (expected keys with values)")
    return _without_unused(values)


def _without_unused(values: Mapping[Any, Any], prefix: str = "") -> dict[Any, Any]:
    """Saved values without removed keys that had no value: the run did not use them."""
    return {
        key: _without_unused(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None or f"{prefix}{key}" not in REMOVED
    }


def load_config(path: Path) -> schema.TrainConfig:
    """Read and check a run's saved configuration. Raises UserError."""
    return validated(schema.TrainConfig, load_values(path), path)


def save_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write values as YAML, keeping their order."""
    write_atomically(path, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).encode("utf-8"))
