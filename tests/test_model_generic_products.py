"""Products of generic stages on a CPU device: those of mlx-lm's modules to rounding, in every quantisation, with nothing dequantised kept."""

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import mx, ops
from oracles import error

from mesp_mlx.model.quantization import MODES

pytest.importorskip("mlx_lm")

import mlx.nn as nn  # noqa: E402
from mlx_lm.models.switch_layers import SwitchLinear  # noqa: E402
from test_model_generic import assert_exact, spec_of, streamed, whole, written  # noqa: E402

from mesp_mlx.model.generic_products import Choices, ChosenProduct, Product, multiply_here  # noqa: E402

pytestmark = pytest.mark.skipif(not ops.quantized.on_cpu(), reason="a GPU multiplies packed weights")


def packed(folder: Path, **quantization: Any) -> Path:
    """The model in a folder, packed as mlx_lm.convert packs it."""
    from mlx_lm.utils import load_model, quantize_model, save_model

    with contextlib.redirect_stdout(io.StringIO()):
        model, config = load_model(folder)
        model, config = quantize_model(model, config, **quantization)
        save_model(folder, model, donate_model=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "quantization", [{"mode": "affine", "bits": 4, "group_size": 32}, {"mode": "mxfp4", "bits": 4, "group_size": 32}], ids=["affine", "mxfp4"]
)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_packed_models_have_the_gradients_of_mlx_lms_modules(model_type, quantization, tmp_path):
    folder = packed(written(tmp_path, model_type), **quantization)
    model, loss, gradients, adapter = streamed(folder)
    kinds = {type(module) for _, module in model.embedding.engine.walk.real("model.layers.3").named_modules()}
    assert {Product, ChosenProduct} <= kinds and nn.QuantizedLinear not in kinds
    assert_exact(loss, gradients, whole(folder, adapter))
    assert any("switch_mlp" in name or "experts" in name for name in adapter) and spec_of(folder).quantization


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["dense", *MODES])
@pytest.mark.parametrize("shape", [(7, 64), (2, 5, 64)])
def test_products_are_those_of_the_module(mode, bias, shape):
    """Of one weight, and of stacked ones of which some serve nobody, tokens in order of their experts or not."""
    x, settings = mx.random.normal(shape), {} if mode == "dense" else {"mode": mode, "bits": MODES[mode][0], "group_size": MODES[mode][1]}
    one, stack = nn.Linear(64, 48, bias=bias), SwitchLinear(64, 48, 6, bias=bias)
    if bias:
        one.bias, stack.bias = mx.random.normal((48,)), mx.random.normal((6, 48))
    indices = mx.array(np.random.default_rng(0).choice([0, 2, 5], (*shape[:-1], 2)))
    ordered = mx.sort(indices.reshape(-1))
    each = mx.random.normal((ordered.size, 1, 64))
    if mode != "dense":
        one, stack = nn.QuantizedLinear.from_linear(one, **settings), stack.to_quantized(**settings)

    def results() -> list[mx.array]:
        functions = [
            (lambda x: one(x), [x]),
            (lambda x: stack(mx.expand_dims(x, (-2, -3)), indices), [x]),
            (lambda x: stack(x, ordered, sorted_indices=True), [each]),
        ]
        found = []
        for function, given in functions[: 1 if mode == "dense" else 3]:
            cotangent = mx.random.normal(function(*given).shape, key=mx.random.key(3))
            outputs, gradients = mx.vjp(function, given, [cotangent])
            found += [*outputs, *gradients]
        return found

    theirs = results()
    multiply_here([one, stack], ops)
    assert type(one) is Product and type(stack) is (SwitchLinear if mode == "dense" else ChosenProduct)
    ours = results()
    assert all(a.shape == b.shape and error(a, b) <= 2e-6 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("stored", ["affine", "bfloat16"])
def test_nothing_dequantised_is_kept_for_backward(stored):
    """A weight that is 33.6 MB in float32, forward and backward: a tile or two of it."""
    linear = nn.Linear(1024, 8192, bias=False)
    linear.weight = linear.weight.astype(mx.bfloat16)
    linear = nn.QuantizedLinear.from_linear(linear) if stored == "affine" else linear
    x = mx.random.normal((4, 1024))
    mx.eval(x, linear.parameters())
    multiply_here([linear], ops)
    assert peak(lambda x: linear(mx.sin(x)).astype(mx.float32), x) < 33.6e6 / 2


@pytest.mark.parametrize("ordered", [True, False])
def test_experts_are_dequantised_one_after_another(ordered):
    """16 that are 2.1 MB each, forward and backward."""
    stack = SwitchLinear(1024, 512, 16, bias=False).to_quantized()
    x, indices = mx.random.normal((32, 1, 1024)), mx.arange(32) // 2 if ordered else mx.arange(32) % 16
    mx.eval(x, indices, stack.parameters())
    multiply_here([stack], ops)
    assert peak(lambda x: stack(mx.sin(x), indices, sorted_indices=ordered), x) < 4 * 2.1e6


def test_who_serves_is_known_from_a_run_before():
    """So that nothing is computed while autodiff watches: the second time the indices are not looked at."""
    stack, choices = SwitchLinear(64, 32, 4, bias=False).to_quantized(), Choices()
    x, indices = mx.random.normal((6, 1, 64)), mx.array([[3], [0], [3], [2], [2], [3]])
    multiply_here([stack], ops, choices)
    given: Any = SimpleNamespace(shape=indices.shape)
    twice = lambda indices: [stack(mx.expand_dims(x, -3), indices), stack(mx.expand_dims(-x, -3), indices)]  # noqa: E731
    with choices.known(lambda: twice(indices)):
        found = twice(given)
    assert all(mx.array_equal(a, b) for a, b in zip(found, twice(indices), strict=True))
    with pytest.raises((TypeError, ValueError)):
        stack(mx.expand_dims(x, -3), given)


def peak(function: Any, x: Any) -> int:
    """Of a function forward and backward, which MLX holds back above 8 MB."""
    cotangent = mx.ones(function(x).shape)
    mx.eval(cotangent)
    mx.clear_cache()
    before = mx.get_active_memory()
    limit = mx.set_memory_limit(before + 8_000_000)
    try:
        mx.reset_peak_memory()
        mx.eval(mx.vjp(function, [x], [cotangent])[1])
        return mx.get_peak_memory() - before
    finally:
        mx.set_memory_limit(limit)
