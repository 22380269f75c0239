"""Paths that a user gives."""

from pathlib import Path

from nmt.config.errors import UserError


def user_path(path: Path | str) -> Path:
    """The path with the home directory for a leading ~. Raises UserError where there is no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: no home directory is known for ~ (HOME is not set); give the whole path, for prepared corpora in "
            "NMT_CACHE"
        ) from None
