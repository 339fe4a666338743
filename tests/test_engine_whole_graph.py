"""Backprop over the whole graph against mlx-lm's own, with and without checkpoints, and what it reads and keeps."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from backends import each_backend, needs_mlx, ops
from engines import Gathered, autodiff_of_mlx_lm, random_adapter, random_group, worst_error
from methods import PARTS, Counter, counted_memory, exact_pass, exactly, given, opened, without_structure
from models import make_model, tiny_config, variant_config

from mesp_mlx import reference
from mesp_mlx.engine.whole_graph import loss_and_gradients
from mesp_mlx.model.plain import DecoderLayer
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import ALL_STAGES, Store

GROUPS = [random_group(160, [13, 9, 5]), random_group(160, [21], seed=3, first_row=3)]
BY = {"plain": {"method": "backprop"}, "checkpointed": {"method": "backprop", "grad_checkpoint": True}}
VARIANTS = ["llama", "llama-biases", "llama-sliding", "mistral", "qwen2-yarn-rope", "qwen3"]  # tied and not
each_way = pytest.mark.parametrize("by", BY.values(), ids=BY.keys())
checkpointed = pytest.mark.parametrize("checkpoint", [False, True], ids=BY.keys())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of the variants' models, made when asked for."""
    made: dict[str, Any] = {}

    def folder(variant: str):
        if variant not in made:
            made[variant] = make_model(tmp_path_factory.mktemp(variant), variant_config(variant))
        return made[variant]

    return folder


@needs_mlx
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_autodiff_of_mlx_lm(tiny, variant):
    adapter = random_adapter(tiny(variant))
    want_loss, want = autodiff_of_mlx_lm(tiny(variant), adapter, GROUPS)
    for backend in (reference, ops):
        for by in BY.values():
            loss, gradients, _ = exact_pass(tiny(variant), backend, adapter, GROUPS, **by)
            assert loss == pytest.approx(want_loss, rel=1e-6)
            assert worst_error(gradients, want) <= 1e-5


@needs_mlx
@each_way
@each_backend
@pytest.mark.parametrize("bits", [3, None])
def test_other_frozen_weights(tmp_path, bits, backend, by):
    folder = make_model(tmp_path / "model", tiny_config("qwen2"), bits=bits, dtype="bfloat16")
    loss, gradients, _ = exact_pass(folder, backend, random_adapter(folder), GROUPS, **by)
    want_loss, want = autodiff_of_mlx_lm(folder, random_adapter(folder), GROUPS)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert worst_error(gradients, want) <= 1e-5


@each_way
def test_equals_mesp_in_float64(tiny, by):
    adapter, dropout = random_adapter(tiny("qwen3")), Dropout(seed=7, update=3, rate=0.25)
    (loss, gradients), (want_loss, want) = (exactly(tiny("qwen3"), adapter, GROUPS, dropout, backend=reference, **how) for how in (by, {}))
    assert loss == pytest.approx(want_loss, rel=1e-13)
    assert worst_error(gradients, want) <= 1e-12


@each_backend
@each_way
def test_dropout_is_that_of_mesp(tiny, by, backend):
    """A checkpointed layer draws its masks twice."""
    adapter, dropout = random_adapter(tiny("llama")), Dropout(seed=7, update=3, rate=0.5)
    _, gradients, _ = exact_pass(tiny("llama"), backend, adapter, GROUPS, dropout, **by)
    _, want = exactly(tiny("llama"), adapter, GROUPS, dropout, backend=reference)
    assert worst_error(gradients, want) <= 1e-5
    assert worst_error(exact_pass(tiny("llama"), backend, adapter, GROUPS, **by)[1], want) > 1e-2


@each_backend
@each_way
@pytest.mark.parametrize(("keys", "num_layers"), PARTS)
def test_only_some_modules(tiny, keys, num_layers, by, backend):
    adapter = random_adapter(tiny("llama"), keys=keys, num_layers=num_layers)
    _, gradients, _ = exact_pass(tiny("llama"), backend, adapter, GROUPS, **by)
    assert worst_error(gradients, exactly(tiny("llama"), adapter, GROUPS, backend=reference)[1]) <= 1e-5


