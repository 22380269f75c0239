"""nmt-export: pack a trained model into one file, or into programs for other runtimes."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nmt.cli.app import output_folder, run_command
from nmt.cli.entry import exit_at_ctrl_c
from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import ExportConfig

if TYPE_CHECKING:
    from nmt.run import RunDirectory


def main() -> None:
    """Entry point."""
    run_command("export", ExportConfig, _export)


def _export(config: ExportConfig, overrides: list[str]) -> None:
    with exit_at_ctrl_c("export"):
        import nmt.export.contents  # noqa: F401  (all that is large)
        from nmt.run import RunDirectory

    run = RunDirectory.existing(config.run[0])
    if config.format == "onnx":
        _write_programs(config, run)
    else:
        _write_archive(config, run)


def _write_archive(config: ExportConfig, run: "RunDirectory") -> None:
    from nmt.archive import write_archive
    from nmt.export.contents import contents

    file = user_path(config.output)
    _check_file(config, file)
    packed = contents(
        run,
        file.name,
        checkpoint=config.checkpoint,
        license=config.license,
        sentences=config.sentence or [],
        held_out=config.held_out,
    )
    _check_file(config, file)  # the model may have taken a while to load
    write_archive(file, packed)
    print(f"archive: {os.path.relpath(file)} ({file.stat().st_size / 1e6:,.1f} MB)")


def _write_programs(config: ExportConfig, run: "RunDirectory") -> None:
    from nmt.export.onnx import DESCRIPTION, program_files
    from nmt.files import write_atomically

    with output_folder(config.output, DESCRIPTION, "exported programs") as folder:
        if any(folder.iterdir()) and not config.overwrite:
            raise UserError(f"output={config.output}: holds programs; name another folder, or set overwrite=true")
        for name, content in program_files(run, config.checkpoint).items():
            write_atomically(folder / name, content)
    print(f"programs: {os.path.relpath(folder)}")


def _check_file(config: ExportConfig, file: Path) -> None:
    """Raises UserError, before the model is loaded, if the file could not be written."""
    if file.is_dir():
        raise UserError(f"output={config.output}: is a folder; name a file, such as model.nmt")
    if os.path.lexists(file) and not config.overwrite:
        raise UserError(f"output={config.output}: exists; name another file, or set overwrite=true")
    folder = next(folder for folder in file.absolute().parents if os.path.lexists(folder))
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UserError(f"output={config.output}: cannot be written; {folder} is no folder that may be written to")
