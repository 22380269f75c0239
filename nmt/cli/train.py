"""nmt-train: train, evaluate, draw alignments."""

import os

from nmt.cli.app import output_dir, run
from nmt.config.compose import load_values, typed, with_values
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig


def main() -> None:
    """Entry point."""
    run("train", TrainConfig, _train)


def _train(config: TrainConfig, overrides: list[str]) -> int:
    from nmt.run import FREE, RunDirectory
    from nmt.training.job import train

    directory = output_dir()
    if config.run is not None:
        directory = RunDirectory.existing(config.run).path
        given = [override for override in overrides if not override.startswith("run=")]
        for override in given:
            if override.partition("=")[0] not in FREE:
                raise UserError(
                    f"{override}: run={config.run} goes on with the configuration saved there; only these may change: "
                    f"{', '.join(sorted(FREE - {'run'}))}"
                )
        config = typed(TrainConfig, with_values(load_values(directory / "config.yaml"), given))
    status = train(config.model_copy(update={"run": None}), directory, overrides)
    print(f"tensorboard: tensorboard --logdir {os.path.relpath(directory)} --host localhost")
    print(f"run: {os.path.relpath(directory)}")
    return status
