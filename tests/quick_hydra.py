"""Hydra without repeated work in one process and its forks: each YAML file is parsed once, a job is composed once."""

import copy
import dataclasses
from functools import cache
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode

from nmt.cli import help

_load = FileConfigSource.load_config
_keys_of = cache(help._keys_of)
_compose_mode = Hydra.get_mode


def parse_files_once() -> None:
    """Keep what Hydra and `help` parse, until a file changes."""
    FileConfigSource.load_config = _load_once
    help._keys_of = lambda path, prefix: list(_keys_of(path, prefix))


def compose_once() -> None:
    """Skip Hydra's first composition, whose only result is hydra.mode, unless an argument can set that."""
    Hydra.get_mode = mode


def mode(hydra: Hydra, config_name: str, overrides: list[str]) -> RunMode | None:
    """hydra.mode: configs/train.yaml leaves it open, so that -m decides; the other commands have single jobs."""
    if any(word.lstrip("+~").startswith(("hydra", "experiment")) for word in overrides):
        return _compose_mode(hydra, config_name, overrides)
    return None if config_name == "train" else RunMode.RUN


def _load_once(source: FileConfigSource, config_path: str) -> ConfigResult:
    path = Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml")
    written = path.stat().st_mtime_ns if path.is_file() else None
    result = _parsed(path, written)
    where = {"path": f"{source.scheme()}://{source.path}", "provider": source.provider}
    return dataclasses.replace(result, config=copy.deepcopy(result.config), header=dict(result.header), **where)


@cache
def _parsed(path: Path, _written: int | None) -> ConfigResult:
    return _load(FileConfigSource("", str(path.parent)), path.name)
