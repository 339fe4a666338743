"""The loop against finite differences, its twin, and mlx-lm's own autodiff; and its order, literally."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from engines import SCALE, Gathered, RecordingStore, autodiff_of_mlx_lm, one_pass, random_adapter, random_group, worst_error
from models import PROJECTIONS, VARIANTS, make_model, tiny_config, variant_config

from mesp_mlx import reference
from mesp_mlx.engine.backprop import loss_and_gradients
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.safetensors import read_folder

try:
    from mesp_mlx import ops

    BACKENDS = [reference, ops]
except ImportError:
    BACKENDS = [reference]

needs_mlx = pytest.mark.skipif(len(BACKENDS) == 1, reason="MLX is not installed")
GROUPS = [random_group(160, [13, 9, 5]), random_group(160, [21], seed=3, first_row=3)]


def names(backend: Any) -> str:
    return backend.arrays.name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of the variants' models, made when asked for."""
    made = {}

    def folder(variant: str):
        if variant not in made:
            made[variant] = make_model(tmp_path_factory.mktemp(variant), variant_config(variant))
        return made[variant]

    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_gradients_are_the_derivative(tiny, variant):
    adapter = {name: value.astype(np.float64) for name, value in random_adapter(tiny(variant)).items()}
    _, gradients, _ = one_pass(tiny(variant), reference, adapter, GROUPS, dtype=np.float64)
    rng, step = np.random.default_rng(5), 1e-5
    direction = {name: rng.normal(size=value.shape) for name, value in adapter.items()}

    def loss_at(t: float) -> float:
        return one_pass(tiny(variant), reference, {name: value + t * direction[name] for name, value in adapter.items()}, GROUPS, dtype=np.float64)[0]

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    assert slope == pytest.approx(sum(np.sum(direction[name] * gradients[name]) for name in gradients), rel=1e-6)


@needs_mlx
@pytest.mark.parametrize("backend", BACKENDS, ids=names)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_autodiff_of_mlx_lm(tiny, variant, backend):
    adapter = random_adapter(tiny(variant))
    loss, gradients, _ = one_pass(tiny(variant), backend, adapter, GROUPS)
    want_loss, want = autodiff_of_mlx_lm(tiny(variant), adapter, GROUPS)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert worst_error(gradients, want) <= 1e-4


@needs_mlx
@pytest.mark.parametrize("backend", BACKENDS, ids=names)
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (5, 32), (6, 64), (8, 32), (None, 64)])
def test_every_width_of_quantisation(tmp_path, bits, group_size, backend):
    folder = make_model(tmp_path / "model", tiny_config("qwen2", intermediate_size=128), bits=bits, group_size=group_size, dtype="bfloat16")
    adapter = random_adapter(folder)
    loss, gradients, _ = one_pass(folder, backend, adapter, GROUPS)
    want_loss, want = autodiff_of_mlx_lm(folder, adapter, GROUPS)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert worst_error(gradients, want) <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
def test_modules_quantised_each_in_their_way(tmp_path, backend):
    eight, six = ({"bits": bits, "group_size": 32} for bits in (8, 6))
    settings = {"model.embed_tokens": eight, "model.layers.0.mlp.down_proj": six, "model.layers.1.self_attn.q_proj": False}
    folder = make_model(tmp_path / "model", tiny_config("llama"), quantization=settings)
    loss, gradients, _ = one_pass(folder, backend, random_adapter(folder), GROUPS)
    plain = {name: value.astype(np.float64) for name, value in random_adapter(folder).items()}
    want_loss, want, _ = one_pass(folder, reference, plain, GROUPS, dtype=np.float64)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert worst_error(gradients, want) <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
