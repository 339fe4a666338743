"""The benchmark prints, on its last line, one JSON object with what was promised."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from backends import BACKENDS, needs_mlx
from models import tool

from mesp_mlx import adapter
from mesp_mlx.model.spec import load_spec, read_config

ROOT = Path(__file__).parent.parent
NAMES = [backend.arrays.name for backend in BACKENDS]
PROMISED = {"loss", "step_seconds", "allocator_peak_bytes", "process_peak_bytes", "shape", "seq", "batch", "rank", "dtype", "backend", "method"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the random models are written, once."""
    return tmp_path_factory.mktemp("cache")


def bench(cache, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MESP_MLX_CACHE": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "tools" / "bench_step.py"), "--shape", "smollm2-135m", *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("backend", NAMES)
def test_one_step(cache, backend):
    done = bench(cache, "--layers", "1", "--seq", "16", "--batch", "2", "--rank", "4", "--dtype", "float32", "--backend", backend, "--method", "mesp", "--json")
    assert done.returncode == 0, done.stderr
    table, result = done.stdout.splitlines()[:-1], json.loads(done.stdout.splitlines()[-1])
    assert result.keys() >= PROMISED
    asked = {"shape": "smollm2-135m", "layers": 1, "seq": 16, "batch": 2, "rank": 4, "dtype": "float32", "backend": backend, "method": "mesp"}
    assert {key: result[key] for key in asked} == asked
    assert abs(result["loss"] - math.log(49152)) < 2, "random logits of about unit size"
    assert result["step_seconds"] > 0
    folder = cache / "bench" / f"smollm2-135m-1-layers-{tool('make_random_model').FORMAT}"
    spec = load_spec(read_config(folder))
    shapes = adapter.shapes(spec, adapter.choose_modules(spec), 4)
    assert result["adapter_bytes"] == result["gradient_bytes"] == 4 * sum(rows * columns for rows, columns in shapes.values())
    assert result["checkpoint_bytes"] == 2 * 16 * 576 * 4
    assert (result["allocator_peak_bytes"] is None) == (backend == "numpy")
    assert 10e6 < result["process_peak_bytes"] < 500e6
    if backend == "mlx":
        assert result["adapter_bytes"] < result["allocator_peak_bytes"] < 50e6
    assert [line.split()[:2] for line in table[1:]] == [["1", "layers"]]


def test_both_backends_compute_the_same(cache):
    """On the same model and the same random tokens, the loss of the first step."""
    losses = [json.loads(bench(cache, "--layers", "1", "--seq", "8", "--backend", name).stdout.splitlines()[-1])["loss"] for name in NAMES]
    assert losses == pytest.approx([losses[0]] * len(NAMES), rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seq", "0"), "argument --seq: 0 is not a positive whole number"),
        (("--seq", "abc"), "argument --seq: abc is not a positive whole number"),
        (("--layers", "20000"), "bench_step: reading the shape: 'num_hidden_layers' is 20000"),
        (("--method", "backprop"), "argument --method: invalid choice"),
        (("--backend", "torch"), "argument --backend: invalid choice"),
        (("--backend", "numpy", "--dtype", "bfloat16"), "--dtype bfloat16: NumPy has none, use --backend mlx"),
    ],
)
def test_flags_that_make_no_sense(cache, flags, message):
    done = bench(cache, *flags)
    assert done.returncode == 2 and message in done.stderr and not done.stdout


def test_a_cache_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    done = bench(tmp_path / "file", "--layers", "1", "--backend", "numpy")
    assert done.returncode == 2 and "bench_step: [Errno" in done.stderr and str(tmp_path / "file") in done.stderr and "Traceback" not in done.stderr


def test_a_cached_model_that_is_broken(tmp_path):
    folder = tmp_path / "bench" / f"smollm2-135m-1-layers-{tool('make_random_model').FORMAT}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    done = bench(tmp_path, "--layers", "1", "--backend", "numpy")
    assert done.returncode == 2 and f"bench_step: reading {folder / 'config.json'}: it is not JSON" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("layers", "depths"), [([], [30]), (["--layers", "4"], [4]), (["--layers", "31"], [30, 31])])
def test_a_deeper_model_is_compared_with_the_shapes_own(monkeypatch, layers, depths):
    module, measured = tool("bench_step"), []
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--shape", "smollm2-135m", *layers])
    monkeypatch.setattr(module, "_in_child", lambda _, layers: measured.append(layers) or {"step_seconds": 1, "loss": 1})
    monkeypatch.setattr(module, "_print_table", lambda _: None)
    assert module.main() == 0 and measured == depths


@pytest.mark.parametrize(("machine", "names"), [("x86_64", {"LD_PRELOAD", "OPENBLAS_CORETYPE"}), ("aarch64", {"LD_PRELOAD"})])
def test_only_x86_64_is_told_which_kernels(monkeypatch, machine, names):
    if not sys.platform.startswith("linux"):
        pytest.skip("a library is put before another on Linux only")
    module = tool("bench_step")
    monkeypatch.setattr(module.glob, "glob", lambda _: ["libopenblas.so.0"])
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    assert module._openblas().keys() == names


@needs_mlx
def test_bfloat16_on_mlx(cache):
    done = bench(cache, "--layers", "1", "--seq", "8", "--dtype", "bfloat16", "--backend", "mlx", "--json")
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["dtype"] == "bfloat16" and abs(result["loss"] - math.log(49152)) < 2
    assert result["checkpoint_bytes"] == 8 * 576 * 2
