"""A faster Hydra for tests: one process and its forks parse and compose everything only once."""

import copy
import dataclasses
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl as loader
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.core_plugins import file_config_source
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.hydra import Hydra
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, base, grammar_parser

from nmt.cli import help

Plugins.instance()  # before the patches below, because it executes modules of Hydra again
FileConfigSource = file_config_source.FileConfigSource
_load = FileConfigSource.load_config
_keys_of = cache(help._keys_of)
_compose_mode = Hydra.get_mode
_list_defaults = loader.create_defaults_list
_compose = loader.ConfigLoaderImpl._compose_config_from_defaults_list
_find_options = loader.ConfigLoaderImpl.get_group_options
_parse_rule = OverridesParser.parse_rule
SET_MODE = ("hydra.mode", "hydra=", "hydra/", "experiment")  # prefixes of arguments that may set hydra.mode
_lists: dict[Any, DefaultsList] = {}
_composed: dict[Any, DictConfig] = {}


def parse_files_once() -> None:
    """Cache what Hydra and `help` parse, until a file changes, and what Hydra composes from the same files."""
    FileConfigSource.load_config = _load_once
    help._keys_of = lambda path, prefix: list(_keys_of(path, prefix))
    base.parse = cache(grammar_parser.parse)  # the grammar of interpolations
    OverridesParser.parse_rule = _rule
    loader.create_defaults_list = _list_once
    loader.ConfigLoaderImpl.get_group_options = _options
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = _compose_once


def compose_once() -> None:
    """Skip Hydra's first composition, whose only result is hydra.mode, unless an argument may set hydra.mode."""
    Hydra.get_mode = mode


def mode(hydra: Hydra, config_name: str, overrides: list[str]) -> RunMode | None:
    """Return hydra.mode: None for nmt-train, where -m decides; a single job for the other commands."""
    if any(word.lstrip("+~").startswith(SET_MODE) for word in overrides):
        return _compose_mode(hydra, config_name, overrides)
    return None if config_name == "train" else RunMode.RUN


def _load_once(source: Any, config_path: str) -> ConfigResult:  # noqa: ANN401
    path = Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml")
    written = path.stat().st_mtime_ns if path.is_file() else None
    result = _parsed(path, written)
    where = {"path": f"{source.scheme()}://{source.path}", "provider": source.provider}
    return dataclasses.replace(result, config=copy.deepcopy(result.config), header=dict(result.header), **where)


@cache
def _parsed(path: Path, _written: int | None) -> ConfigResult:
    return _load(FileConfigSource("", str(path.parent)), path.name)


def _rule(parser: OverridesParser, text: str, name: str) -> Any:  # noqa: ANN401
    return copy.deepcopy(_parsed_rule(text, name))


@cache
def _parsed_rule(text: str, name: str) -> Any:  # noqa: ANN401
    return _parse_rule(OverridesParser.create(), text, name)


def _options(
    self: loader.ConfigLoaderImpl,
    group_name: str,
    results_filter: ObjectType | None = ObjectType.CONFIG,
    config_name: str | None = None,
    overrides: list[str] | None = None,
) -> list[str]:
    """List a group's choices without copying all sources, which only overrides of the search path need."""
    if config_name is None and not overrides:
        return self.repository.get_group_options(group_name, results_filter)
    return _find_options(self, group_name, results_filter, config_name, overrides)


def _list_once(
    repo: IConfigRepository, config_name: str | None, overrides_list: list[Override], **how: bool
) -> DefaultsList:
    """List the files to compose. They depend only on overrides of groups; overrides of values are added afterwards."""
    others = [override for override in overrides_list if not _is_of_a_value(override)]
    key = (config_name, *(override.input_line for override in others), *how.items(), *_state(repo))
    if key not in _lists:
        _lists[key] = _list_defaults(repo, config_name, others, **how)
    kept = {override.input_line for override in _lists[key].config_overrides}
    values = [each for each in overrides_list if _is_of_a_value(each) or each.input_line in kept]
    return dataclasses.replace(_lists[key], config_overrides=values)


def _is_of_a_value(override: Override) -> bool:
    name = override.key_or_group
    return "." in name and override.package is None and not override.is_sweep_override()


def _compose_once(self: loader.ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
    key = (repr(defaults), *_state(repo))
    if key not in _composed:
        _composed[key] = _compose(self, defaults, repo)
    return copy.deepcopy(_composed[key])


def _state(repo: IConfigRepository) -> Iterator[tuple[str, int]]:
    """Yield the sources and the modification times of their files."""
    for source in repo.get_sources():
        yield source.full_path(), 0
        if source.scheme() == "file":
            for folder, _, names in os.walk(source.path):
                yield from ((path := f"{folder}/{name}", os.stat(path).st_mtime_ns) for name in names)
