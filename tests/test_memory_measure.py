"""The counts of memory move when memory does, and stay when it does not."""

import ctypes
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from mesp_mlx.memory import measure

MB = 10**6

# The fields of Apple's struct rusage_info_v4 after ri_uuid, in order: each a uint64_t.
RUSAGE_V4_FIELDS = """
ri_user_time ri_system_time ri_pkg_idle_wkups ri_interrupt_wkups ri_pageins ri_wired_size ri_resident_size ri_phys_footprint
ri_proc_start_abstime ri_proc_exit_abstime ri_child_user_time ri_child_system_time ri_child_pkg_idle_wkups ri_child_interrupt_wkups
ri_child_pageins ri_child_elapsed_abstime ri_diskio_bytesread ri_diskio_byteswritten ri_cpu_time_qos_default ri_cpu_time_qos_maintenance
ri_cpu_time_qos_background ri_cpu_time_qos_utility ri_cpu_time_qos_legacy ri_cpu_time_qos_user_initiated ri_cpu_time_qos_user_interactive
ri_billed_system_time ri_serviced_system_time ri_logical_writes ri_lifetime_max_phys_footprint ri_instructions ri_cycles ri_billed_energy
ri_serviced_energy ri_interval_max_phys_footprint ri_runnable_time
"""


def test_decodes_apple_s_struct():
    values = {field: 1000 + i for i, field in enumerate(RUSAGE_V4_FIELDS.split())}
    values |= {"ri_phys_footprint": 62_500_000, "ri_lifetime_max_phys_footprint": 5_000_000_000}
    data = bytes(range(16)) + struct.pack(f"<{len(values)}Q", *values.values())
    assert len(data) == 296
    assert measure.decode_rusage_v4(data) == (62_500_000, 5_000_000_000)
    assert measure.decode_rusage_v4(data + bytes(700)) == (62_500_000, 5_000_000_000)


class Libproc:
    """Stands for macOS's library: process 77 has two children and the footprint of the recorded bytes; there is no other process."""

    def __init__(self):
        values = [0] * 35
        values[7], values[28] = 209_000_000, 309_000_000
        recorded = bytes(16) + struct.pack("<35Q", *values)

        def proc_pid_rusage(pid, flavor, buffer):
            assert flavor == 4
            ctypes.memmove(buffer, recorded, len(recorded))
            return 0 if pid == 77 else -1

        def proc_listchildpids(pid, buffer, size):
            assert size == ctypes.sizeof(buffer)
            if pid != 77:
                return -1
            buffer[0], buffer[1] = 78, 79
            return 2

        self.proc_pid_rusage, self.proc_listchildpids = proc_pid_rusage, proc_listchildpids


def test_macos_counts_another_process(monkeypatch):
    monkeypatch.setattr(measure.sys, "platform", "darwin")
    monkeypatch.setattr(measure, "_libproc", Libproc)
    assert measure.process_bytes(77) == (209_000_000, 309_000_000)
    assert measure.process_bytes(78) is None
    assert measure.child_pids(77) == [78, 79] and measure.child_pids(78) == []


def test_another_process_and_its_end():
    code = "x = b'x' * 50_000_000; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        counted = measure.process_bytes(child.pid)
        assert counted is not None and 55 * MB < counted[0] < 80 * MB
        assert counted[1] is None or counted[1] >= counted[0] - MB
        assert measure.process_name(child.pid)
        assert child.pid in measure.child_pids(os.getpid())
        if sys.platform == "linux":
            assert measure.parent_pid(child.pid) == os.getpid()
            assert (shared := measure.proportional_bytes(child.pid)) is not None and 50 * MB < shared <= counted[0] + MB
            assert {os.getpid(), child.pid} <= measure.all_pids()
        child.communicate("\n")
    assert measure.process_bytes(child.pid) is None and measure.proportional_bytes(child.pid) is None
    assert measure.child_pids(child.pid) == [] and measure.process_name(child.pid) == ""
    assert sys.platform != "linux" or measure.parent_pid(child.pid) is None


CHILD = """
import numpy as np
from mesp_mlx.memory import measure
start_now, start_peak = measure.process_now_bytes(), measure.process_peak_bytes()
block = np.ones(100_000_000 // 8)
with_now, with_peak = measure.process_now_bytes(), measure.process_peak_bytes()
del block
print(start_now, start_peak, with_now, with_peak, measure.process_now_bytes(), measure.process_peak_bytes())
"""


