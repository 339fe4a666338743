"""The products of an update: counted from shapes, and counted as they are called for."""

import math
from typing import Any

import numpy as np
import pytest
from backends import each_backend
from engines import SCALE, Gathered, random_adapter, random_group
from models import PROJECTIONS, make_model, tiny_config, tool, variant_config

from mesp_mlx import config, reference
from mesp_mlx.engine import backprop, methods, zeroth_order
from mesp_mlx.memory.strategy import DEFAULT, KEEPS, Strategy
from mesp_mlx.model import work
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import ALL_STAGES, Store

ROWS, TOKENS = 2, 24


MILLIONS = {"forward": 134.48, "backprop": 268.40, "backprop-checkpointed": 348.03, "mesp": 364.62, "mezo": 268.96}


@pytest.mark.parametrize(("method", "millions"), MILLIONS.items())
def test_of_a_real_shape(method, millions):
    """SmolLM2-135M, per token: 106.17 M weights in its layers, 28.31 M in its tied table; the first q, k and v are not multiplied backwards."""
    spec = load_spec(tool("make_random_model").SHAPES["smollm2-135m"])
    counted = work.of_update(spec, method, ROWS, TOKENS, 8)
    assert counted.weights / (ROWS * TOKENS) / 1e6 == pytest.approx(millions, abs=0.02)
    assert counted.flops > 2 * counted.weights > 20 * (counted.attention + counted.adapters)


BY_KEEP = {"nothing": 364.62, "replay": 348.03, "inputs": 338.08, "attention": 321.49, "all": 268.40}


@pytest.mark.parametrize(("keep", "millions"), BY_KEEP.items())
def test_what_is_kept_is_not_multiplied_again(keep, millions):
    """SmolLM2-135M, per token and layer: q, k and v are 0.553 M weights, o 0.332 M, gate and up 1.769 M; each level saves one pass of some of them."""
    spec = load_spec(tool("make_random_model").SHAPES["smollm2-135m"])
    counted = work.of_update(spec, "mesp", ROWS, TOKENS, 8, keep=keep)
    assert counted.weights / (ROWS * TOKENS) / 1e6 == pytest.approx(millions, abs=0.02)


def test_layers_without_adapters_pass_forward_alone():
    spec = load_spec(tool("make_random_model").SHAPES["smollm2-135m"])
    counts = [work.of_update(spec, "mesp", ROWS, TOKENS, 8, trained=trained).weights / (ROWS * TOKENS) for trained in (10, 11, 30)]
    layer = sum(math.prod(spec.linears(0)[projection]) for projection in PROJECTIONS)
    parts = (PROJECTIONS[:3], PROJECTIONS[3:4], PROJECTIONS[4:6], PROJECTIONS[6:])
    qkv, out, gate_up, down = (sum(math.prod(spec.linears(0)[projection]) for projection in part) for part in parts)
    more = 3 * qkv + 2 * out + 2 * gate_up + down
    assert counts[1] - counts[0] == more and counts[2] - counts[0] == 20 * more and more < 3 * layer


@each_backend
@pytest.mark.parametrize("method", ["forward", *config.VARIANTS])
def test_as_called_for(tmp_path, monkeypatch, backend, method):
    """Every product with a frozen weight goes through two functions, but for one in NumPy's loss."""
    folder = make_model(tmp_path / "model", tiny_config("llama"))
    spec, found = load_spec(read_config(folder)), called_for(folder, monkeypatch, backend, method)
    expected = work.of_update(spec, method, ROWS, TOKENS, 4).weights
    tokens, mlp = ROWS * TOKENS, spec.num_layers * spec.intermediate_size * spec.hidden_size
    if backend.arrays.name == "numpy":
        # Direct products with a dequantised tile: of the probabilities, and of the gradients of gate and up.
        expected -= tokens * spec.vocab_size * spec.hidden_size * (method in ("mesp", "mebp-tiled"))
        expected -= tokens * 2 * mlp * (method == "mesp")
    # Called for, and computed by NumPy; MLX leaves out what no result needs: a replayed layer's output, and below the lowest layer.
    expected += tokens * mlp * (method in ("mebp", "mebp-tiled", "backprop-checkpointed"))
    if method == "backprop-checkpointed" and backend.arrays.name == "mlx":
        expected += tokens * sum(math.prod(spec.linears(0)[projection]) for projection in PROJECTIONS[:3])
    assert found == expected


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "phi3", "gpt_neox", "gpt2"])
def test_families_as_called_for(tmp_path, monkeypatch, name, keep):
    """Norms after sublayers, fused and plain ones: what each keeps is not multiplied again."""
    folder = make_model(tmp_path / "model", variant_config(name))
    spec = load_spec(read_config(folder))
    expected = work.of_update(spec, "mesp", ROWS, TOKENS, 4, keep=keep).weights
    inner = spec.num_layers * (2 if spec.gated else 1) * spec.intermediate_size * spec.hidden_size
    expected -= ROWS * TOKENS * (spec.vocab_size * spec.hidden_size + inner)  # as above
    assert called_for(folder, monkeypatch, reference, "mesp", Strategy(keep=keep)) == expected


def called_for(folder, monkeypatch, backend, method, strategy=DEFAULT):
    """The multiply-adds of an update that go through the two functions."""
    spec, calls = load_spec(read_config(folder)), []

    def counting(inner):
        def called(x, linear, *tile, **named):
            out, width = backend.quantized.shape(linear)
            calls.append(int(np.prod(x.shape[:-1])) * out * width)
            return inner(x, linear, *tile, **named)

        return called

    variant: dict[str, Any] = {"method": "mesp"} | config.VARIANTS.get(method, {})
    model = build(spec, backend, SCALE, strategy, method=variant["method"], tiled_head=variant.get("tiled_head", False))
    adapter = {name: backend.arrays.asarray(value) for name, value in random_adapter(folder).items()}
    group = random_group(spec.vocab_size, [TOKENS] * ROWS, supervised=1.1)
    assert group.mask.all()
    if backend.arrays.name == "mlx":  # the custom function calls what it was made of
        monkeypatch.setattr(backend.quantized, "apply", lambda x, linear: _custom(backend)(x, linear))
    for function in ("matmul", "matmul_transposed"):
        monkeypatch.setattr(backend.quantized, function, counting(getattr(backend.quantized, function)))
    with Store(read_folder(folder), spec, backend, resident=ALL_STAGES if variant["method"] == "backprop" else ()) as store:
        batches = [Batch(group)]
        if method == "mezo":
            zeroth_order.slopes(model, store, adapter, batches, zeroth_order.Perturbations(0, 0))
        elif method == "forward":
            states = backprop.forward(model, store, adapter, batches)
            with store.open(model.head) as w:
                model.head.loss(w, states, batches, gradient=False)
        else:
            methods.exact(variant["method"], variant.get("grad_checkpoint", False))(model, store, adapter, batches, Gathered())
    return sum(calls)


def _custom(backend):
    import mlx.core as mx

    function = mx.custom_function(lambda x, linear: backend.quantized.matmul(x, linear))
    function.vjp(lambda primals, dy, _: (backend.quantized.matmul_transposed(dy, primals[1]), backend.quantized.zeros_like(primals[1])))
    return function
