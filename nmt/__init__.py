"""Recurrent encoder-decoder translation with selectable attention."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nmt.translate.translator import Translation, Translator

__all__ = ["Translation", "Translator"]


def __getattr__(name: str) -> object:
    """`from nmt import Translator`, loaded when first used: a command's --help need not wait for torch."""
    if name in __all__:
        from nmt.translate import translator

        return getattr(translator, name)
    raise AttributeError(f"module 'nmt' has no attribute '{name}'")
