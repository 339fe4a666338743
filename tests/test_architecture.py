"""Which way a model goes, structured or generic; and that what any checkpoint needs before mlx-lm's modules take it is done once, exactly as mlx-lm does it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from backends import needs_mlx
from engines import SCALE, Gathered, autodiff_of_mlx_lm, random_adapter, random_group, worst_error
from models import make_model, tiny_config

from mesp_mlx import adapter as adapters
from mesp_mlx import reference
from mesp_mlx.engine.backprop import loss_and_gradients
from mesp_mlx.errors import UserError
from mesp_mlx.model import architecture, source
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import ModelSpec, read_config
from mesp_mlx.model.stages import Batch
from mesp_mlx.stream.safetensors import Writer, read_array, read_folder
from mesp_mlx.stream.store import Store

EXPERTS = "deepseek_v2"  # a type without a structured family, whose sanitize stacks the experts of a checkpoint


def config_of(model_type, **overrides):
    from mesp_mlx.model.samples import small_config

    return small_config(model_type) | overrides


def random_folder(folder, model_type, **overrides):
    from samples_truth import make

    return make(folder, model_type, config=config_of(model_type, **overrides))


def rewritten(folder, change, config=None):
    """The folder with other tensors: change(name, array) gives {name: array}, none to drop it. Weights are float32."""
    tensors = {}
    for name, entry in read_folder(folder).items():
        tensors |= change(name, read_array(entry))
    with Writer(folder / "model.safetensors", {name: ("F32", array.shape) for name, array in tensors.items()}) as writer:
        for name, array in tensors.items():
            writer.write(name, np.ascontiguousarray(array))
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_published(name, array):
    """Experts one by one, as deepseek's checkpoints have them."""
    if ".switch_mlp." in name:
        before, after = name.split("switch_mlp")
        return {f"{before}experts.{expert}{after}": array[expert] for expert in range(len(array))}
    return {name: array}


@pytest.fixture
def resolve(tmp_path):
    """source.resolve with the cache in tmp_path; the lines it notes are in resolve.notes."""

    def call(model, **settings):
        return source.resolve(str(model), tmp_path / "cache", note=call.notes.append, **settings)

    call.notes = []
    return call


def refusal(call, *arguments, **named):
    with pytest.raises(UserError) as refused:
        call(*arguments, **named)
    return str(refused.value)


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_a_family_is_structured_on_both_backends(backend):
    assert isinstance(architecture.open_spec(tiny_config("qwen2"), backend=backend), ModelSpec)


@needs_mlx
@pytest.mark.parametrize("model_type", [EXPERTS, "mamba2", "nemotron_h"])
def test_any_other_architecture_of_mlx_lm_is_generic(model_type):
    spec = architecture.open_spec(config_of(model_type))
    assert not isinstance(spec, ModelSpec) and spec.model_type == model_type and spec.num_layers >= 4 and spec.vocab_size == 160


def with_head(folder, config):
    """The folder with a head that its config may be silent about."""
    head = np.random.default_rng(8).normal(scale=0.1, size=(160, 64)).astype(np.float32)
    spec = architecture.open_spec(config, backend="numpy")
    assert isinstance(spec, ModelSpec)
    first = spec.names.norm + ".weight"
    return rewritten(folder, lambda name, array: {name: array, **({f"{spec.names.head}.weight": head} if name == first else {})}, config)


@needs_mlx
@pytest.mark.parametrize("family", ["gemma3_text", "gemma3"])
@pytest.mark.parametrize("said", [None, True])
def test_gemma_3_has_the_head_that_its_tensors_have(tmp_path, family, said):
    """As in mlx-lm, whatever the config says."""
    config = {**tiny_config(family), "tie_word_embeddings": said}
    folder = with_head(make_model(tmp_path / "model", config, bits=None), config)
    spec, entries = architecture.open_folder(folder, "numpy")
    assert isinstance(spec, ModelSpec) and not spec.tied and entries.keys() == spec.tensors().keys()
    adapter, groups = random_adapter(folder), [random_group(160, [9, 4])]
    want, gradients = autodiff_of_mlx_lm(folder, adapter, groups)
    model, sink = build(spec, reference, SCALE), Gathered()
    with Store(entries, spec, reference) as store:
        loss = loss_and_gradients(model, store, adapter, [Batch(group) for group in groups], sink)
    assert loss == pytest.approx(want, rel=1e-5) and worst_error(sink.gradients, gradients) <= 1e-4