def test_a_window_hides_what_is_further_back(tmp_path, backend):
    """Mistral's window holds for all layers without being listed, which mlx-lm leaves out: what a query can't see can't change its loss."""
    folder = make_model(tmp_path / "model", tiny_config("mistral", sliding_window=3))
    group = random_group(160, [12], supervised=0.0)
    group.mask[0, 11] = True
    changed = dataclasses.replace(group, ids=group.ids.copy())
    changed.ids[0, :7] = (changed.ids[0, :7] + 1) % 160  # two layers of windows of 3 reach 4 tokens back, to position 7
    adapter = random_adapter(folder)
    assert one_pass(folder, backend, adapter, [changed])[0] == one_pass(folder, backend, adapter, [group])[0]
    changed.ids[0, 7] = (changed.ids[0, 7] + 1) % 160
    assert one_pass(folder, backend, adapter, [changed])[0] != one_pass(folder, backend, adapter, [group])[0]


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
def test_rows_together_equal_rows_apart(tiny, backend):
    """One update of unequal rows, padded in groups, is the sum of its rows alone, and every weight is read twice, whatever the rows."""
    adapter = random_adapter(tiny("qwen2"))
    dropout = Dropout(seed=7, update=3, rate=0.25)
    rows = [random_group(160, [length], seed=length, first_row=row) for row, length in enumerate([13, 9, 5, 21])]
    padded = [random_group(160, [length], seed=length, first_row=row, width=length) for row, length in enumerate([13, 9, 5, 21])]
    ids, targets, mask = (np.zeros((3, 13), np.int32) for _ in range(3))
    for b, group in enumerate(padded[:3]):
        width = group.ids.shape[1]
        ids[b, :width], targets[b, :width], mask[b, :width] = group.ids[0], group.targets[0], group.mask[0]
    together = [dataclasses.replace(rows[0], ids=ids, targets=targets, mask=mask.astype(bool), rows=(0, 1, 2), lengths=(13, 9, 5)), rows[3]]
    loss, gradients, store = one_pass(tiny("qwen2"), backend, adapter, together, dropout)
    apart = [one_pass(tiny("qwen2"), backend, adapter, [row], dropout) for row in rows]
    assert loss == pytest.approx(sum(one[0] for one in apart), rel=1e-6)
    summed = {name: np.sum([one[1][name] for one in apart], axis=0) for name in gradients}
    assert worst_error(gradients, summed) <= 1e-5
    assert set(store.loads.values()) == {1, 2}
    assert {module for module, count in store.loads.items() if count == 1} == {"model.norm"}
    assert store.bytes_read < 2 * sum(one[2].bytes_read for one in apart[:1])


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
def test_dropout_gradients_are_the_derivative(tiny, backend):
    """Masks are drawn three times in a pass, for forward, replay and backward: a difference would show in the slope."""
    dropout = Dropout(seed=7, update=3, rate=0.5)
    adapter = {name: value.astype(np.float64) for name, value in random_adapter(tiny("llama")).items()}
    _, exact, _ = one_pass(tiny("llama"), reference, adapter, GROUPS, dropout, dtype=np.float64)
    name, step = "model.layers.0.mlp.down_proj.lora_a", 1e-5
    direction = np.random.default_rng(5).normal(size=adapter[name].shape)
    ends = [one_pass(tiny("llama"), reference, adapter | {name: adapter[name] + t * direction}, GROUPS, dropout, dtype=np.float64)[0] for t in (step, -step)]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(np.sum(direction * exact[name]), rel=1e-6)
    _, gradients, _ = one_pass(tiny("llama"), backend, {name: value.astype(np.float32) for name, value in adapter.items()}, GROUPS, dropout)
    assert worst_error(gradients, exact) <= 1e-4
    _, without, _ = one_pass(tiny("llama"), reference, adapter, GROUPS, dtype=np.float64)
    assert worst_error(without, exact) > 1e-2


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
@pytest.mark.parametrize(
    ("keys", "num_layers"),
    [(("mlp.down_proj",), 1), (("self_attn.q_proj",), 1), (("self_attn.o_proj",), -1), (("mlp.gate_proj", "self_attn.v_proj"), -1), (PROJECTIONS, 1)],
)
def test_only_some_modules(tiny, keys, num_layers, backend):
    """The gradients of a few adapters are those of the same adapters among all, the others being zero."""
    adapter = random_adapter(tiny("llama"), keys=keys, num_layers=num_layers)
    _, gradients, store = one_pass(tiny("llama"), backend, adapter, GROUPS)
    everywhere = {name: np.zeros_like(value) for name, value in random_adapter(tiny("llama")).items()} | adapter
    _, whole, _ = one_pass(tiny("llama"), reference, everywhere, GROUPS)
    assert worst_error(gradients, {name: whole[name] for name in adapter}) <= 1e-5
    below = "model.layers.0.mlp.down_proj"
    assert store.loads[below] == (1 if num_layers == 1 else 2), "frozen layers below the lowest adapter are not read again"


