"""What a run uses: the allocator's count of arrays, and the operating system's count of this process or another. All in bytes.

"Peak" of a process is the kernel's own high-water mark since the process began: nothing is sampled, so nothing is missed.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_RUSAGE_INFO_V4 = 4
KEEP_BYTES = 4_000_000  # freed buffers that are kept for reuse, unless a plan says more: the operating system counts them, the allocator's peak does not
_ROOMY_BYTES = 16_000_000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def allocator_peak_bytes(backend_name: str) -> int | None:
    """The most that arrays took since the last reset; None for NumPy, which does not count."""
    if backend_name != "mlx":
        return None
    import mlx.core as mx

    return mx.get_peak_memory()


@contextmanager
def small_cache(backend_name: str, keep_bytes: int = KEEP_BYTES) -> Iterator[None]:
    """While entered, few freed buffers are kept, and MLX's peak is counted anew; MLX's limits are restored after, glibc's are not.

    The wired limit is never touched: macOS kernel panics under buffer churn have been tied to it (https://github.com/ml-explore/mlx/issues/3186).
    """
    if backend_name != "mlx":
        keep_freed(backend_name, keep_bytes)
        yield
        return
    import mlx.core as mx

    memory_before, cache_before = mx.get_memory_limit(), mx.set_cache_limit(keep_bytes)
    keep_freed(backend_name, keep_bytes)
    mx.reset_peak_memory()
    try:
        yield
    finally:
        mx.set_memory_limit(memory_before)  # the engine moves it from stage to stage
        mx.set_cache_limit(cache_before)


def keep_freed(backend_name: str, keep_bytes: int) -> None:
    """Let allocators keep about so much of freed buffers: MLX by its cache, or where its arrays are glibc's by glibc, which wastes less on other sizes.

    By itself glibc raises the size from which it gives a buffer back with the buffers freed, up to 32 MB, and what it keeps counts as resident. Giving
    back more means that the kernel clears a page for the next array: with a threshold of 128 kB a third of a step's time (tools/log.md).
    """
    on_cpu = backend_name == "numpy"
    if backend_name == "mlx":
        import mlx.core as mx

        on_cpu = mx.default_device() == mx.cpu
    if not (sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt") and on_cpu):
        if backend_name == "mlx":
            mx.set_cache_limit(keep_bytes)
        return
    # NumPy has no cache: it keeps buffers of up to 4 MB. Under a tight plan MLX's larger arrays are better in its cache than in holes of a heap.
    roomy = keep_bytes > _ROOMY_BYTES
    largest, most = (4 << 20, 16 << 20) if backend_name == "numpy" else (keep_bytes, 2 * keep_bytes) if roomy else (1 << 20, 4 << 20)
    libc.mallopt(_M_MMAP_THRESHOLD, largest)
    libc.mallopt(_M_TRIM_THRESHOLD, most)
    if backend_name == "mlx":
        mx.set_cache_limit(KEEP_BYTES if roomy else keep_bytes)


def give_back(backend_name: str) -> None:
    """Return to the system what MLX keeps in its cache, and what glibc keeps of freed arrays: for when memory runs short."""
    if backend_name == "mlx":
        import mlx.core as mx

        mx.clear_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def footprints() -> Callable[[], int]:
    """A function that gives the most this process took since it was last asked: by the kernel's mark where that has risen, else what it takes now."""
    before = process_peak_bytes()

    def most() -> int:
        nonlocal before
        counted = process_bytes(os.getpid())
        if counted is None or counted[1] is None:
            return process_now_bytes()
        last, before = before, counted[1]
        return before if before > last else counted[0]

    return most


def process_peak_bytes() -> int:
    """The most memory this process has held since it began: peak resident set (Linux, Windows), peak physical footprint (macOS)."""
    counted = process_bytes(os.getpid())
    return counted[1] if counted and counted[1] is not None else _resource_peak_bytes()


def process_now_bytes() -> int:
    """What this process holds now: resident set (Linux, Windows), physical footprint (macOS)."""
    if (counted := process_bytes(os.getpid())) is not None:
        return counted[0]
    import psutil

    return psutil.Process().memory_info().rss


def process_bytes(pid: int) -> tuple[int, int | None] | None:
    """(what a process holds now, the most it ever held), as above; the second is None where the system keeps no such mark. None if it has ended."""
    if sys.platform == "darwin":
        return _footprint(pid)
    if sys.platform == "linux":
        return _resident(pid)
    import psutil

    try:
        counted = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    return counted.rss, getattr(counted, "peak_wset", None)


def proportional_bytes(pid: int) -> int | None:
    """Linux's proportional set size, in which processes that share a page share its count; None elsewhere, or if it has ended.

    Costly: the kernel walks every page of the process, about 20 ms for each GB, and the process can't map memory meanwhile.
    """
    return _size(_proc(f"/proc/{pid}/smaps_rollup"), b"\nPss:")


def all_pids() -> set[int]:
    """All processes of the machine, on Linux, where finding the children of one means asking each for its parent; elsewhere none."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} if sys.platform == "linux" else set()


def parent_pid(pid: int) -> int | None:
    """Who started a process, on Linux; None if it has ended."""
    state = _proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()  # the name before it may hold spaces and brackets
    return int(state[1]) if state else None


def child_pids(pid: int) -> list[int]:
    """The processes that a process started: on macOS by libproc, whose call answers their number (xnu's libsyscall/wrappers/libproc); else by psutil."""
    if sys.platform == "darwin":
        buffer = (ctypes.c_int * 4096)()
        call = _libproc().proc_listchildpids
        call.argtypes, call.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int], ctypes.c_int
        return list(buffer[: max(0, call(pid, buffer, ctypes.sizeof(buffer)))])
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def process_name(pid: int) -> str:
    """The name of its program, empty if it has ended."""
    if sys.platform == "linux":
        return _proc(f"/proc/{pid}/comm").decode(errors="replace").strip()
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def decode_rusage_v4(data: bytes) -> tuple[int, int]:
    """(physical footprint now, its highest value ever) in bytes from the bytes of Apple's struct rusage_info_v4.

    The struct is a UUID of 16 bytes, then 64-bit unsigned counters; ri_phys_footprint is the 8th, ri_lifetime_max_phys_footprint the 29th.
    The footprint is what Activity Monitor calls memory: it counts Metal's buffers and compressed pages, which the resident set does not.
    Source: xnu's bsd/sys/resource.h.
    """
    counters = struct.unpack_from("<29Q", data, 16)
    return counters[7], counters[28]


def _footprint(pid: int) -> tuple[int, int] | None:
    buffer = ctypes.create_string_buffer(1024)  # the struct has 296 bytes; newer kernels may know more
    call = _libproc().proc_pid_rusage
    call.argtypes, call.restype = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p], ctypes.c_int
    return decode_rusage_v4(buffer.raw) if call(pid, _RUSAGE_INFO_V4, buffer) == 0 else None


@cache
def _libproc() -> ctypes.CDLL:
    return ctypes.CDLL("/usr/lib/libproc.dylib")


def _resident(pid: int) -> tuple[int, int] | None:
    status = _proc(f"/proc/{pid}/status")
    now, peak = _size(status, b"\nVmRSS:"), _size(status, b"\nVmHWM:")
    return None if now is None or peak is None else (now, peak)


def _proc(path: str) -> bytes:
    """A file of /proc, empty if its process has ended or belongs to somebody else."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _size(text: bytes, field: bytes) -> int | None:
    """A size from a file of /proc: the kernel says kB and means 1,024 bytes."""
    start = text.find(field)
    return None if start < 0 else int(text[start + len(field) :].split(None, 1)[0]) * 1024


def _resource_peak_bytes() -> int:
    """The high-water mark by POSIX: Apple counts bytes, the others 1,024 bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
