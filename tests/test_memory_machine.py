"""What the machine has, from what systems say in their own words; and speeds, of which nothing here asserts how high they are."""

import dataclasses
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from backends import each_backend, mx, needs_mlx, ops

from mesp_mlx.memory import machine, measure
from mesp_mlx.memory.machine import Memory

MB, PAGE = 10**6, 16384


def statistics(wired: int, purgeable: int, compressor: int, internal: int) -> bytes:
    """A vm_statistics64, in pages: four counts, nine 64-bit counters, two counts, four 64-bit counters, four counts, one 64-bit counter."""
    return struct.pack("<4I9Q2I4Q4IQ", 11, 12, 13, wired, *range(100, 109), purgeable, 14, *range(200, 204), compressor, 15, 16, internal, 300)


def test_a_mac_has_what_is_neither_wired_nor_held_by_programs():
    data = statistics(wired=1000, purgeable=50, compressor=300, internal=2050)
    assert len(data) == 152
    found = machine.from_vm_statistics(data, PAGE, total=8000 * PAGE, own=100 * PAGE)
    assert found == Memory(8000 * PAGE, (8000 - 1000 - 300 - 2000 + 100) * PAGE, (2000 + 300 - 100) * PAGE)
    assert found.most_bytes == 7000 * PAGE, "all but what is wired"
    crowded = machine.from_vm_statistics(statistics(3000, 0, 0, 6000), PAGE, 8000 * PAGE, own=100 * PAGE)
    assert crowded.available_bytes == 100 * PAGE, "at least what this process holds"


def linux(root: Path, meminfo: dict[str, int], cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("".join(f"{name}: {size // 1024} kB\n" for name, size in meminfo.items()))
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


INFO = {"MemTotal": 8192 * 1024, "MemFree": 1024 * 1024, "MemAvailable": 4096 * 1024, "AnonPages": 2048 * 1024, "Shmem": 512 * 1024}


def test_linux_counts_caches_as_available(tmp_path):
    own = 100 * 1024
    expected = Memory(8192 * 1024, 4096 * 1024 + own, 2048 * 1024 + 512 * 1024 - own)
    assert machine.from_proc(linux(tmp_path / "a", INFO), own) == expected
    old = {name: size for name, size in INFO.items() if name != "MemAvailable"}
    assert machine.from_proc(linux(tmp_path / "b", old), own).available_bytes == 1024 * 1024 + own


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_groups_leave(tmp_path, version):
    """Of nested groups the narrowest counts; cached files can be dropped."""
    own, kb = 100 * 1024, 1024
    limit, now, base, line = (
        ("memory.max", "memory.current", "", "0::/outer/inner\n")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory/", "4:cpu,memory:/outer/inner\n1:name=systemd:/\n")
    )
    files = {
        f"{base}outer/inner/{limit}": "max\n" if version == 2 else f"{1 << 62}\n",
        f"{base}outer/inner/{now}": f"{900 * kb}\n",
        f"{base}outer/{limit}": f"{2000 * kb}\n",
        f"{base}outer/{now}": f"{900 * kb}\n",
        f"{base}outer/memory.stat": f"anon {500 * kb}\ninactive_file {250 * kb}\nactive_file {50 * kb}\n",
    }
    found = machine.from_proc(linux(tmp_path, INFO, line, files), own)
    assert found == Memory(2000 * kb, (2000 - 600) * kb + own, 600 * kb - own)


def test_elsewhere_psutil_says(monkeypatch):
    import psutil

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(measure, "process_now_bytes", lambda: 70 * MB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("found", (), {"total": 8000 * MB, "available": 3000 * MB, "used": 4000 * MB}))
    assert machine.memory() == Memory(8000 * MB, 3070 * MB, 3930 * MB)


def test_this_machine_has_room_for_this_process():
    found = machine.memory()
    assert measure.process_now_bytes() < found.available_bytes <= found.total_bytes == machine.total_bytes() and found.most_bytes <= found.total_bytes


def test_metal_says_nothing_where_there_is_none(monkeypatch):
    assert machine.working_set_bytes("numpy") is None
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine.working_set_bytes("mlx") is None


@each_backend
def test_speeds_are_measured_or_typical(backend, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 * MB))
    typical, found = machine.typical(True), machine.speeds(backend, True, file)
    measured = {name for name, value in dataclasses.asdict(found).items() if value != getattr(typical, name)}
    assert measured == {"matrix_flops_per_second", "dequantised_per_second", "read_bytes_per_second"}
    assert all(value > 0 for value in dataclasses.asdict(found).values())
    assert machine.speeds(None, True, tmp_path / "absent") == typical, "what can't be measured is typical"
    assert machine.speeds(None, False).matrix_flops_per_second > typical.matrix_flops_per_second


def test_writing_leaves_nothing_behind(tmp_path):
    typical = machine.typical(True)
    written = machine.with_writing(typical, tmp_path)
    assert written.write_bytes_per_second != typical.write_bytes_per_second and written.read_bytes_per_second == typical.read_bytes_per_second
    assert machine.with_writing(typical, tmp_path, read=True).read_bytes_per_second != typical.read_bytes_per_second
    assert list(tmp_path.iterdir()) == []
    assert machine.with_writing(typical, tmp_path / "absent") == typical


@needs_mlx
def test_measuring_is_not_in_the_allocators_peak():
    mx.reset_peak_memory()
    machine.speeds(ops, True)
    assert mx.get_peak_memory() <= mx.get_active_memory() + 1000


def test_measuring_does_not_set_a_runs_peak():
    code = """
from mesp_mlx import reference
from mesp_mlx.memory import machine, measure
before = measure.process_peak_bytes()
machine.speeds(reference, True)
print(measure.process_peak_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert int(done.stdout) < 6 * MB, done.stderr
