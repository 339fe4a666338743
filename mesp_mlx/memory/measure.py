"""What a run uses: the allocator's count of arrays, and the operating system's count of the process. All in bytes.

"Peak" of a process is the kernel's own high-water mark since the process began: nothing is sampled, so nothing is missed.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RUSAGE_INFO_V4 = 4
CACHE_BYTES = 4_000_000  # freed buffers that MLX may keep for reuse: the operating system counts them, the allocator's peak does not
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def allocator_peak_bytes(backend_name: str) -> int | None:
    """The most that arrays took since the last reset; None for NumPy, which does not count."""
    if backend_name != "mlx":
        return None
    import mlx.core as mx

    return mx.get_peak_memory()


@contextmanager
def small_cache(backend_name: str) -> Iterator[None]:
    """While entered, MLX keeps few freed buffers, glibc none, and the allocator's peak is counted anew; MLX's limits are restored after.

    The wired limit is never touched: macOS kernel panics under buffer churn have been tied to it (https://github.com/ml-explore/mlx/issues/3186).
    """
    if backend_name != "mlx":
        yield
        return
    import mlx.core as mx

    return_freed_memory()
    memory_before, cache_before = mx.get_memory_limit(), mx.set_cache_limit(CACHE_BYTES)
    mx.reset_peak_memory()
    try:
        yield
    finally:
        mx.set_memory_limit(memory_before)  # the engine moves it from stage to stage
        mx.set_cache_limit(cache_before)


def return_freed_memory() -> None:
    """Have glibc give large freed buffers back to the system at once; elsewhere nothing is needed.

    Its threshold for doing so otherwise grows with the buffers freed, up to 32 MB, and what it keeps counts as resident: a third more than
    MLX's arrays and cache together, measured on the CPU device. MLX has a cache of its own for buffers that come again; NumPy, which has none,
    is better left alone.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 128 * 1024)


def process_peak_bytes() -> int:
    """The most memory this process has held since it began: peak resident set (Linux, Windows), peak physical footprint (macOS)."""
    if sys.platform == "darwin" and (footprint := _footprint()) is not None:
        return footprint[1]
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    if (high_water := _status("VmHWM")) is not None:
        return high_water
    return _resource_peak_bytes()


def process_now_bytes() -> int:
    """What this process holds now: resident set (Linux, Windows), physical footprint (macOS)."""
    if sys.platform == "darwin" and (footprint := _footprint()) is not None:
        return footprint[0]
    if (resident := _status("VmRSS")) is not None:
        return resident
    import psutil

    return psutil.Process().memory_info().rss


def decode_rusage_v4(data: bytes) -> tuple[int, int]:
    """(physical footprint now, its highest value ever) in bytes from the bytes of Apple's struct rusage_info_v4.

    The struct is a UUID of 16 bytes, then 64-bit unsigned counters; ri_phys_footprint is the 8th, ri_lifetime_max_phys_footprint the 29th.
    The footprint is what Activity Monitor calls memory: it counts Metal's buffers and compressed pages, which the resident set does not.
    Source: xnu's bsd/sys/resource.h.
    """
    counters = struct.unpack_from("<29Q", data, 16)
    return counters[7], counters[28]


def _footprint() -> tuple[int, int] | None:
    buffer = ctypes.create_string_buffer(1024)  # the struct has 296 bytes; newer kernels may know more
    call = ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage
    call.argtypes, call.restype = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p], ctypes.c_int
    return decode_rusage_v4(buffer.raw) if call(os.getpid(), _RUSAGE_INFO_V4, buffer) == 0 else None


def _status(field: str) -> int | None:
    """One size of Linux's /proc/self/status, or None where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith(f"{field}:")), None)
    return int(found[1]) * 1024 if found else None  # the kernel says kB and means 1,024 bytes


def _resource_peak_bytes() -> int:
    """The high-water mark by POSIX: Apple counts bytes, the others 1,024 bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
