"""What this machine has: memory that a run may take, and how fast it multiplies, reads and writes. All sizes in bytes."""

import ctypes
import dataclasses
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from mesp_mlx.memory import measure
from mesp_mlx.memory.plan import TYPICAL, Speeds
from mesp_mlx.stream.run_file import drop_from_cache, keep_out_of_cache

GPU_EXPONENTIALS = 1e11  # a second: on a GPU they hide behind reading and writing the scores
GPU_OF_TYPICAL = dataclasses.replace(TYPICAL, matrix_flops_per_second=2e12, exponentials_per_second=GPU_EXPONENTIALS)
MEASURED_SECONDS = 0.1
PRODUCT = (256, 512, 512)  # activations [256, 512] times a weight [512, 512]: 2 MB, so that measuring does not set a run's peak
PACKED_ROWS = 64  # of that weight, quantised: making it takes more than it does
FILE_BYTES, BLOCK_BYTES = 32_000_000, 1 << 20
_HOST_VM_INFO64, _VM_BYTES = 4, 152  # of xnu's osfmk/mach/host_info.h and vm_statistics.h


@dataclass(frozen=True)
class Memory:
    """A machine's memory, or what a container lets its programs have.

    Attributes:
        total_bytes: all of it.
        available_bytes: what this process may hold in all, what it holds now included, before the system must take from others.
        others_bytes: what other programs hold; closing them gives it back.
    """

    total_bytes: int
    available_bytes: int
    others_bytes: int

    @property
    def most_bytes(self) -> int:
        """What this process could hold if all other programs were closed."""
        return min(self.total_bytes, self.available_bytes + self.others_bytes)


def total_bytes() -> int:
    """The machine's memory, or a container's limit."""
    return memory().total_bytes


def memory(root: Path = Path("/")) -> Memory:
    """What there is now. `root` is where /proc and /sys are."""
    own = measure.process_now_bytes()
    if sys.platform == "darwin":
        return from_vm_statistics(_vm_statistics(), os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), own)
    if sys.platform == "linux":
        return from_proc(root, own)
    import psutil

    found = psutil.virtual_memory()
    return Memory(found.total, found.available + own, max(0, found.used - own))


def from_vm_statistics(data: bytes, page_bytes: int, total: int, own: int) -> Memory:
    """macOS, from the bytes of a vm_statistics64: memory less what is wired, compressed, or held by programs and not purgeable, as Activity Monitor counts it.

    What other programs hold may be compressed to make room, which is slow: it is not counted as available.
    """
    wired, purgeable, compressor, internal = (struct.unpack_from("<I", data, offset)[0] * page_bytes for offset in (12, 88, 128, 140))
    programs = max(0, internal - purgeable) + compressor
    return Memory(total, max(own, total - wired - max(own, programs) + own), max(0, programs - own))


def from_proc(root: Path, own: int) -> Memory:
    """Linux: what the kernel says is available (free, and caches it can drop), and no more than the control groups of this process leave."""
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())}
    total, available = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"]) + own
    others = max(0, sizes.get("AnonPages", 0) + sizes.get("Shmem", 0) - own)
    for folder, limit_file, now_file in _groups(root):
        try:
            limit, now = int((folder / limit_file).read_text()), int((folder / now_file).read_text())
        except (OSError, ValueError):  # "max", or a group that has no such file
            continue
        if limit < total:
            held = max(own, now - _droppable(folder))
            total, available, others = limit, min(available, limit - held + own), min(others, held - own)
    return Memory(total, min(total, available), others)


def working_set_bytes(backend_name: str) -> int | None:
    """What Metal recommends that one app's buffers take; None elsewhere."""
    if backend_name != "mlx" or sys.platform != "darwin":
        return None
    import mlx.core as mx

    found = mx.device_info().get("max_recommended_working_set_size")
    return int(found) if found else None


def typical(on_cpu: bool) -> Speeds:
    """Speeds to rank plans by, the same on every machine."""
    return TYPICAL if on_cpu else GPU_OF_TYPICAL


