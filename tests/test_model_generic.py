"""Any architecture of mlx-lm, streamed layer by layer, gives the gradients of MLX's autodiff of the whole model: on its own modules and the same weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import mx, ops
from engines import SCALE, Gathered, RecordingStore, random_group
from models import make_model, tiny_config
from oracles import error

from mesp_mlx.engine import methods
from mesp_mlx.engine.backprop import loss_and_gradients
from mesp_mlx.engine.generate import greedy_reply
from mesp_mlx.errors import UserError
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.safetensors import Entry, read_folder
from mesp_mlx.stream.store import Store

pytest.importorskip("mlx_lm")

from mesp_mlx.model import generic, generic_truth, samples  # noqa: E402

RANK, TOLERANCE = 3, 1e-4
# What each of them is here for.
TYPES = {
    "llama": "the plain case, head tied",
    "gemma2": "logits capped",
    "granite": "logits divided",
    "qwen3_moe": "experts",
    "qwen3_next": "gated delta, attention and experts",
    "mamba2": "a state space, no attention",
    "gpt2": "learned positions, LayerNorm",
    "rwkv7": "a second array from layer to layer",
    "gemma3n": "per-layer inputs, arrays changed in place",
    "gemma4_text": "per-layer inputs, keys and values shared",
    "afm7": "keys and values shared through an object, layers in two lists",
    "kimi_k3": "an object with arrays from layer to layer",
    "olmo_hybrid": "layers told by their class",
    "nanbeige": "each layer called twice",
    "iquestloopcoder": "layers never called as a whole",
    "phixtral": "a head inside another module",
    "phi3small": "logits changed one by one: no tiled head",
    "minicpm": "a head written out as a product with the embedding's weight",
    "talkie": "a head that is an array",
}


def written(folder: Path, model_type: str, **overrides: Any) -> Path:
    return generic_truth.write_random(folder, samples.small_config(model_type) | overrides)


def spec_of(folder: Path) -> generic.GenericSpec:
    return generic.load_spec(json.loads((folder / "config.json").read_text()), str(folder / "config.json"))


def adapter_for(spec: generic.GenericSpec, modules: list[str]) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {f"{module}.lora_{half}": shape for module in modules for half, shape in zip("ab", spec.pair_shapes(module, RANK), strict=True)}
    return {name: mx.array((0.1 * rng.normal(size=shape)).astype(np.float32)) for name, shape in shapes.items()}


def two_groups(spec: generic.GenericSpec) -> list[Batch]:
    return [Batch(random_group(spec.vocab_size, (11, 7))), Batch(random_group(spec.vocab_size, (9,), seed=5, first_row=2))]


def streamed(folder: Path, modules: list[str] | None = None, batches: list[Batch] | None = None, store: Any = Store, **settings: Any) -> Any:
    """The model, the summed loss, its gradients, and the adapter, of a model in a folder."""
    spec, entries = spec_of(folder), read_folder(folder)
    modules = modules or spec.choose(spec.num_layers, spec.adaptable_keys())
    model, adapter, sink = generic.build(spec, entries, ops, SCALE, modules, RANK, **settings), adapter_for(spec, modules), Gathered()
    with store(entries, spec, ops) as weights:
        loss = loss_and_gradients(model, weights, adapter, batches or two_groups(spec), sink)
    return model, loss, sink.gradients, adapter


def whole(folder: Path, adapter: dict[str, Any], batches: list[Batch] | None = None) -> tuple[float, dict[str, Any]]:
    """The loss and gradients that mlx-lm's own modules have, by autodiff of the whole."""
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    batches = batches or two_groups(spec_of(folder))
    model: Any = load_model(folder, trust_remote_code=True)[0]
    modules = {name.rpartition(".")[0] for name in adapter}
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": modules})
    model.train()

    def loss_of(adapter: dict[str, Any]) -> Any:
        model.update(tree_unflatten(list(adapter.items())))
        groups = [batch.group for batch in batches]
        return sum(ops.plain.cross_entropy(model(mx.array(group.ids)), mx.array(group.targets), mx.array(group.mask)) for group in groups)

    loss, gradients = mx.value_and_grad(loss_of)(adapter)
    return loss.item(), gradients


def assert_exact(loss: float, gradients: dict[str, Any], truth: tuple[float, dict[str, Any]]) -> None:
    assert error(loss, truth[0]) <= TOLERANCE
    assert gradients.keys() == truth[1].keys()
    for name, gradient in gradients.items():
        assert error(gradient, truth[1][name]) <= TOLERANCE, name


@pytest.mark.parametrize("model_type", TYPES)
def test_gradients_are_those_of_autodiff_of_the_whole(model_type, tmp_path):
    folder = written(tmp_path, model_type)
    model, loss, gradients, adapter = streamed(folder)
    assert_exact(loss, gradients, whole(folder, adapter))
    assert (model.head.name == "head") and (hasattr(model.head, "table") != (model_type in ("phi3small", "talkie"))), "tiled but where it can't be"


