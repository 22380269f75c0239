"""nmt-compare: rank systems, tell which differences are real, and show where they differ."""

import os

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from nmt.cli.app import run_command
from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.output import output_folder
from nmt.config.errors import UserError
from nmt.config.schema import CompareConfig


def main() -> None:
    """Entry point."""
    run_command("compare", CompareConfig, _compare)


def _compare(config: CompareConfig, overrides: list[str]) -> None:
    with exit_at_ctrl_c("compare"):
        from nmt.comparison.report import write_comparison

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError("-m: one comparison takes all runs, as in runs=[A,B]; leave it out")
    settings = config.model_dump(exclude={"output"})
    with output_folder(config.output, "comparison.json", "a comparison") as output:
        print(write_comparison(output=output, **settings))
    print(f"page: {os.path.relpath(output / 'index.html')}")
