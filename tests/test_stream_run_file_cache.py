"""The run's file and memory that is not the process's: the system's page cache, and disks that are memory themselves."""

import os

import numpy as np
import pytest

from mesp_mlx import reference
from mesp_mlx.stream import run_file
from mesp_mlx.stream.run_file import Parked, RunFile


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system can't be asked")
@pytest.mark.parametrize("bypass", [False, True])
def test_the_page_cache_is_asked_to_forget(tmp_path, bypass, monkeypatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, advice: asked.append((start, size)))
    file = RunFile(tmp_path, 0, reference, bypass)
    parked = file.put([np.ones(10), np.ones(20)])
    parked.get()
    assert asked == ([(0, 240)] if bypass else [])
    assert isinstance(parked, Parked)
    file.close()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system can't be asked")
@pytest.mark.parametrize("bypass", [False, True])
def test_what_was_written_is_on_the_disk_before_it_is_forgotten(tmp_path, bypass, monkeypatch):
    """Linux drops no page that is still to be written."""
    told: list[str] = []
    monkeypatch.setattr(run_file, "SYNC_BYTES", 200)
    monkeypatch.setattr(os, "fdatasync", lambda _: told.append("written"))
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, advice: told.append(f"dropped {start} {size}"))
    file = RunFile(tmp_path, 0, reference, bypass)
    held = [file.put(np.ones(10)) for _ in range(6)]
    assert told == (["written", "dropped 0 0"] * 2 if bypass else []) and len(held) == 6
    file.close()


def test_a_folder_in_memory_is_known(tmp_path):
    (tmp_path / "a b" / "disk").mkdir(parents=True)
    (tmp_path / "a bc").mkdir()
    mounts, place = tmp_path / "mounts", str(tmp_path.resolve()).replace(" ", "\\040")
    mounts.write_text(f"x / ext4 rw 0 0\nnone {place}/a\\040b tmpfs rw 0 0\nx {place}/a\\040b/disk ext4 rw 0 0\n")
    found = [run_file.in_memory(tmp_path / name, mounts) for name in ("", "a b", "a b/disk", "a bc")]
    assert found == [False, True, False, False] and not run_file.in_memory(tmp_path, tmp_path / "absent")
