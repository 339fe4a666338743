"""Rows whose length varies tenfold: what the operating system counts stays where it is, and close to what the arrays take."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from models import make_model, tiny_config
from runs import BACKENDS

MB = 1e6

CHILD = """
import json, sys, tracemalloc
from pathlib import Path
import numpy as np
from backends import BACKENDS
from trainings import Told, a_run
from mesp_mlx.engine.train import train
from mesp_mlx.memory import measure
from mesp_mlx.memory.strategy import Strategy

tiny, folder, name, updates, longest, leak_bytes, strategy = json.loads(sys.argv[1])
backend = next(backend for backend in BACKENDS if backend.arrays.name == name)
lengths = [int(length) for length in np.random.default_rng(0).permutation(np.geomspace(longest / 10, longest, 32))]
leaked = []

class Leaks(Told):
    def train(self, **told):
        leaked.append(b"x" * leak_bytes)
        super().train(**told)

def run(folder, updates, lengths, strategy):
    rows = 4 if strategy else 1
    with a_run(Path(folder), backend, lengths, updates, Strategy(**strategy), limit_bytes=60_000_000, told=Leaks(), batch_size=rows) as training:
        train(training)
        return [told["memory_bytes"] for told in training.report.trains]

with measure.small_cache(name):
    run(tiny, 3, [12, 24, 56, 40], {})  # libraries set themselves up
    base, before = measure.process_now_bytes(), measure.process_peak_bytes()
    if name == "mlx":
        import mlx.core as mx

        mx.reset_peak_memory()
    now = run(folder, updates, lengths, strategy)
    peak, arrays = measure.process_peak_bytes(), measure.allocator_peak_bytes(name)
    if arrays is None and strategy:
        tracemalloc.start()
        run(folder, updates, lengths, strategy)
        arrays = tracemalloc.get_traced_memory()[1]
print(json.dumps({"now": now, "base": base, "risen": peak > before, "peak": peak, "arrays": arrays}))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny"), tiny_config("qwen2"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Wide MLPs make many bytes with little work: tens of MB where all activations are kept."""
    shape = {"intermediate_size": 2048, "num_hidden_layers": 6, "max_position_embeddings": 256}
    return make_model(tmp_path_factory.mktemp("wide"), tiny_config("qwen2", **shape))


def child(*arguments) -> dict:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(arguments, default=str)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def growth(found: dict) -> float:
    """How much more a process takes in its last updates than after 50, in MB: the most of either."""
    now = np.array(found["now"]) / MB
    return now[-50:].max() - now[50:100].max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_footprint_is_flat_over_300_updates(tiny, backend):
    found = child(tiny, tiny, backend, 300, 120, 0, {})
    assert len(found["now"]) == 300 and growth(found) < 1.5
    assert (max(found["now"][50:]) - min(found["now"][50:])) / MB < 3


def test_a_leak_of_10_kb_an_update_would_show(tiny):
    assert growth(child(tiny, tiny, "numpy", 300, 120, 10_000, {})) > 1.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_system_counts_what_the_arrays_take(wide, tiny, backend):
    """Within a tenth, beyond the libraries, with everything resident and kept: MLX's cache and what glibc holds back are in that tenth."""
    found = child(tiny, wide, backend, 6, 200, 0, {"resident": -1, "keep": "all"})
    assert found["risen"] and found["arrays"] > 40 * MB
    assert found["peak"] - found["base"] == pytest.approx(found["arrays"], rel=0.1)