class Recorder:
    """A stage that writes down what is asked of it."""

    def __init__(self, inner: Any, events: list[str]):
        self.inner, self.events = inner, events

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, *arguments: Any) -> Any:
        self.events.append(f"forward {self.inner.name}")
        return self.inner.forward(*arguments)

    def backward(self, *arguments: Any) -> Any:
        self.events.append(f"backward {self.inner.name}")
        return self.inner.backward(*arguments)

    def loss(self, *arguments: Any) -> Any:
        self.events.append("loss")
        return self.inner.loss(*arguments)


def events_of_a_pass(folder, backend, adapter) -> list[str]:
    spec = load_spec(read_config(folder))
    model, arrays = build(spec, backend, SCALE), {name: backend.arrays.asarray(value) for name, value in adapter.items()}
    with RecordingStore(read_folder(folder), spec, backend) as store:
        segments: Any = tuple(tuple(Recorder(stage, store.events) for stage in segment) for segment in model.segments)
        ends: Any = {"embedding": Recorder(model.embedding, store.events), "head": Recorder(model.head, store.events)}
        loss_and_gradients(dataclasses.replace(model, segments=segments, **ends), store, arrays, [Batch(GROUPS[0])], Gathered())
    return [event.replace("model.layers.", "").replace("model.embed_tokens", "embedding").replace("self_attn", "attention") for event in store.events]


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
def test_the_order_of_a_step(tiny, backend):
    """Loads run one stage ahead; a stage is freed before the one after the next is loaded; attention stays open while its MLP is reversed."""
    assert events_of_a_pass(tiny("llama"), backend, random_adapter(tiny("llama"))) == [
        "load embedding", "load 0.attention", "forward embedding", "free embedding",
        "load 0.mlp", "forward 0.attention", "free 0.attention",
        "load 1.attention", "forward 0.mlp", "free 0.mlp",
        "load 1.mlp", "forward 1.attention", "free 1.attention",
        "load head", "forward 1.mlp", "free 1.mlp",
        "load 1.attention", "loss", "free head",
        "load 1.mlp", "forward 1.attention",
        "load 0.attention", "backward 1.mlp", "free 1.mlp",
        "backward 1.attention", "free 1.attention",
        "load 0.mlp", "forward 0.attention",
        "backward 0.mlp", "free 0.mlp",
        "backward 0.attention", "free 0.attention",
    ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS, ids=names)
def test_the_order_of_a_step_above_the_lowest_adapter(tiny, backend):
    """Only the last MLP is adapted: layer 0 is never reversed, nor is the attention below the MLP, which is only replayed, and so not held."""
    adapter = random_adapter(tiny("llama"), num_layers=1, keys=("mlp.up_proj",))
    events = events_of_a_pass(tiny("llama"), backend, adapter)
    assert events[events.index("loss") :] == [
        "loss", "free head", "load 1.mlp", "forward 1.attention", "free 1.attention", "backward 1.mlp", "free 1.mlp",
    ]  # fmt: skip
