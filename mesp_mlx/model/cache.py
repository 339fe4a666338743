"""The cache's folders of models: each is built beside its place and takes its name when complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from mesp_mlx.errors import UserError


@contextmanager
def building(folder: Path) -> Iterator[Path | None]:
    """Gives an empty folder to fill, which becomes `folder`; or None when that is there already.

    An error or Ctrl-C removes what was written. One process builds a folder at a time, others wait for it.

    Raises:
        UserError: the disk can't be written.
    """
    if folder.is_dir():
        yield None
        return
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(_lock(partial)):
            if folder.is_dir():
                yield None
                return
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                yield partial
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"building the model folder {folder}: {error.strerror or error}. Nothing was kept. Free some space there, or set MESP_MLX_CACHE to another folder."
        ) from error


def sweep(parent: Path) -> None:
    """Remove what runs that were killed left half-built in a folder; what another process is building now stays."""
    for partial in parent.glob(".*.partial"):
        try:
            with filelock.FileLock(_lock(partial), timeout=0):
                shutil.rmtree(partial, ignore_errors=True)
        except (filelock.Timeout, OSError):
            continue


def _lock(partial: Path) -> Path:
    return partial.with_suffix(".lock")