@needs_mlx
def test_a_generic_model_without_a_head_of_its_own_has_the_one_that_mlx_lm_gives_it(tmp_path):
    folder = rewritten(random_folder(tmp_path / "model", "recurrent_gemma"), lambda name, array: {} if name == "lm_head.weight" else {name: array})
    spec, entries = architecture.open_folder(folder)
    assert "lm_head.weight" not in spec.tensors() and spec.tensors().keys() == entries.keys() and spec.tied
    modules = adapters.choose_modules(spec)
    from mesp_mlx import ops

    built = architecture.build(spec, entries, ops, SCALE, modules, 2)
    adapter = {name: ops.arrays.asarray(np.full(shape, 0.01, np.float32)) for name, shape in adapters.shapes(spec, modules, 2).items()}
    with Store(entries, spec, ops) as store:
        assert np.isfinite(loss_and_gradients(built, store, adapter, [Batch(random_group(160, [9]))], Gathered()))


def test_a_config_silent_about_its_head_is_settled_by_the_tensors(tmp_path):
    config = tiny_config("llama", tie_word_embeddings=None)
    folder = make_model(tmp_path / "model", config, bits=None)
    assert architecture.open_folder(folder, "numpy")[0].tied
    assert not architecture.open_folder(with_head(folder, config), "numpy")[0].tied
    for said in (True, False):
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": said}))
        assert architecture.open_folder(folder, "numpy")[0].tied == said


@needs_mlx
def test_a_family_with_a_feature_that_is_not_written_down_is_generic():
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    config = tiny_config("llama", rope_scaling=scaling)
    assert "RoPE" in refusal(architecture.open_spec, config, backend="numpy")
    spec = architecture.open_spec(config)
    assert not isinstance(spec, ModelSpec) and spec.model_type == "llama"


@needs_mlx
def test_a_family_s_own_reason_is_said_where_mlx_lm_can_not_help():
    said = refusal(architecture.open_spec, tiny_config("opt", do_layer_norm_before=False))
    assert "'do_layer_norm_before' is False, served: True. Nor " in said and "'opt'" in said and "\n" not in said


def test_numpy_refuses_what_only_mlx_lm_knows_and_names_both_ways_out():
    said = refusal(architecture.open_spec, {"model_type": "mamba2"}, "model/config.json", "numpy")
    said_both = "--backend mlx" in said and "llama" in said
    assert "model/config.json" in said and "'mamba2'" in said and said_both and said.count("qwen3_moe") == 1 and "\n" not in said


def test_without_mlx_lm_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(architecture, "has_mlx_lm", lambda: False)
    assert "pip install 'mlx-lm" in refusal(architecture.open_spec, {"model_type": "mamba2"})


@needs_mlx
def test_a_type_that_nobody_knows_is_named():
    assert "'perceiver_ar'" in refusal(architecture.open_spec, {"model_type": "perceiver_ar"})


def test_a_config_that_is_wrong_is_not_handed_on():
    """A family's own message is the clear one."""
    assert "hidden_size" in refusal(architecture.open_spec, tiny_config("llama", hidden_size=-1))