def speeds(backend: ModuleType | None, on_cpu: bool, model_file: Path | None = None) -> Speeds:
    """Measured in a fraction of a second: products of activation-like shapes, weights dequantised, and the model's own file read past the system's cache.

    Without a backend or a file, or where it can't be measured, a speed is as `typical`. MLX's peak is counted anew after.
    """
    found = dataclasses.replace(typical(on_cpu), **(_products(backend, on_cpu) if backend else {}))
    if backend and backend.arrays.name == "mlx":
        import mlx.core as mx

        mx.clear_cache()
        mx.reset_peak_memory()
    return dataclasses.replace(found, **(_read(model_file) if model_file else {}))


def with_writing(found: Speeds, folder: Path, read: bool = False) -> Speeds:
    """The same with the speed of writing a temporary file in a folder, and of reading it back."""
    return dataclasses.replace(found, **_written(folder, read))


def _products(backend: ModuleType, on_cpu: bool) -> dict[str, float]:
    rows, width, out = PRODUCT
    x, dense = (backend.arrays.asarray(np.resize(np.linspace(-1, 1, 97, dtype=np.float32), size)) for size in ((rows, width), (out, width)))
    packed = backend.quantized.quantize(dense[: PACKED_ROWS if on_cpu else out], 4, 64)
    weight = {"weight": dense} if on_cpu else packed
    flops = 2 * rows * width * out * _per_second(lambda: backend.arrays.evaluate(backend.quantized.matmul(x, weight)))
    if not on_cpu:
        return {"matrix_flops_per_second": flops}
    numbers = PACKED_ROWS * width * _per_second(lambda: backend.arrays.evaluate(backend.quantized.dequantize(packed, backend.arrays.float32)))
    return {"matrix_flops_per_second": flops, "dequantised_per_second": numbers}


def _per_second(call: Callable[[], object]) -> float:
    """How often a call goes into a second, by the fastest tenth of its calls: the first, and other programs' turns are not this machine's speed."""
    times: list[float] = []
    while sum(times) < MEASURED_SECONDS:
        started = time.perf_counter()
        call()
        times.append(max(time.perf_counter() - started, 1e-9))
    times.sort()
    return 1 / times[len(times) // 10]


def _read(file: Path) -> dict[str, float]:
    try:
        with open(file, "rb", buffering=0) as stream:
            keep_out_of_cache(stream.fileno())
            drop_from_cache(stream.fileno(), 0, FILE_BYTES)
            block, done, started = bytearray(BLOCK_BYTES), 0, time.perf_counter()
            while done < FILE_BYTES and (count := stream.readinto(block)):
                done += count
            seconds = time.perf_counter() - started
            drop_from_cache(stream.fileno(), 0, FILE_BYTES)
    except OSError:
        return {}
    return {"read_bytes_per_second": done / seconds} if done and seconds else {}


def _written(folder: Path, read: bool) -> dict[str, float]:
    """The speed of writing a temporary file there, and of reading it back."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mesp-mlx-", buffering=0) as file:
            keep_out_of_cache(file.fileno())
            block, started = os.urandom(BLOCK_BYTES), time.perf_counter()
            for _ in range(FILE_BYTES // BLOCK_BYTES):
                file.write(block)
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
            found = _read(Path(file.name)) if read and os.name == "posix" else {}
    except OSError:
        return {}
    return found | {"write_bytes_per_second": FILE_BYTES // BLOCK_BYTES * BLOCK_BYTES / seconds}


def _groups(root: Path) -> list[tuple[Path, str, str]]:
    """The memory control groups that this process is in, inmost first, with the names of the files of limit and use."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        inmost = base / path.lstrip("/")
        found += [(folder, *names) for folder in (inmost, *inmost.parents) if folder.is_relative_to(base)]
    return found


def _droppable(folder: Path) -> int:
    """Bytes of a control group that are cached files."""
    try:
        pairs = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(pairs.get("inactive_file", 0)) + int(pairs.get("active_file", 0))


def _vm_statistics() -> bytes:
    system = ctypes.CDLL("/usr/lib/libSystem.dylib")
    buffer, count = ctypes.create_string_buffer(1024), ctypes.c_uint(256)  # newer kernels may know more
    system.mach_host_self.restype = ctypes.c_uint
    system.host_statistics64.argtypes = [ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint)]
    if system.host_statistics64(system.mach_host_self(), _HOST_VM_INFO64, buffer, ctypes.byref(count)) != 0:
        raise OSError("host_statistics64 failed")
    return buffer.raw[:_VM_BYTES]
