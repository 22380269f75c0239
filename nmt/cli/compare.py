"""nmt-compare: rank systems, tell which differences are real, and show where they differ."""

import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from nmt.cli.app import run
from nmt.config.errors import UserError
from nmt.config.schema import CompareConfig


def main() -> None:
    """Entry point."""
    run("compare", CompareConfig, _compare)


def _compare(config: CompareConfig, overrides: list[str]) -> None:
    from nmt.comparison.report import write_comparison

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError("-m: one comparison takes all runs, as in runs=[A,B]; leave it out")
    output = Path(config.output).expanduser()
    if any(place.exists() and not place.is_dir() for place in (output, *output.parents)):
        raise UserError(f"output={config.output}: is not a folder, or is inside of what is none")
    if output.is_dir() and any(output.iterdir()) and not (output / "comparison.json").is_file():
        raise UserError(f"output={config.output}: holds other things than a comparison; name another folder")
    made = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={config.output}: cannot be made ({error.strerror})") from None
    settings = config.model_dump(exclude={"output"})
    try:
        print(write_comparison(output=output, **settings))
    except UserError:
        if made:
            output.rmdir()
        raise
    print(f"page: {os.path.relpath(output / 'index.html')}")
