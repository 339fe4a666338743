"""MeBP's layer and head: their gradients against mlx-lm's own autodiff and against MeSP's, and what a step opens and keeps."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import each_backend, needs_mlx, numbers
from engines import RecordingStore, autodiff_of_mlx_lm, random_adapter, random_group, worst_error
from methods import PARTS, Counter, exact_pass, exactly, given, opened, unsupervised, without_structure
from models import VARIANTS, make_model, tiny_config, variant_config

from mesp_mlx import reference
from mesp_mlx.model.plain import DecoderLayer, WholeHead
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.shelves import Shelves

GROUPS = [random_group(160, [13, 9, 5]), random_group(160, [21], seed=3, first_row=3)]
HEADS = {"whole": {"method": "mebp"}, "tiled": {"method": "mebp", "tiled_head": True}}
each_head = pytest.mark.parametrize("by", HEADS.values(), ids=HEADS.keys())
each_variant = pytest.mark.parametrize(  # of the tiled head, which is mesp's and tested with it, two
    ("variant", "by"),
    [*((variant, HEADS["whole"]) for variant in VARIANTS), ("qwen2", HEADS["tiled"]), ("qwen3", HEADS["tiled"])],
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of the variants' models, made when asked for, with the loss and gradients of mlx-lm."""
    made: dict[str, Any] = {}

    def folder(variant: str):
        if variant not in made:
            made[variant] = make_model(tmp_path_factory.mktemp(variant), variant_config(variant))
        return made[variant]

    def truth(variant: str):
        if (key := f"{variant} by mlx-lm") not in made:
            made[key] = autodiff_of_mlx_lm(folder(variant), random_adapter(folder(variant)), GROUPS)
        return made[key]

    folder.truth = truth  # type: ignore[attr-defined]
    return folder


@needs_mlx
@each_backend
@each_variant
def test_equals_the_autodiff_of_mlx_lm(tiny, variant, by, backend):
    loss, gradients, _ = exact_pass(tiny(variant), backend, random_adapter(tiny(variant)), GROUPS, **by)
    want_loss, want = tiny.truth(variant)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert worst_error(gradients, want) <= 1e-5


@each_variant
def test_equals_mesp_in_float64(tiny, variant, by):
    """Two derivations of one gradient, with dropout: the masks must be the same, and nothing may be approximated."""
    adapter, dropout = random_adapter(tiny(variant)), Dropout(seed=7, update=3, rate=0.25)
    (loss, gradients), (want_loss, want) = (exactly(tiny(variant), adapter, GROUPS, dropout, backend=reference, **how) for how in (by, {}))
    assert loss == pytest.approx(want_loss, rel=1e-13)
    assert worst_error(gradients, want) <= 1e-12
    assert worst_error(exactly(tiny(variant), adapter, GROUPS, backend=reference, **by)[1], want) > 1e-2


@needs_mlx
@each_backend
@each_head
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (8, 32), (None, 64)])
def test_every_kind_of_frozen_weight(tmp_path, bits, group_size, by, backend):
    config = tiny_config("qwen2", intermediate_size=128, tie_word_embeddings=bits == 3)
    folder = make_model(tmp_path / "model", config, bits=bits, group_size=group_size, dtype="bfloat16")
    loss, gradients, _ = exact_pass(folder, backend, random_adapter(folder), GROUPS, **by)
    want_loss, want = autodiff_of_mlx_lm(folder, random_adapter(folder), GROUPS)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert worst_error(gradients, want) <= 1e-5


@each_backend
@each_head
def test_dropout_is_that_of_mesp(tiny, by, backend):
    adapter, dropout = random_adapter(tiny("qwen2")), Dropout(seed=7, update=3, rate=0.5)
    loss, gradients, _ = exact_pass(tiny("qwen2"), backend, adapter, GROUPS, dropout, **by)
    want_loss, want = exactly(tiny("qwen2"), adapter, GROUPS, dropout, backend=reference)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert worst_error(gradients, want) <= 1e-5


@each_backend
@each_head
@pytest.mark.parametrize(("keys", "num_layers"), PARTS)
def test_only_some_modules(tiny, keys, num_layers, by, backend):
    adapter = random_adapter(tiny("llama"), keys=keys, num_layers=num_layers)
    loss, gradients, store = exact_pass(tiny("llama"), backend, adapter, GROUPS, **by)
    want_loss, want = exactly(tiny("llama"), adapter, GROUPS, backend=reference)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert worst_error(gradients, want) <= 1e-5
    assert store.loads["model.layers.0.mlp.down_proj"] == (1 if num_layers == 1 else 2), "frozen layers below the lowest adapter are not read again"


@each_backend
def test_the_structured_ops_are_not_used(tiny, backend, monkeypatch):
    """What MeSP is compared with must not be MeSP."""
    adapter = random_adapter(tiny("qwen3"))
    loss, gradients, _ = exact_pass(tiny("qwen3"), backend, adapter, GROUPS)
    without_structure(monkeypatch, backend)
    with pytest.raises(TypeError):
        exact_pass(tiny("qwen3"), backend, adapter, GROUPS)
    again, same, _ = exact_pass(tiny("qwen3"), backend, adapter, GROUPS, method="mebp")
    assert again == pytest.approx(loss, rel=1e-6) and worst_error(same, gradients) <= 1e-5


