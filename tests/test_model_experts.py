"""Mixtures of experts, streamed: against finite differences, mlx-lm's own autodiff and the other methods; and what is read, and when, and what is not."""

import weakref
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, each_backend, mx, needs_mlx
from engines import SCALE, Gathered, autodiff_of_mlx_lm, one_pass, random_adapter, random_group, worst_error
from models import make_model, tiny_config

from mesp_mlx import adapter as adapters
from mesp_mlx import reference
from mesp_mlx.data.group import Group
from mesp_mlx.engine import methods, zeroth_order
from mesp_mlx.memory.strategy import ALL, Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import Store

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
                  "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 32, "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen3_moe-not-normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe-a-dense-layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "olmoe-one-serves": ("olmoe", {"num_experts_per_tok": 1}),
    "mixtral-all-serve": ("mixtral", {"num_experts_per_tok": 4}),
    "gpt_oss-yarn-rope": ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}}),
}
GROUPS = [random_group(160, [13, 9, 5]), random_group(160, [21], seed=3, first_row=3)]


def config(variant: str, **more: Any) -> dict[str, Any]:
    family, overrides = VARIANTS[variant]
    return tiny_config(family, **{**FAMILIES[family], **overrides, **more})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of the variants' models, made when asked for."""
    made = {}

    def folder(variant: str, **how: Any):
        key = variant, *sorted(how.items())
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(variant), config(variant), **how)
        return made[key]

    return folder


def tables(folder) -> list[str]:
    """Full names of what stacks experts."""
    spec = load_spec(read_config(folder))
    return [module for layer in range(spec.num_layers) if spec.experts[layer] for module in spec.mlp_modules(layer)[2:]]


