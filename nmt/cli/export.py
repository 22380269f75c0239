"""nmt-export: pack a trained model, with its card, into one archive file."""

import os
from pathlib import Path

from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.run_command import run_configured
from nmt.config.errors import UserError, user_path
from nmt.config.schema import ExportConfig
from nmt.system.processes import leave_group


def main() -> None:
    leave_group()  # processes of torchrun, if any, do not share this work
    run_configured("export", ExportConfig, _export)


def _export(config: ExportConfig) -> None:
    with exit_at_ctrl_c("export"):
        from nmt.export.contents import contents
        from nmt.system.files import write_archive
        from nmt.system.run import RunDirectory

    run = RunDirectory.existing(config.run[0])
    file = user_path(config.output)
    _check_file(config, file)
    if run.owns(file):
        raise UserError(f"output={config.output}: lies among the run's own files; name another file")
    packed = contents(
        run,
        file.name,
        checkpoint=config.checkpoint,
        license=config.license,
        sentences=config.sentence or [],
        held_out=config.held_out,
        half=config.precision == "fp16",
    )
    write_archive(file, packed)
    print(f"archive: {os.path.relpath(file)} ({file.stat().st_size / 1e6:,.1f} MB)")


def _check_file(config: ExportConfig, file: Path) -> None:
    """Raises UserError, before the model is loaded, if the file could not be written."""
    if file.is_dir():
        raise UserError(f"output={config.output}: is a folder; name a file, such as model.nmt")
    if os.path.lexists(file) and not config.overwrite:
        raise UserError(f"output={config.output}: exists; name another file, or set overwrite=true")
    folder = next(folder for folder in file.absolute().parents if os.path.lexists(folder))
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UserError(f"output={config.output}: cannot be written; {folder} is no folder that may be written to")