def test_process_counts_follow_a_block_of_100_mb():
    result = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    start_now, start_peak, with_now, with_peak, end_now, end_peak = map(int, result.stdout.split())
    assert 5 * MB < start_now <= start_peak + MB
    assert with_now - start_now == pytest.approx(100 * MB, abs=4 * MB)
    assert with_peak >= with_now - MB and with_peak - start_peak <= 104 * MB
    assert end_now - start_now < 4 * MB
    assert abs(end_peak - with_peak) < MB  # the kernel counts pages in batches


SPIKE = """
import numpy as np
from mesp_mlx.memory import measure
most = measure.footprints()
start = measure.process_now_bytes()
np.ones(100_000_000 // 8)
print(most() - start, most() - start)
block = np.ones(40_000_000 // 8)
print(most() - start)
"""


def test_what_was_held_between_two_readings_is_not_missed():
    result = subprocess.run([sys.executable, "-c", SPIKE], capture_output=True, text=True, check=True)
    spike, after, below_the_mark = map(int, result.stdout.split())
    assert spike == pytest.approx(100 * MB, abs=4 * MB) and after < 4 * MB and below_the_mark == pytest.approx(40 * MB, abs=4 * MB)


def test_a_mark_that_is_not_kept_leaves_what_is_held_now(monkeypatch):
    monkeypatch.setattr(measure, "process_bytes", lambda pid: (50 * MB, None))
    assert measure.footprints()() == 50 * MB


HOLES = """
import numpy as np
from mesp_mlx.memory import measure
blocks = [np.ones(8000) for _ in range(2000)]  # 64 kB each: from the heap, which ends with the last
last = blocks[-1]
full = measure.process_now_bytes()
del blocks
freed = measure.process_now_bytes()
measure.give_back("numpy")
print(full, freed, measure.process_now_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")
def test_what_glibc_holds_back_is_given_back():
    result = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    full, freed, trimmed = map(int, result.stdout.split())
    assert full - freed < 10 * MB < 110 * MB < full - trimmed


def test_mlx_s_cache_is_given_back():
    mx = pytest.importorskip("mlx.core")
    limit = mx.set_cache_limit(50 * MB)
    try:
        mx.eval(array := mx.ones((10 * MB // 4,)))
        del array
        assert mx.get_cache_memory() > 9 * MB
        measure.give_back("mlx")
        assert mx.get_cache_memory() == 0
    finally:
        mx.set_cache_limit(limit)


def test_posix_peak_is_in_the_same_unit():
    pytest.importorskip("resource")
    if sys.platform == "darwin":
        pytest.skip("macOS's resident set and footprint are different counts")
    assert measure._resource_peak_bytes() == pytest.approx(measure.process_peak_bytes(), rel=0.02)


def test_numpy_has_no_allocator_to_ask():
    assert measure.allocator_peak_bytes("numpy") is None
    with measure.small_cache("numpy"):
        pass


def test_numpy_path_imports_no_mlx():
    code = (
        "import sys; from mesp_mlx.memory import measure as m; m.allocator_peak_bytes('numpy'); m.process_peak_bytes(); m.small_cache('numpy').__enter__()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'mlx']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def active():
    return pytest.importorskip("mlx.core").get_active_memory()


def peak():
    assert (count := measure.allocator_peak_bytes("mlx")) is not None
    return count


def test_allocator_counts_arrays():
    mx = pytest.importorskip("mlx.core")
    mx.reset_peak_memory()
    before = active()
    array = mx.array(np.ones(10 * MB // 4, np.float32))
    mx.eval(array)
    assert active() - before == pytest.approx(10 * MB, rel=0.01)
    del array
    assert active() - before < 0.1 * MB
    assert peak() - before >= 9.9 * MB
    mx.reset_peak_memory()
    assert peak() - before < 0.1 * MB


def test_limits_come_back():
    mx = pytest.importorskip("mlx.core")
    first = mx.get_memory_limit(), mx.set_cache_limit(50 * MB)
    try:
        with pytest.raises(KeyboardInterrupt), measure.small_cache("mlx"):
            assert mx.set_cache_limit(measure.KEEP_BYTES) == measure.KEEP_BYTES
            mx.set_memory_limit(99 * MB)
            raise KeyboardInterrupt
        assert (mx.get_memory_limit(), mx.set_cache_limit(first[1])) == (first[0], 50 * MB)
    finally:
        mx.set_cache_limit(first[1])