def run(folder, backend, adapter, groups, method="mesp", strategy=None, store=None, dropout=None, dtype=None):
    """Loss and gradients of one update, by any exact method."""
    spec, sink = load_spec(read_config(folder)), Gathered()
    model = build(spec, backend, SCALE, strategy or Strategy(), dtype, method)
    arrays = {name: backend.arrays.asarray(value) for name, value in adapter.items()}
    with store or Store(read_folder(folder), spec, backend) as opened:
        loss = methods.exact(method)(model, opened, arrays, [Batch(group, dropout) for group in groups], sink)
    return loss, {name: np.array(backend.arrays.to_numpy(value)) for name, value in sink.gradients.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_gradients_are_the_derivative(tiny, variant):
    folder = tiny(variant)
    adapter = {name: value.astype(np.float64) for name, value in random_adapter(folder).items()}
    _, gradients, _ = one_pass(folder, reference, adapter, GROUPS, dtype=np.float64)
    rng, step = np.random.default_rng(5), 1e-6  # so small that no token changes its experts
    direction = {name: rng.normal(size=value.shape) for name, value in adapter.items()}

    def loss_at(t: float) -> float:
        return one_pass(folder, reference, {name: value + t * direction[name] for name, value in adapter.items()}, GROUPS, dtype=np.float64)[0]

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    assert slope == pytest.approx(sum(np.sum(direction[name] * gradients[name]) for name in gradients), rel=1e-6)


@needs_mlx
@each_backend
@pytest.mark.parametrize("how", [{"bits": None}, {"bits": 4}], ids=["plain", "4-bit"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_autodiff_of_mlx_lm(tiny, variant, how, backend):
    folder = tiny(variant, **how)
    adapter = random_adapter(folder)
    loss, gradients, _ = one_pass(folder, backend, adapter, GROUPS)
    want_loss, want = autodiff_of_mlx_lm(folder, adapter, GROUPS)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert worst_error(gradients, want) <= 1e-4


@needs_mlx
@each_backend
def test_gpt_oss_as_it_is_published(tmp_path, backend):
    """Experts in mxfp4, the rest in 8 bits."""
    mxfp4, parts = {"mode": "mxfp4", "bits": 4, "group_size": 32}, ("gate_proj", "up_proj", "down_proj")
    packed = {f"model.layers.{layer}.mlp.experts.{part}": mxfp4 for layer in (0, 1) for part in parts}
    folder = make_model(tmp_path / "model", config("gpt_oss"), bits=8, quantization=packed)
    adapter = random_adapter(folder)
    loss, gradients, _ = one_pass(folder, backend, adapter, GROUPS)
    want_loss, want = autodiff_of_mlx_lm(folder, adapter, GROUPS)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert worst_error(gradients, want) <= 1e-4


@each_backend
@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "qwen3_moe-a-dense-layer"])
@pytest.mark.parametrize("strategy", [
    Strategy(keep="replay"), Strategy(keep="inputs"), Strategy(keep="attention"), Strategy(keep="all"), Strategy(resident=ALL), Strategy(width_tile=128),
])  # fmt: skip
def test_strategies_change_nothing(tiny, variant, strategy, backend):
    folder = tiny(variant)
    adapter = random_adapter(folder)
    want_loss, want = run(folder, backend, adapter, GROUPS, dropout=Dropout(7, 3, 0.25))
    loss, gradients = run(folder, backend, adapter, GROUPS, strategy=strategy, dropout=Dropout(7, 3, 0.25))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert worst_error(gradients, want) <= 1e-5


@each_backend
@pytest.mark.parametrize("method", ["mebp", "backprop"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "qwen3_moe-a-dense-layer"])
def test_the_methods_of_autodiff_agree(tiny, variant, method, backend):
    """With dropout: the masks are the same."""
    folder = tiny(variant)
    adapter = random_adapter(folder)
    want_loss, want = run(folder, backend, adapter, GROUPS, dropout=Dropout(7, 3, 0.25))
    loss, gradients = run(folder, backend, adapter, GROUPS, method, dropout=Dropout(7, 3, 0.25))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert worst_error(gradients, want) <= 1e-4


@each_backend
def test_mezo_walks_experts_too(tiny, backend):
    folder = tiny("olmoe")
    spec, adapter = load_spec(read_config(folder)), random_adapter(folder)
    arrays, batches = {name: backend.arrays.asarray(value) for name, value in adapter.items()}, [Batch(group) for group in GROUPS]
    directions = zeroth_order.Perturbations(3, 1, 1, 1e-3)
    with Store(read_folder(folder), spec, backend) as store:
        model = build(spec, backend, SCALE)
        loss, (slope,) = zeroth_order.slopes(model, store, arrays, batches, directions)
    z = {name: 1e-3 * backend.arrays.to_numpy(directions.direction(backend, 0, name, value.shape)) for name, value in adapter.items()}
    plus, minus = (run(folder, backend, {name: value + sign * z[name] for name, value in adapter.items()}, GROUPS)[0] for sign in (1, -1))
    tokens = sum(group.mask.sum() for group in GROUPS)
    assert loss == pytest.approx((plus + minus) / 2, rel=1e-5)
    assert slope == pytest.approx((plus - minus) / (2e-3 * tokens), rel=0.02)


@each_backend
@pytest.mark.parametrize("keys", [
    ["self_attn.q_proj"], ["mlp.gate"], ["mlp.switch_mlp.down_proj"], ["mlp.switch_mlp.gate_proj", "mlp.gate"], ["mlp.gate_proj", "mlp.switch_mlp.up_proj"],
])  # fmt: skip
@pytest.mark.parametrize("num_layers", [1, 2])
def test_any_modules_may_be_adapted(tiny, keys, num_layers, backend):
    """Whatever is adapted has the gradient that it has when all is."""
    folder = tiny("qwen3_moe-a-dense-layer")
    everything = random_adapter(folder)
    some = {name: value for name, value in everything.items() if name in random_adapter(folder, num_layers=num_layers, keys=keys)}
    rest = {name: np.zeros_like(value) if name.endswith("lora_b") and name not in some else value for name, value in everything.items()}
    loss, gradients = run(folder, backend, some, GROUPS)
    want_loss, want = run(folder, backend, rest, GROUPS)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert worst_error(gradients, {name: want[name] for name in some}) <= 1e-5


@each_backend
def test_groups_are_summed(tiny, backend):
    folder = tiny("qwen3_moe")
    adapter = random_adapter(folder)
    apart = [run(folder, backend, adapter, [group]) for group in GROUPS]
    loss, gradients = run(folder, backend, adapter, GROUPS)
    assert loss == pytest.approx(sum(part for part, _ in apart), rel=1e-6)
    assert worst_error(gradients, {name: apart[0][1][name] + apart[1][1][name] for name in gradients}) <= 1e-5


@each_backend
def test_rows_together_equal_rows_apart(tiny, backend):
    """Dropout too, which leaves out the same of a token whoever is beside it."""
    folder, dropout = tiny("gpt_oss"), Dropout(7, 3, 0.25)
    adapter, both = random_adapter(folder), GROUPS[0]
    rows = [Group(both.ids[i : i + 1, :n], both.targets[i : i + 1, :n], both.mask[i : i + 1, :n], (i,), (n,)) for i, n in enumerate(both.lengths)]
    loss, gradients = run(folder, backend, adapter, [both], dropout=dropout)
    want_loss, want = run(folder, backend, adapter, rows, dropout=dropout)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert worst_error(gradients, want) <= 1e-5


class Watched(Store):
    """A store that writes down which rows of experts' tables it reads, and how many arrays it handed out of them are alive when it reads more."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.read: list[tuple[str, int]] = []
        self.expert_bytes = self.most_alive = 0
        self._given: list[Any] = []

    def start(self, wanted: Any) -> Any:
        before = self.bytes_read
        loading = super().start(wanted)
        stacked = {module: runs for module, runs in wanted.items() if len(self._entries[f"{module}.weight"].shape) == 3} if wanted else {}
        if stacked:
            assert len(stacked) == len(wanted) and None not in stacked.values()
            self.read += [(module, row) for module, runs in stacked.items() for first, last in runs for row in range(first, last)]
            self.expert_bytes += self.bytes_read - before
            self.most_alive = max(self.most_alive, 1 + sum(array() is not None for array in self._given))
            self._given.append(weakref.ref(next(iter(loading.buffers.values()))["weight"][0]))
        return loading


def watched_run(folder, backend, groups, monkeypatch, strategy=None, resident=(), keys=None, updates=1):
    """What was read of experts in one update, in order, and which experts the router chose, pass by pass."""
    spec, chosen = load_spec(read_config(folder)), []
    route = backend.experts.route

    def recorded(*arguments: Any) -> Any:
        index, p = route(*arguments)
        chosen.append(np.unique(np.array(index)).tolist())
        return index, p

    monkeypatch.setattr(backend.experts, "route", recorded)
    store = Watched(read_folder(folder), spec, backend, resident=resident)
    model, adapter = build(spec, backend, SCALE, strategy or Strategy()), random_adapter(folder, keys=keys)
    arrays = {name: backend.arrays.asarray(value) for name, value in adapter.items()}
    with store:
        for _ in range(updates):
            methods.exact("mesp")(model, store, arrays, [Batch(group) for group in groups], Gathered())
    return store, chosen, spec


@each_backend
def test_only_experts_that_serve_are_read_in_order_and_no_byte_more(tiny, backend, monkeypatch):
    folder = tiny("qwen3_moe")
    group = random_group(160, [3], seed=4)
    store, chosen, spec = watched_run(folder, backend, [group], monkeypatch)
    assert len(chosen) == 4 and chosen[0] == chosen[3] and chosen[1] == chosen[2]  # both layers forward, and both backward
    assert any(len(experts) < 6 for experts in chosen)
    passes = zip((0, 1, 1, 0), chosen, strict=True)
    assert store.read == [(module, expert) for layer, experts in passes for expert in experts for module in spec.mlp_modules(layer)[2:]]
    sizes = {module: sum(entry.size_bytes for name, entry in read_folder(folder).items() if name.rpartition(".")[0] == module) for module in tables(folder)}
    assert store.expert_bytes == sum(sizes[module] // 6 for module, _ in store.read)


@each_backend
def test_one_token_reads_as_many_experts_as_serve_it(tiny, backend, monkeypatch):
    store, _, _ = watched_run(tiny("olmoe"), backend, [random_group(160, [1], supervised=1.0)], monkeypatch)
    assert len(store.read) == 2 * 2 * 3 * 3  # passes, layers, experts, tables


@each_backend
def test_what_lies_below_the_lowest_adapter_is_read_once(tiny, backend, monkeypatch):
    folder = tiny("olmoe")
    store, chosen, _ = watched_run(folder, backend, [GROUPS[1]], monkeypatch, keys=["mlp.gate"])
    first = [(module, row) for module, row in store.read if ".0." in module]
    assert len(chosen) == 4 and len(first) == 3 * (len(chosen[0]) + len(chosen[3]))


def test_two_experts_are_in_memory_at_once(tiny, monkeypatch):
    store, _, _ = watched_run(tiny("qwen3_moe"), reference, GROUPS, monkeypatch)
    assert store.most_alive == 2  # the one that computes, and the next


@needs_mlx
def test_the_peak_is_that_of_few_experts(tmp_path):
    """Of MLX's memory, which a graph would hold too: 64 experts of 393 kB; one computes, one is read, and a tile is made of one."""
    folder = make_model(tmp_path / "model", config("qwen3_moe", num_experts=64, moe_intermediate_size=512), bits=None)
    adapter, groups = random_adapter(folder, keys=["self_attn.q_proj", "mlp.gate"]), [random_group(160, [32])]
    run(folder, BACKENDS[1], adapter, groups)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run(folder, BACKENDS[1], adapter, groups)
    assert mx.get_peak_memory() - before < 5 * 3 * 64 * 512 * 4


@each_backend
def test_a_resident_stage_reads_each_expert_once(tiny, backend, monkeypatch):
    folder = tiny("qwen3_moe")
    stages = {f"model.layers.{layer}.mlp" for layer in (0, 1)}
    store, chosen, _ = watched_run(folder, backend, [random_group(160, [3], seed=4)], monkeypatch, resident=stages, updates=2)
    assert len(store.read) == len(set(store.read)) == 3 * sum(len(experts) for experts in chosen[:2])


@each_backend
def test_experts_that_serve_nobody_get_gradients_of_zero(tiny, backend, monkeypatch):
    folder = tiny("qwen3_moe")
    group = random_group(160, [3], seed=4)
    _, chosen, _ = watched_run(folder, backend, [group], monkeypatch)
    _, gradients = run(folder, backend, random_adapter(folder), [group])
    for layer in (0, 1):
        for half in "ab":
            used = np.abs(gradients[f"model.layers.{layer}.mlp.switch_mlp.gate_proj.lora_{half}"]).max(axis=(1, 2)) > 0
            assert np.flatnonzero(used).tolist() == chosen[layer]


@needs_mlx
@pytest.mark.parametrize("family", FAMILIES)
def test_starts_from_mlx_lms_adapter_of_all_linears(tiny, family):
    """Keys that are not given mean what mlx-lm means: attention, router and experts; drawn in its order, the same bits."""
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    folder = tiny(family)
    model: Any = load_model(folder)[0]
    model.freeze()
    mx.random.seed(11)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": SCALE, "dropout": 0.0, "keys": None})
    want = {name: np.array(value) for name, value in tree_flatten(model.trainable_parameters())}
    spec = load_spec(read_config(folder))
    for backend in BACKENDS:
        got = adapters.initialise(spec, adapters.choose_modules(spec), 4, 11, backend)
        assert got.keys() == want.keys()
        for name, value in got.items():
            np.testing.assert_array_equal(backend.arrays.to_numpy(value), want[name])


@needs_mlx
@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_loads_the_adapter_and_finds_the_same_loss(tiny, family, tmp_path):
    import mlx.nn as nn
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    folder = tiny(family)
    adapter, spec = random_adapter(folder), load_spec(read_config(folder))
    adapters.save(tmp_path, {name: mx.array(value) for name, value in adapter.items()}, BACKENDS[1])
    adapters.write_config(tmp_path, model="m", num_layers=2, rank=4, scale=SCALE, dropout=0.0, keys=spec.adaptable_keys())
    model: Any = load_adapters(load_model(folder)[0], str(tmp_path))
    model.eval()
    group = GROUPS[0]
    losses = nn.losses.cross_entropy(model(mx.array(group.ids)), mx.array(group.targets)) * mx.array(group.mask)
    assert run(folder, BACKENDS[1], adapter, [group])[0] == pytest.approx(losses.sum().item(), rel=1e-4)


@needs_mlx
def test_bfloat16_activations_come_close(tiny):
    folder = tiny("gpt_oss")
    adapter = random_adapter(folder)
    want_loss, want = run(folder, BACKENDS[1], adapter, GROUPS)
    loss, gradients = run(folder, BACKENDS[1], adapter, GROUPS, dtype=mx.bfloat16)
    assert loss == pytest.approx(want_loss, rel=2e-2)
    assert all(value.dtype == np.float32 for value in gradients.values())
    total = lambda values: np.sqrt(sum(np.sum(np.square(value)) for value in values))  # noqa: E731
    assert total(gradients[name] - want[name] for name in want) < 0.2 * total(want.values())


def test_what_a_config_says_of_experts():
    spec = load_spec(config("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [experts is not None for experts in spec.experts] == [False, True, False, False]
    assert spec.linears(0)["mlp.gate_proj"] == (96, 64) and spec.linears(1)["mlp.switch_mlp.down_proj"] == (6, 64, 32)
    assert spec.pair_shapes("model.layers.1.mlp.switch_mlp.gate_proj", 4) == ((6, 4, 64), (6, 32, 4))
    assert spec.pair_shapes("model.layers.1.mlp.gate", 4) == ((64, 4), (4, 6))
    oss = load_spec(config("gpt_oss"))
    up = "model.layers.0.mlp.experts.up_proj"
    assert oss.windows == (5, None) and oss.sinks and oss.module_tensors(up) == {f"{up}.weight": (6, 32, 64), f"{up}.bias": (6, 32)}
    with pytest.raises(Exception, match="7 of 6 experts"):
        load_spec(config("qwen3_moe", num_experts_per_tok=7))


def test_the_shape_of_qwen3_30b():
    from mesp_mlx.model.shapes import SHAPES

    spec = load_spec(SHAPES["qwen3-30b-a3b"])
    assert spec.num_layers == 48 and all(experts == spec.experts[0] for experts in spec.experts)
    count = sum(int(np.prod(shape)) for shape in spec.tensors().values())
    assert round(count / 1e9, 1) == 30.5