def test_shapes_of_passes_that_are_over_are_forgotten(tmp_path):
    """Each length is a shape of its own: of a reply's, and of a long run's, nothing may pile up."""
    folder = written(tmp_path, "llama")
    model, *_, adapter = streamed(folder)
    patterns, spec = model.embedding.engine.patterns, spec_of(folder)
    assert {shape for shape, _ in patterns} == {(2, 11), (1, 9)}
    with Store(read_folder(folder), spec, ops) as store:
        reply = greedy_reply(model, store, adapter, [5, 6, 7], (), 4)
    assert len(reply) == 4 and {shape for shape, _ in patterns} == {(1, 6)}


def test_two_updates_are_those_of_whole_autodiff(tmp_path, settings):
    folder = written(tmp_path, "qwen3_next")
    spec, entries = spec_of(folder), read_folder(folder)
    modules = spec.choose(spec.num_layers, spec.adaptable_keys())
    model, batches = generic.build(spec, entries, ops, SCALE, modules, RANK), two_groups(spec)
    ours, theirs = adapter_for(spec, modules), adapter_for(spec, modules)
    tokens = sum(int(batch.group.mask.sum()) for batch in batches)
    with Store(entries, spec, ops) as store:
        for update in range(2):
            truth, gradients = whole(folder, theirs, batches)
            theirs = {name: value - 0.1 / tokens * gradients[name] for name, value in theirs.items()}

            def apply(name: str, gradient: Any) -> None:
                ours[name] = ours[name] - 0.1 * gradient

            loss, finish = methods.update(settings, update, model, store, ours, batches, apply)
            finish()
            assert error(loss, truth) <= TOLERANCE
    assert max(error(ours[name], theirs[name]) for name in ours) <= TOLERANCE


@pytest.fixture
def settings():
    from mesp_mlx.config import Settings

    return Settings(model="any", data="any", grad_clip=0.0)


def test_weights_of_two_stages_at_most_are_there_at_once(tmp_path):
    """Read ahead is one stage; between two stages no layer holds any of its own."""
    folder = written(tmp_path, "qwen3_moe", num_hidden_layers=6)
    spec, entries, alive, most = spec_of(folder), read_folder(folder), set(), []
    modules = spec.choose(6, spec.adaptable_keys())
    model = generic.build(spec, entries, ops, SCALE, modules, RANK)
    slots = {name: slot for name, slot in model.embedding.engine.slots.items() if name.startswith("model.layers.")}

    def held() -> list[str]:
        return [name for name, (module, key) in slots.items() if module[key] is not None]

    class Watched(RecordingStore):
        def load(self, stage: Any) -> Any:
            alive.add(stage.name)
            most.append(len(alive))
            return super().load(stage)

        def free(self, stage: Any, weights: Any) -> None:
            super().free(stage, weights)
            alive.discard(stage.name)
            assert not held(), stage.name

    assert not held() and slots.keys() == {name for name in entries if name.startswith("model.layers.")}
    with Watched(entries, spec, ops) as store:
        loss_and_gradients(model, store, adapter_for(spec, modules), two_groups(spec), Gathered())
    assert max(most) == 2 and len([event for event in store.events if event.startswith("load model")]) == 6 * 2


def test_building_computes_no_weight():
    """A model of 70 billion weights is built, walked and differentiated without one of them."""
    config = tiny_config(
        "llama", hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=80, vocab_size=128256
    )
    spec = generic.load_spec(config)
    entries = {name: Entry(name, Path("none"), "F32", shape, 0, 4 * int(np.prod(shape))) for name, shape in spec.tensors().items()}
    before = mx.get_peak_memory()
    model = generic.build(spec, entries, ops, SCALE, spec.choose(80, ("self_attn.q_proj",)), RANK)
    assert len(model.segments) == 80 and mx.get_peak_memory() - before < 20e6


@pytest.mark.parametrize(("key", "tied"), [("model.embed_tokens", False), ("model.embed_tokens", True), ("lm_head", False)])
def test_embeddings_and_heads_are_adapted_where_asked(key, tied, tmp_path):
    folder = written(tmp_path, "qwen3", tie_word_embeddings=tied)
    spec = spec_of(folder)
    modules = spec.choose(2, ["self_attn.q_proj", key])
    assert modules[-1] == key and len(modules) == 3
    _, loss, gradients, adapter = streamed(folder, modules)
    assert_exact(loss, gradients, whole(folder, adapter))


@pytest.mark.parametrize("layers", [1, 2])
def test_only_the_last_layers(layers, tmp_path):
    """What lies below has no gradient, nor do shared keys and values that come from there."""
    folder = written(tmp_path, "gemma4_text")
    spec = spec_of(folder)
    _, loss, gradients, adapter = streamed(folder, spec.choose(layers, ["self_attn.q_proj", "mlp.up_proj"]))
    assert_exact(loss, gradients, whole(folder, adapter))


@pytest.mark.parametrize(("bits", "quantization"), [(4, None), (8, {"model.layers.1.mlp.down_proj": {"bits": 2, "group_size": 32}, "lm_head": False})])
def test_packed_weights(bits, quantization, tmp_path):
    folder = make_model(tmp_path, tiny_config("qwen3"), bits=bits, quantization=quantization)
    _, loss, gradients, adapter = streamed(folder)
    assert_exact(loss, gradients, whole(folder, adapter))


