"""Where OpenBLAS is, to put before the slow BLAS that MLX's Linux wheel links: what the tools give to the processes that they measure."""

import glob
import platform
import sys
from pathlib import Path

OPENBLAS = ("/usr/lib/*/openblas-pthread/libopenblas.so.0", "/usr/lib/*/libopenblas.so.0", "/usr/lib64/libopenblas*.so.0")


def environment() -> dict[str, str]:
    """The variables that put OpenBLAS, with kernels for this processor, before MLX's own BLAS; says on standard error what was found."""
    if not sys.platform.startswith("linux"):
        return {}
    found = next((file for pattern in OPENBLAS for file in sorted(glob.glob(pattern))), None)
    if found is None:
        print("OpenBLAS not found: MLX uses its bundled BLAS, which is many times slower (on Debian: apt install libopenblas0-pthread)", file=sys.stderr)
        return {}
    if platform.machine() != "x86_64":
        print(f"OpenBLAS preloaded from {found}", file=sys.stderr)
        return {"LD_PRELOAD": found}
    kernel = "SkylakeX" if "avx512f" in Path("/proc/cpuinfo").read_text() else "Haswell"
    print(f"OpenBLAS preloaded from {found}, {kernel} kernels", file=sys.stderr)
    return {"LD_PRELOAD": found, "OPENBLAS_CORETYPE": kernel}
