"""Which backend is chosen, on machines with and without MLX and a GPU."""

import importlib.util
import inspect
import platform
import sys
from typing import Any

import numpy as np
import pytest
from backends import mx, needs_mlx, ops

from mesp_mlx import backend, reference
from mesp_mlx.errors import UserError


@pytest.fixture
def absent(monkeypatch):
    """MLX is not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx", None)


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """MLX is installed and does not load, as on a Linux with an older C library."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text('raise ImportError("version `GLIBC_2.35\' not found")')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


def test_numpy_asks_nothing_of_mlx(absent):
    assert backend.choose("numpy") is reference


def test_auto_without_mlx(absent):
    assert backend.choose("auto") is reference and backend.choose() is reference


def test_auto_with_a_broken_mlx(broken):
    assert importlib.util.find_spec("mlx") is not None
    assert backend.choose("auto") is reference


SYSTEMS = [("Darwin", "pip install 'mlx"), ("Linux", "pip install 'mesp-mlx[cpu]'"), ("Windows", "MLX has no build for this system")]


@pytest.mark.parametrize(("system", "advice"), SYSTEMS)
@pytest.mark.parametrize("state", ["absent", "broken"])
def test_mlx_by_name_says_what_to_install(system, advice, state, request, monkeypatch):
    request.getfixturevalue(state)
    monkeypatch.setattr(platform, "system", lambda: system)
    with pytest.raises(UserError) as caught:
        backend.choose("mlx")
    message = str(caught.value)
    assert message.startswith("--backend mlx: MLX can't be loaded here (") and advice in message and message.endswith("or use --backend numpy.")
    assert ("GLIBC_2.35" in message) == (state == "broken")
    assert "\n" not in message


def test_the_extras_advised_are_there():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "mesp-mlx" and {"cpu", "cuda"} <= project["optional-dependencies"].keys()
    (mac,) = [line.partition(";")[0] for line in project["dependencies"] if line.startswith("mlx>")]
    assert mac in backend.INSTALL["Darwin"]


@needs_mlx
def test_mlx_by_name():
    assert backend.choose("mlx") is ops and backend.choose("numpy") is reference


@needs_mlx
@pytest.mark.parametrize(("device", "chosen"), [("cpu", reference), ("gpu", ops)])
def test_auto_is_mlx_where_a_gpu_is(monkeypatch, device, chosen):
    monkeypatch.setattr(mx, "default_device", lambda: getattr(mx, device))
    assert backend.choose("auto") is chosen


@needs_mlx
@pytest.mark.parametrize(("stored", "on_gpu"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_activations_have_the_model_s_dtype_on_a_gpu_only(monkeypatch, stored, on_gpu):
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert backend.activation_dtype(ops, stored) == mx.float32
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert backend.activation_dtype(ops, stored) == getattr(mx, on_gpu)
    assert backend.activation_dtype(reference, stored) is np.float32


def functions(module: Any) -> dict[str, list[str]]:
    """What a module of operations offers: its own public functions with the names of their parameters."""
    own = [value for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    return {value.__name__: list(inspect.signature(value).parameters) for value in own if value.__module__ == module.__name__}


# For ordinary MLX code and lazy evaluation; and what MLX itself has, only slower on a CPU.
MLX_ONLY = {"apply", "on_cpu", "wait", "zeros_like", "exp", "sigmoid", "row_sums", "cotangents"}
NUMPY_ONLY = {"sigmoid", "normal"}  # of activations: what MLX has


@needs_mlx
@pytest.mark.parametrize("name", reference.__all__)
def test_twins_have_the_same_functions_with_the_same_parameters(name):
    ours, twin = functions(getattr(ops, name)), functions(getattr(reference, name))
    both = ours.keys() - MLX_ONLY
    assert both == twin.keys() - (NUMPY_ONLY - both)
    for function in both:
        assert ours[function] == twin[function], function


@needs_mlx
def test_both_have_the_same_modules():
    assert ops.__all__ == reference.__all__