def test_dropout_drops_what_structured_stages_drop(tmp_path):
    from engines import one_pass

    folder, drop = make_model(tmp_path, tiny_config("qwen3"), bits=None), Dropout(3, 4, 0.4)
    batches = [Batch(batch.group, drop) for batch in two_groups(spec_of(folder))]
    _, loss, gradients, adapter = streamed(folder, batches=batches)
    truth = one_pass(folder, ops, {name: np.array(value) for name, value in adapter.items()}, [batch.group for batch in batches], drop)
    assert_exact(loss, gradients, (truth[0], truth[1]))
    assert error(loss, streamed(folder)[1]) > 1e-3, "it drops nothing"


def test_dropout_of_experts_agrees_forward_and_backward(tmp_path):
    """The loss moves along the gradient as far as it says."""
    folder = written(tmp_path, "qwen3_moe")
    batches = [Batch(batch.group, Dropout(3, 4, 0.4)) for batch in two_groups(spec_of(folder))]
    spec, entries = spec_of(folder), read_folder(folder)
    modules = spec.choose(spec.num_layers, spec.adaptable_keys())
    model, adapter, sink = generic.build(spec, entries, ops, SCALE, modules, RANK), adapter_for(spec, modules), Gathered()
    with Store(entries, spec, ops) as store:
        loss_and_gradients(model, store, adapter, batches, sink)
        slope = sum(float(mx.sum(value * value)) for value in sink.gradients.values())
        step = 1e-2 / slope**0.5
        sides = [
            loss_and_gradients(
                model, store, {name: value + sign * step / slope**0.5 * sink.gradients[name] for name, value in adapter.items()}, batches, Gathered()
            )
            for sign in (1, -1)
        ]
    assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(slope**0.5, rel=1e-2)


@pytest.mark.parametrize("model_type", ["gemma2", "phi3small"])
def test_the_likeliest_token(model_type, tmp_path):
    from mlx_lm.utils import load_model

    folder = written(tmp_path, model_type)
    spec, entries = spec_of(folder), read_folder(folder)
    modules = spec.choose(1, spec.adaptable_keys())
    adapter = {name: mx.zeros(value.shape) for name, value in adapter_for(spec, modules).items()}
    with Store(entries, spec, ops) as store:
        reply = greedy_reply(generic.build(spec, entries, ops, SCALE, modules, RANK), store, adapter, [5, 6, 7], (), 3)
    theirs, ids = load_model(folder)[0], [5, 6, 7]
    for _ in range(3):
        ids.append(int(np.array(mx.argmax(theirs(mx.array([ids]))[0, -1]))))
    assert reply == ids[3:]


def test_what_can_not_be_trained_is_refused(tmp_path):
    folder = written(tmp_path / "a", "deepseek_v41")
    with pytest.raises(UserError, match=r"has no gradient: .*Cannot calculate VJP"):
        streamed(folder)
    with pytest.raises(UserError, match="mlx-lm can't build a model of model_type 'nobody'"):
        generic.load_spec({"model_type": "nobody"})
    folder = written(tmp_path / "b", "nanbeige")
    with pytest.raises(UserError, match="used several times in a forward"):
        streamed(folder, strategy=Strategy(gradients="applied"))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    folder = written(tmp_path, "llama")
    spec, entries = spec_of(folder), read_folder(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    without = {key: entry for key, entry in entries.items() if key != name}
    turned = Entry(name, entries[name].file, "F32", entries[name].shape[::-1], 0, entries[name].size_bytes)
    for given, said in ((without, "missing"), (without | {name: turned}, "do not fit"), (entries | {"more.weight": turned}, "no part")):
        with pytest.raises(UserError, match=rf"1 tensors .*{said}"):
            generic.build(spec, given, ops, SCALE, ["model.layers.0.mlp.up_proj"], RANK)


def test_what_is_adapted_is_in_mlx_lms_order(tmp_path):
    from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    folder = written(tmp_path, "qwen3_moe")
    spec, order = spec_of(folder), []
    assert set(spec.adaptable_keys()) > {"self_attn.q_proj", "mlp.switch_mlp.up_proj", "mlp.gate"}
    model: Any = load_model(folder)[0]
    drawn = mx.random.uniform
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.random, "uniform", lambda **given: order.append(given["shape"]) or drawn(**given))
        linear_to_lora_layers(model, 1, {"rank": RANK, "scale": 1.0, "dropout": 0.0, "keys": list(spec.adaptable_keys())})
    chosen = spec.choose(1, spec.adaptable_keys())
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear | LoRASwitchLinear)}
    assert set(chosen) == set(adapted) and all(spec.layer_of(name) == 3 for name in chosen)
    shapes = [spec.pair_shapes(name, RANK)[0] for name in chosen]
    assert [shape for shape in order if RANK in shape] == shapes
    assert all((adapted[name].lora_a.shape, adapted[name].lora_b.shape) == spec.pair_shapes(name, RANK) for name in chosen)