@needs_mlx
@pytest.mark.parametrize("quantize", ["4", "none"])
def test_a_published_checkpoint_is_converted_once_to_what_mlx_lm_has_in_memory(tmp_path, resolve, quantize):
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model, quantize_model

    folder = rewritten(random_folder(tmp_path / "published", EXPERTS), as_published)
    first = resolve(folder, quantize=quantize)
    assert first.converted and first.folder.parent == tmp_path / "cache" / "models" and len(resolve.notes) == 1
    assert resolve(folder, quantize=quantize) == first and len(resolve.notes) == 1

    model, config = load_model(folder)
    if quantize == "4":
        model, config = quantize_model(model, config, 64, 4)
    expected = {name: np.array(array) for name, array in tree_flatten(model.parameters())}
    spec, entries = architecture.open_folder(first.folder)
    assert entries.keys() == expected.keys() and any(".switch_mlp." in name for name in entries)
    for name, entry in entries.items():
        assert np.array_equal(read_array(entry), expected[name]), name
    packed = {name.removesuffix(".weight") for name, shape in spec.tensors().items() if len(shape) > 1 and spec.quantized_as(name.removesuffix(".weight"))}
    assert packed == {name.removesuffix(".scales") for name in entries if name.endswith(".scales")} and bool(packed) == (quantize == "4")
    again = load_model(first.folder)[0]
    assert all(np.array_equal(array, expected[name]) for name, array in tree_flatten(again.parameters()))


@needs_mlx
def test_converting_holds_a_tensor_at_a_time(tmp_path):
    import mlx.core as mx

    from mesp_mlx.model import generic_convert

    folder = rewritten(random_folder(tmp_path / "published", EXPERTS, moe_intermediate_size=512, vocab_size=512), as_published)
    largest = max(entry.size_bytes for entry in read_folder(random_folder(tmp_path / "flat", EXPERTS, moe_intermediate_size=512, vocab_size=512)).values())
    total = sum(entry.size_bytes for entry in read_folder(folder).values())
    (tmp_path / "made").mkdir()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    generic_convert.convert(folder, tmp_path / "made", quantize=True)
    assert total > 6 * largest and mx.get_peak_memory() - before < 3 * largest


@needs_mlx
def test_mlxs_own_folder_is_used_as_it_is(tmp_path, resolve):
    from samples_truth import make

    folder = make(tmp_path / "mlx", EXPERTS, bits=4)
    assert resolve(folder) == source.ModelFolder(folder, "mlx", False)
    spec, entries = architecture.open_folder(folder)
    gate = "model.layers.3.mlp.gate.weight"
    assert gate in entries and f"{gate.removesuffix('weight')}scales" not in entries and spec.quantized_as(gate.removesuffix(".weight")) is None
    assert spec.quantized_as("model.layers.3.mlp.switch_mlp.up_proj")[:2] == (4, 32)
    alone = architecture.open_spec(read_config(folder))  # as a plan has it, without a look at the tensors
    assert all(alone.quantized_as(name.removesuffix(".weight")) == spec.quantized_as(name.removesuffix(".weight")) for name in spec.tensors())


