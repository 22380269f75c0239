"""Recurrent encoder-decoder translation with selectable attention."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nmt.cli.python_api import Comparison, Run, compare_runs, train
    from nmt.translate.translation import Translation
    from nmt.translate.translator import Translator

DISTRIBUTION = "nmt-attention"  # the name under which pip installs this package
__all__ = ["Comparison", "Run", "Translation", "Translator", "compare_runs", "train"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that a command's --help does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'nmt' has no attribute '{name}'")
    home = "nmt.translate.translator" if name.startswith("Transl") else "nmt.cli.python_api"
    return getattr(import_module(home), name)
