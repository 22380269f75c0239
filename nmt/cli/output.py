"""What a command writes that makes no run: streams, and the folder of `output=`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, AnyStr

from nmt.config.errors import UserError
from nmt.config.overrides import user_path


@contextmanager
def output_folder(output: str, marker: str, what: str, option: str = "output=") -> Iterator[Path]:
    """The folder of an `option` of the command line, made if there is none; if an error leaves it empty, it is removed
    again with the parents made for it. Raises UserError if it cannot be written, or holds anything but no file `marker`
    of an earlier `what`.
    """
    folder = user_path(output)
    if any(place.exists() and not place.is_dir() for place in (folder, *folder.parents)):
        raise UserError(f"{option}{output}: is not a folder, or is inside of what is none")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / marker).is_file():
        raise UserError(f"{option}{output}: holds other things than {what}; name another folder")
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}{output}: cannot be made ({error.strerror})") from None
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{option}{output}: cannot be written; name another folder")
        yield folder
    except BaseException:
        with suppress(OSError):
            for place in made:
                place.rmdir()
        raise


def write(stream: IO[AnyStr], content: AnyStr, name: str) -> OSError | None:
    """Write to a stream, and what it buffers. Returns the error, if any, with the stream's name.

    Nothing more reaches the stream after an error: the interpreter would try again when it closes the stream, and print
    the error in its own words.
    """
    try:
        stream.write(content)
        stream.flush()
    except OSError as error:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
        error.filename = name
        return error
    return None