@needs_mlx
def test_values_that_mlx_lm_changes_under_the_same_name_are_changed_once(tmp_path, resolve):
    """Qwen3-Next's norms stand for 1 + w in a checkpoint; its convolutions tell by their shape whether that was done."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    def unshifted(name, array):
        if name.endswith("conv1d.weight"):
            return {name: np.moveaxis(array, -1, 1)}
        shifted = name.endswith(("_layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight"))
        if ".switch_mlp." in name:
            return {name.replace("switch_mlp", f"experts.{expert}"): array[expert] for expert in range(len(array))}
        return {name: array - 1 if shifted else array}

    folder = random_folder(tmp_path / "mlx", "qwen3_next")
    truth = {name: np.array(array) for name, array in tree_flatten(load_model(folder)[0].parameters())}
    assert not resolve(folder, quantize="none").converted
    found = resolve(rewritten(shutil.copytree(folder, tmp_path / "published"), unshifted), quantize="none")
    assert found.converted
    for name, entry in read_folder(found.folder).items():
        assert np.allclose(read_array(entry), truth[name], atol=1e-6), name


@needs_mlx
def test_numpy_refuses_before_anything_is_converted(tmp_path, resolve):
    folder = rewritten(random_folder(tmp_path / "published", EXPERTS), as_published)
    assert "--backend mlx" in refusal(resolve, folder, backend="numpy") and not list((tmp_path / "cache" / "models").glob("*"))


BROKEN = {
    "an expert is missing": (lambda name, array: {} if "layers.3.mlp.experts.2.up_proj" in name else {name: array}, "layers.3.mlp.experts.2.up_proj"),
    "a weight is missing": (lambda name, array: {} if name == "model.layers.1.self_attn.o_proj.weight" else {name: array}, "self_attn.o_proj"),
    "a shape is wrong": (lambda name, array: {name: array[:-1] if name == "model.norm.weight" else array}, "63"),
    "a tensor has no place": (lambda name, array: {name: array, "model.extra.weight": np.ones(3, np.float32)}, "model.extra.weight"),
}


@needs_mlx
@pytest.mark.parametrize("quantize", ["4", "none"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_gives_one_clear_message_and_leaves_nothing(tmp_path, resolve, case, quantize):
    change, named = BROKEN[case]
    folder = rewritten(rewritten(random_folder(tmp_path / "published", EXPERTS), as_published), change)
    said = refusal(resolve, folder, quantize=quantize)
    assert named in said and str(folder) in said and "Traceback" not in said and len(said.splitlines()) < 14
    assert not [made for made in (tmp_path / "cache" / "models").glob("*") if made.is_dir()]


@needs_mlx
@pytest.mark.parametrize("case", ["missing", "shape"])
def test_a_folder_in_mlxs_layout_is_checked_against_the_modules(tmp_path, case):
    """Also one that mlx-lm was never asked about: after the cache was made, a file may have been lost."""
    name = "model.layers.2.mlp.switch_mlp.up_proj.weight"
    change = {"missing": lambda n, a: {} if n == name else {n: a}, "shape": lambda n, a: {n: a[:, :-1] if n == name else a}}[case]
    folder = rewritten(random_folder(tmp_path / "model", EXPERTS), change)
    assert name in refusal(architecture.open_folder, folder)


@needs_mlx
def test_a_familys_checkpoint_does_without_mlx_lm(tmp_path, resolve, monkeypatch):
    """It is converted by the family's own row; one that is broken has that row's message."""
    monkeypatch.setattr(architecture, "has_mlx_lm", lambda: False)
    folder = make_model(tmp_path / "tiny", tiny_config("llama"), bits=None)
    said = refusal(resolve, rewritten(folder, lambda name, array: {name.removeprefix("model."): array}))
    assert "model.embed_tokens.weight" in said


@needs_mlx
def test_embeddings_and_heads_are_adapted_where_asked_and_not_else():
    spec = architecture.open_spec(config_of(EXPERTS))
    outside = {"model.embed_tokens", "lm_head"}
    assert outside == set(spec.outside_keys()) and not outside & set(adapters.choose_modules(spec))
    chosen = adapters.choose_modules(spec, 1, ["model.embed_tokens", "self_attn.o_proj"])
    assert chosen == ["model.layers.3.self_attn.o_proj", "model.embed_tokens"]
    assert adapters.shapes(spec, chosen[1:], 3) == {"model.embed_tokens.lora_a": (160, 3), "model.embed_tokens.lora_b": (3, 64)}
    said = refusal(adapters.choose_modules, spec, -1, ["model.nothing"])
    assert "'model.nothing'" in said and "model.embed_tokens" in said and "self_attn.o_proj" in said


@needs_mlx
def test_the_config_of_a_converted_folder_is_json_that_both_read(tmp_path, resolve):
    from mlx_lm.utils import load_model

    folder = rewritten(random_folder(tmp_path / "published", EXPERTS, initializer_range=0.02), as_published)
    made = resolve(folder).folder
    config = read_config(made)
    assert config["quantization"]["bits"] == 4 and config["quantization"]["model.layers.3.mlp.switch_mlp.down_proj"] is False
    assert config["initializer_range"] == 0.02
    assert Path(made / "model.safetensors").is_file() and load_model(made, lazy=True)
