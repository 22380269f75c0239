"""The results that tests/quick_hydra.py caches equal those of Hydra without a cache."""

from pathlib import Path
from typing import Any

import pytest
import quick_hydra
from hydra import compose, initialize_config_dir
from hydra._internal import config_loader_impl as loader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from nmt.config.compose import config_dir


def composed(*overrides: str, folder: Path | None = None, name: str = "train") -> Any:  # noqa: ANN401
    """Compose the configuration, with the section `hydra`, as plain values."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder or config_dir()), version_base="1.3"):
        config = compose(name, list(overrides), return_hydra_config=True)
    return OmegaConf.to_container(config)


def forget(patch: pytest.MonkeyPatch) -> None:
    """Restore Hydra's own functions, without caches."""
    patch.setattr(loader, "create_defaults_list", quick_hydra._list_defaults)
    patch.setattr(loader.ConfigLoaderImpl, "_compose_config_from_defaults_list", quick_hydra._compose)
    patch.setattr(OverridesParser, "parse_rule", quick_hydra._parse_rule)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["attention=luong_dot", "attention/window=local_m", "attention.window.reach=2", "search=greedy"],
        ["experiment=attention_study", "+extra.key=[1,{a: b}]", "hydra.run.dir=x", "++optimizer.lr=${encoder.hidden}"],
    ],
)
def test_it_is_what_hydra_composes(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [composed(*overrides) for _ in range(2)]
    with monkeypatch.context() as patch:
        forget(patch)
        fresh = composed(*overrides)
    assert kept == [fresh, fresh]


def test_what_one_composition_changes_is_not_in_the_next() -> None:
    before = composed()
    assert composed("encoder.hidden=7", "optimizer.lr=9")["encoder"]["hidden"] == 7
    assert composed() == before
