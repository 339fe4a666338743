"""Recurrences taken in pieces: the gradients of mlx-lm's own functions, and memory that does not grow by states of every token."""

import gc
from typing import Any

import numpy as np
import pytest
from backends import mx
from engines import random_group
from oracles import error

from mesp_mlx.model.stages import Batch

pytest.importorskip("mlx_lm")

from mlx_lm.models import gated_delta, ssm  # noqa: E402
from test_model_generic import assert_exact, spec_of, streamed, whole, written  # noqa: E402

from mesp_mlx.model import generic_recurrence  # noqa: E402
from mesp_mlx.model.generic_recurrence import Recurrence, _recurrence, in_pieces  # noqa: E402

TYPES = (
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "kimi_k3",
    "olmo_hybrid",
    "bailing_moe_v3",
    "mamba2",
    "falcon_h1",
    "nemotron_h",
    "granitemoehybrid",
    "plamo2",
    "rwkv7",
)


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=() if name in ("qwen3_next", "mamba2") else pytest.mark.slow) for name in TYPES])
def test_gradients_are_those_of_autodiff_of_the_whole(model_type, tmp_path, monkeypatch):
    pieces, made_again = [], generic_recurrence._made_again
    monkeypatch.setattr(generic_recurrence, "_made_again", lambda *given: pieces.append(given) or made_again(*given))
    folder = written(tmp_path, model_type)
    vocabulary = spec_of(folder).vocab_size
    batches = [Batch(random_group(vocabulary, (70, 41))), Batch(random_group(vocabulary, (33,), seed=5, first_row=2))]
    _, loss, gradients, adapter = streamed(folder, batches=batches)
    assert pieces
    count = len(pieces)
    assert_exact(loss, gradients, whole(folder, adapter, batches))
    assert len(pieces) == count, "mlx-lm's own modules are left alone"


def recurrence_of(function: Any) -> Recurrence:
    found = _recurrence(function)
    assert found
    return found


def delta(tokens: int, masked: bool, width: int = 8) -> tuple[Any, dict[str, mx.array], dict[str, Any]]:
    rng = np.random.default_rng(tokens)
    heads = {"q": (2, tokens, 2, width), "k": (2, tokens, 2, width), "v": (2, tokens, 4, 2 * width)}
    shapes = heads | {"a": (2, tokens, 4), "b": (2, tokens, 4), "A_log": (4,), "dt_bias": (4,)}
    arrays = {name: mx.array(0.3 * rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    return gated_delta.gated_delta_update, arrays, {"mask": mx.array((rng.random((2, tokens)) < 0.8).tolist()) if masked else None, "use_kernel": False}


def space(tokens: int, masked: bool) -> tuple[Any, dict[str, mx.array], dict[str, Any]]:
    rng = np.random.default_rng(tokens)
    shapes = {
        **{"hidden_states": (2, tokens, 4, 8), "A_log": (4,), "B": (2, tokens, 2, 16), "C": (2, tokens, 2, 16), "D": (4,)},
        **{"dt": (2, tokens, 4), "dt_bias": (4,)},
    }
    arrays = {name: mx.array(0.3 * rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    return ssm.ssm_update, arrays, {"mask": mx.array((rng.random((2, tokens)) < 0.8).tolist()) if masked else None}


def results(function: Any, arrays: dict[str, mx.array], rest: dict[str, Any]) -> list[mx.array]:
    """y, the state after, and their gradient with respect to all arrays."""

    def given(*values: mx.array) -> list[mx.array]:
        return list(function(**dict(zip(arrays, values, strict=True)), **rest))

    outputs = given(*arrays.values())
    cotangents = [mx.random.normal(output.shape, key=mx.random.key(i)) for i, output in enumerate(outputs)]
    return [*outputs, *mx.vjp(given, list(arrays.values()), cotangents)[1]]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 15, 16])
@pytest.mark.parametrize("recurrence", [delta, space])
def test_pieces_are_the_whole(recurrence, tokens, masked):
    """Of 5 tokens, the last piece shorter or not, the gradient of what is frozen in a model included. What is masked is left whole."""
    function, arrays, rest = recurrence(tokens, masked)
    found, truth = results(in_pieces(function, recurrence_of(function)._replace(tokens=5)), arrays, rest), results(function, arrays, rest)
    assert len(found) == 2 + len(arrays)
    assert all(error(a, b) <= 2e-5 for a, b in zip(found, truth, strict=True))


def test_states_of_every_token_are_not_kept():
    """Four times the tokens: a few states more for each piece, where the function itself keeps two a token; and nothing is left behind."""
    peaks: dict[tuple[str, int], int] = {}
    state_bytes = 2 * 4 * 64 * 32 * 4
    mx.set_memory_limit(1)
    gc.disable()
    try:
        for tokens in (64, 256):
            function, arrays, rest = delta(tokens, masked=False, width=32)
            mx.eval(arrays)
            for name, run in (("whole", function), ("pieces", in_pieces(function, recurrence_of(function)))):
                mx.clear_cache()
                mx.reset_peak_memory()
                before = mx.get_active_memory()
                mx.eval(results(run, arrays, rest))
                peaks[name, tokens] = mx.get_peak_memory() - before
                assert mx.get_active_memory() - before < state_bytes
    finally:
        gc.enable()
        mx.set_memory_limit(1 << 50)
    grown = {name: (peaks[name, 256] - peaks[name, 64]) / state_bytes / 192 for name in ("whole", "pieces")}
    assert grown["whole"] > 2 and grown["pieces"] < 1, grown
