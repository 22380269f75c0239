"""nmt-compare: rank systems, test their differences for significance, show where they differ."""

import os

from nmt.cli.app import output_folder, run_command
from nmt.cli.entry import exit_at_ctrl_c
from nmt.config.schema import CompareConfig


def main() -> None:
    """Entry point."""
    run_command("compare", CompareConfig, _compare)


def _compare(config: CompareConfig, overrides: list[str]) -> None:
    with exit_at_ctrl_c("compare"):
        from nmt.compare.compare import Ranking
        from nmt.compare.report import write_comparison

    settings = config.model_dump(exclude={"output", "metric", "comet_model"})
    settings["ranking"] = Ranking.by(config.metric, config.comet_model)
    with output_folder(config.output, "comparison.json", "a comparison") as output:
        print(write_comparison(output=output, **settings))
    print(f"page: {os.path.relpath(output / 'index.html')}")