@each_backend
def test_no_gradient_is_taken_that_nothing_needs(tiny, backend, monkeypatch):
    """The lowest adapted layer hands on no dx; and where its last projection alone is adapted, nothing of it is walked back."""
    (model, store), group = opened(tiny("llama"), backend, "mebp"), GROUPS[0]
    (layer,) = model.segments[0]
    adapter = given(backend, random_adapter(tiny("llama"), keys=("mlp.down_proj",)))
    x, dy = (backend.arrays.asarray(np.random.default_rng(i).normal(size=(*group.ids.shape, 64)).astype(np.float32)) for i in range(2))
    with store, store.open(layer) as w:
        below, gradients = layer.backward(w, adapter, {"x": x}, None, {"x": dy}, Batch(group), True)
        monkeypatch.setattr(backend.quantized, "matmul_transposed", None)
        nothing, same = layer.backward(w, adapter, {"x": x}, None, {"x": dy}, Batch(group), False)
    assert below["x"].shape == x.shape and nothing == {}
    names = {f"model.layers.0.mlp.down_proj.lora_{half}" for half in "ab"}
    assert gradients.keys() == same.keys() == names and all((numbers(gradients[name]) == numbers(same[name])).all() for name in names)


def named(events: list[str]) -> list[str]:
    return [event.replace("model.layers.", "").replace("model.embed_tokens", "embedding") for event in events]


@each_backend
@each_head
def test_the_order_of_a_step(tiny, by, backend):
    """Each layer is opened once forward and once backward, one ahead, the last one twice in turn; a checkpoint of each and group; the head's table once."""
    put = Counter(lambda tree: tree)
    counting: Any = SimpleNamespace(put=put)
    _, _, store = exact_pass(tiny("llama"), backend, random_adapter(tiny("llama")), GROUPS, **by, store=RecordingStore, shelves=Shelves(checkpoints=counting))
    assert named(store.events) == [
        "load embedding", "load 0", "free embedding", "load 1", "free 0", "load head", "free 1",
        "load 1", "free head", "load 0", "free 1", "free 0",
    ]  # fmt: skip
    assert put.calls == 2 * len(GROUPS)
    table = store.bytes_read - sum(entry.size_bytes * (2 if "layers" in name else 0) for name, entry in store._entries.items())
    size = sum(entry.size_bytes for name, entry in store._entries.items() if "embed_tokens" in name)
    tokens = sum(len(np.unique(group.ids)) for group in GROUPS)
    norm = store._entries["model.norm.weight"].size_bytes
    targets = sum(len(np.unique(group.targets[group.mask])) for group in GROUPS) if "tiled_head" in by else 0
    assert table == norm + size + size * (tokens + targets) // 160
    assert set(store.loads.values()) == {1, 2} and {module for module, count in store.loads.items() if count == 1} <= {"model.norm", "model.embed_tokens"}
    assert ("model.embed_tokens" in store.loads) == ("tiled_head" not in by)


@each_backend
def test_the_order_above_the_lowest_adapter(tiny, backend):
    adapter = random_adapter(tiny("llama"), num_layers=1, keys=("mlp.up_proj",))
    _, _, store = exact_pass(tiny("llama"), backend, adapter, GROUPS, method="mebp", store=RecordingStore)
    events = named(store.events)
    assert events[events.index("load head") :] == ["load head", "free 1", "load 1", "free head", "free 1"]


def test_a_layer_is_named_by_its_two_sublayers(tiny):
    model, store = opened(tiny("qwen3"), reference, "mebp")
    structured, _ = opened(tiny("qwen3"), reference)
    store.close()
    for (layer,), (attention, mlp) in zip(model.segments, structured.segments, strict=True):
        assert isinstance(layer, DecoderLayer) and layer.name == attention.name.removesuffix(".self_attn")
        assert layer.modules == (*attention.modules, *mlp.modules) and len(layer.adaptable) == 7
    assert isinstance(model.head, WholeHead) and [stage.name for stage in model.forward_order()] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "head",
    ]  # fmt: skip


@each_backend
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_both_heads_agree(tiny, variant, backend):
    """Losses by group, in order, with and without a gradient, one group with nothing supervised; and the likeliest token."""
    groups = [GROUPS[0], unsupervised(GROUPS[1]), GROUPS[1]]
    xs = [np.random.default_rng(i).normal(size=(*group.ids.shape, 64)).astype(np.float32) for i, group in enumerate(groups)]
    losses, gradients, tokens = [], [], []
    for method in ("mesp", "mebp"):
        model, store = opened(tiny(variant), backend, method)
        with store, store.open(model.head) as w:
            states: list[Any] = [{"x": backend.arrays.asarray(x)} for x in xs]
            found, dstates = model.head.loss(w, list(states), [Batch(group) for group in groups])
            taken = list(states)
            without, none = model.head.loss(w, taken, [Batch(group) for group in groups], gradient=False)
            assert taken == [None] * 3 and none == [] and without == pytest.approx(found, rel=1e-6) and all(type(loss) is float for loss in found)
            tokens.append([model.head.likeliest(w, {"x": states[2]["x"][:, :end]}) for end in range(1, GROUPS[1].ids.shape[1] + 1)])
        losses.append(found)
        gradients.append({str(i): numbers(dstate["x"]) for i, dstate in enumerate(dstates)})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[1][1] == 0 < min(losses[1][0], losses[1][2])
    assert not gradients[1].pop("1").any() and not gradients[0].pop("1").any()
    assert worst_error(gradients[1], gradients[0]) <= 1e-5
    assert tokens[0] == tokens[1] and len(set(tokens[0])) > 3