@each_backend
@checkpointed
def test_one_graph_of_each_group(tiny, backend, checkpoint, monkeypatch):
    """No structured op is used; each layer runs once forward, and again backward where it is a checkpoint; all groups' gradients come at once."""
    without_structure(monkeypatch, backend)
    vjp, layer = Counter(backend.plain.vjp), Counter(DecoderLayer.layer)
    monkeypatch.setattr(backend.plain, "vjp", vjp)
    monkeypatch.setattr(DecoderLayer, "layer", lambda *arguments: layer(*arguments))
    model, store = opened(tiny("llama"), backend, "backprop")
    sink = Gathered()
    put = Counter(sink.put)
    sink.put = put
    with store:
        loss_and_gradients(model, store, given(backend, random_adapter(tiny("llama"))), [Batch(group) for group in GROUPS], sink, checkpoint)
    inner = 2 * 2 if checkpoint and backend is reference else 0  # the twin's checkpoint asks for a gradient of its layer
    assert (vjp.calls, layer.calls, put.calls) == (2 + inner, 2 * 2 * (1 + checkpoint), 1)


@each_backend
@checkpointed
def test_resident_weights_are_read_once(tiny, backend, checkpoint):
    """However many updates, validations and groups: only the rows of the embedding that a group names are read anew."""
    seen: list[str] = []
    model, store = opened(tiny("mistral"), backend, "backprop", store=lambda *arguments: Store(*arguments, resident=ALL_STAGES, watch=seen.append))
    adapter, read, losses = given(backend, random_adapter(tiny("mistral"))), [], []
    with store:
        for _ in range(3):
            losses.append(loss_and_gradients(model, store, adapter, [Batch(group) for group in GROUPS], Gathered(), checkpoint))
            read.append(store.bytes_read)
    assert set(store.loads.values()) == {1} and store.loads.keys() == {module for stage in model.forward_order() for module in stage.modules}
    assert seen == ["model.embed_tokens", "model.layers.0", "model.layers.1", "head"] * 3
    entries = read_folder(tiny("mistral"))
    rows = sum(entry.size_bytes for name, entry in entries.items() if "embed_tokens" in name) * sum(len(np.unique(group.ids)) for group in GROUPS) // 160
    whole = sum(entry.size_bytes for name, entry in entries.items() if "embed_tokens" not in name)
    assert read == [whole + rows * updates for updates in (1, 2, 3)] and losses == losses[:1] * 3


def numpy_peak(folder, **by: Any) -> int:
    adapter, group = random_adapter(folder), random_group(160, [64])
    tracemalloc.start()
    try:
        exact_pass(folder, reference, adapter, [group], **by)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Ten layers, in which what is kept between forward and backward outweighs the rest."""
    return make_model(tmp_path_factory.mktemp("deep"), tiny_config("llama", num_hidden_layers=10))


def kept(checkpoint: bool) -> int:
    """Bytes that ten layers keep of 64 tokens, at the least: inputs alone, or also norms, q, k, v, attention, gate, up, their product."""
    return 10 * 4 * 64 * (64 if checkpoint else 64 * 6 + 2 * 32 + 3 * 96)


def test_checkpoints_keep_less(deep):
    plain, checkpointed = (numpy_peak(deep, **by) for by in BY.values())
    assert plain > kept(False) and checkpointed < 0.4 * plain and checkpointed > kept(True)


@needs_mlx
def test_checkpoints_keep_less_on_mlx(deep):
    group, peaks = random_group(160, [64]), []
    with counted_memory() as peak:
        adapter = given(ops, random_adapter(deep))
        for checkpoint in (False, True):
            model, store = opened(deep, ops, "backprop", store=lambda *arguments: Store(*arguments, resident=ALL_STAGES))
            with store:
                peaks.append(peak(lambda: loss_and_gradients(model, store, adapter, [Batch(group)], Gathered(), checkpoint)))  # noqa: B023
    assert peaks[0] > kept(False) and kept(True) < peaks[1] < 0.6 * peaks[0]
