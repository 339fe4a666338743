"""Every structured family beside Llama's own: gradients against mlx-lm's autodiff and the tape, each method, each level of what is kept, adapters."""

from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, each_backend, mx, needs_mlx, numbers
from engines import SCALE, Gathered, autodiff_of_mlx_lm, one_pass, random_adapter, random_group, worst_error
from methods import exact_pass, exactly, given, opened
from models import FAMILY_VARIANTS, make_model, variant_config
from strategies import train

from mesp_mlx import adapter as adapters
from mesp_mlx import reference
from mesp_mlx.engine import zeroth_order
from mesp_mlx.engine.backprop import loss_and_gradients
from mesp_mlx.memory.strategy import KEEPS, Strategy
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.safetensors import read_array, read_folder

GROUPS = [random_group(160, [13, 9, 5]), random_group(160, [21], seed=3, first_row=3)]
IN_MLX_LM = [variant for variant in FAMILY_VARIANTS if variant != "opt"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of the variants' models, made when asked for."""
    made = {}

    def folder(variant: str):
        if variant not in made:
            made[variant] = make_model(tmp_path_factory.mktemp(variant), variant_config(variant))
        return made[variant]

    return folder


@needs_mlx
@pytest.mark.parametrize("variant", IN_MLX_LM)
def test_equals_the_autodiff_of_mlx_lm(tiny, variant):
    adapter = random_adapter(tiny(variant))
    want_loss, want = autodiff_of_mlx_lm(tiny(variant), adapter, GROUPS)
    for backend in BACKENDS:
        loss, gradients, _ = one_pass(tiny(variant), backend, adapter, GROUPS)
        assert loss == pytest.approx(want_loss, rel=1e-5), backend.arrays.name
        assert worst_error(gradients, want) <= 1e-4, backend.arrays.name


@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_float64_gradients_are_the_tape_s_and_the_derivative(tiny, variant):
    adapter, dropout = random_adapter(tiny(variant)), Dropout(7, 1, 0.3)
    loss, gradients = exactly(tiny(variant), adapter, GROUPS, dropout, backend=reference)
    tape_loss, tape = exactly(tiny(variant), adapter, GROUPS, dropout, backend=reference, method="mebp")
    assert loss == pytest.approx(tape_loss, rel=1e-12) and worst_error(gradients, tape) <= 1e-9
    rng, step = np.random.default_rng(5), 1e-5
    direction = {name: rng.normal(size=value.shape) for name, value in adapter.items()}

    def loss_at(t: float) -> float:
        moved = {name: value + t * direction[name] for name, value in adapter.items()}
        return exactly(tiny(variant), moved, GROUPS, dropout, backend=reference)[0]

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    assert slope == pytest.approx(sum(np.sum(direction[name] * gradients[name]) for name in gradients), rel=1e-6)


@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_adapters_on_parts_of_a_layer(tiny, variant):
    """Whatever is lowest: what leads out of the last MLP, what leads into the first attention, or one of each half; the tape walks all of the layer."""
    spec = load_spec(read_config(tiny(variant)))
    attention, mlp = spec.attention_keys(0), spec.mlp_keys(0)
    for keys, layers in (((mlp[-1],), 1), ((attention[0],), -1), ((attention[-1], mlp[0]), -1)):
        adapter = random_adapter(tiny(variant), num_layers=layers, keys=keys)
        loss, gradients = exactly(tiny(variant), adapter, GROUPS, backend=reference)
        tape_loss, tape = exactly(tiny(variant), adapter, GROUPS, backend=reference, method="mebp")
        assert loss == pytest.approx(tape_loss, rel=1e-12) and worst_error(gradients, tape) <= 1e-9


@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_every_level_of_what_is_kept(tiny, variant):
    """With tiles that cut everything: what is kept changes no gradient."""
    adapter, truth = random_adapter(tiny(variant)), None
    for backend in BACKENDS:
        for keep in KEEPS:
            strategy = Strategy(keep=keep, query_tile=4, width_tile=32, vocabulary_tile=48)
            model, store = opened(tiny(variant), backend, strategy=strategy)
            sink, arrays = Gathered(), given(backend, adapter)
            with store:
                loss = loss_and_gradients(model, store, arrays, [Batch(group, Dropout(7, 1, 0.3)) for group in GROUPS], sink)
            found = {name: np.array(numbers(value)) for name, value in sink.gradients.items()}
            truth = truth or exactly(tiny(variant), adapter, GROUPS, Dropout(7, 1, 0.3), backend=reference)
            assert loss == pytest.approx(truth[0], rel=1e-5), (backend.arrays.name, keep)
            assert worst_error(found, truth[1]) <= 1e-4, (backend.arrays.name, keep)


@each_backend
@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_every_method(tiny, variant, backend):
    """Autodiff of plain layers and of the whole graph finds the same; and the derivative-free estimate is the slope along its direction."""
    adapter, dropout = random_adapter(tiny(variant)), Dropout(7, 1, 0.3)
    want_loss, want, _ = exact_pass(tiny(variant), backend, adapter, GROUPS, dropout)
    ways: list[dict[str, Any]] = [{"method": "mebp", "tiled_head": True}, {"method": "backprop"}, {"method": "backprop", "grad_checkpoint": True}]
    for by in ways:
        loss, gradients, _ = exact_pass(tiny(variant), backend, adapter, GROUPS, dropout, **by)
        assert loss == pytest.approx(want_loss, rel=1e-5) and worst_error(gradients, want) <= 1e-4, by
    model, store = opened(tiny(variant), backend, method="mezo")
    directions = zeroth_order.Perturbations(3, 0, epsilon=1e-3)
    with store:
        _, (slope,) = zeroth_order.slopes(model, store, given(backend, adapter), [Batch(group, dropout) for group in GROUPS], directions)
    along = {name: numbers(directions.direction(backend, 0, name, value.shape)) for name, value in adapter.items()}
    tokens = sum(int(group.mask.sum()) for group in GROUPS)
    assert slope == pytest.approx(sum(float(np.sum(along[name] * want[name])) for name in want) / tokens, rel=0.05)


@needs_mlx
@pytest.mark.parametrize("variant", IN_MLX_LM)
def test_mlx_lm_loads_the_adapter_and_has_the_same_loss(tiny, variant, tmp_path):
    import mlx.nn as nn
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    adapter, spec = random_adapter(tiny(variant)), load_spec(read_config(tiny(variant)))
    loss, _, _ = one_pass(tiny(variant), reference, adapter, GROUPS)
    adapters.save(tmp_path, adapter, reference)
    adapters.write_config(tmp_path, model="m", num_layers=spec.num_layers, rank=4, scale=SCALE, dropout=0.0, keys=spec.adaptable_keys())
    model = load_adapters(load_model(tiny(variant))[0], str(tmp_path))
    model.eval()

    def loss_of(group: Any) -> float:
        losses = nn.losses.cross_entropy(model(mx.array(group.ids)).astype(mx.float32), mx.array(group.targets))
        return float((losses * mx.array(group.mask)).sum())

    assert sum(map(loss_of, GROUPS)) == pytest.approx(loss, rel=1e-5)


@needs_mlx
@pytest.mark.parametrize("variant", IN_MLX_LM)
def test_tensors_are_those_of_mlx_lm_s_model(variant):
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    config = variant_config(variant)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    parameters: Any = dict(tree_flatten(model.parameters()))
    if load_spec(config).tied:  # Gemma 3's module has a head until it sees weights without one
        parameters = {name: array for name, array in parameters.items() if not name.endswith("lm_head.weight")}
    assert load_spec(config).tensors() == {name: array.shape for name, array in parameters.items()}


@each_backend
@pytest.mark.parametrize("variant", ["gemma2", "phi3", "olmo3", "cohere2", "gpt_neox", "gpt2"])
def test_trained_with_everything_in_the_file(tiny, variant, backend):
    """States of a parallel block, cut projections and outputs that norms read come back from it as they were."""
    in_memory = train(tiny(variant), backend, Strategy(group_tokens=64), rate=0.1)
    in_file = Strategy(group_tokens=64, keep="all", checkpoints="file", states="file", gradients="spilled", adapter="file", resident=2)
    found = train(tiny(variant), backend, in_file, rate=0.1)
    assert found.losses == pytest.approx(in_memory.losses, rel=1e-5) and worst_error(found.adapter, in_memory.adapter) <= 1e-4
    assert max(found.left) > 0


def test_opt_is_the_published_model(tmp_path):
    """Written out anew (arXiv 2205.01068), mlx-lm having none: norms before, ReLU, and a table of positions that begins at its third row."""
    folder = make_model(tmp_path / "model", variant_config("opt"), bits=None)
    adapter, found = random_adapter(folder), read_folder(folder)
    tensors = {name.removeprefix("model.decoder."): read_array(entry).astype(np.float64) for name, entry in found.items()}

    def linear(x: np.ndarray, module: str) -> np.ndarray:
        a, b = (adapter[f"model.decoder.{module}.lora_{half}"].astype(np.float64) for half in "ab")
        return x @ (tensors[f"{module}.weight"].T + SCALE * a @ b) + tensors[f"{module}.bias"]

    def norm(x: np.ndarray, module: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * tensors[f"{module}.weight"] + tensors[f"{module}.bias"]

    (group,), table = GROUPS[1:], tensors["embed_tokens.weight"]
    ids, targets, mask = group.ids[0], group.targets[0], group.mask[0]
    x = table[ids] + tensors["embed_positions.weight"][2 : 2 + len(ids)]
    for layer in ("layers.0", "layers.1"):
        h = norm(x, f"{layer}.self_attn_layer_norm")
        q, k, v = (linear(h, f"{layer}.self_attn.{name}_proj").reshape(len(ids), 4, 16).swapaxes(0, 1) for name in "qkv")
        scores = np.where(np.tri(len(ids), dtype=bool), q @ k.swapaxes(1, 2) / 4, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        heads = (p / p.sum(-1, keepdims=True)) @ v
        x = x + linear(heads.swapaxes(0, 1).reshape(len(ids), 64), f"{layer}.self_attn.out_proj")
        x = x + linear(np.maximum(linear(norm(x, f"{layer}.final_layer_norm"), f"{layer}.fc1"), 0), f"{layer}.fc2")
    logits = norm(x, "final_layer_norm") @ table.T
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(ids)), targets]
    assert exactly(folder, adapter, GROUPS[1:], backend=reference)[0] == pytest.approx(losses[mask].sum(), rel=1e-9)
