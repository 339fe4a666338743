"""What a config.json says, family by family, against mlx-lm's and transformers' own reading of it."""

import importlib
import json
import math
import reprlib
from typing import Any

import numpy as np
import pytest
from backends import needs_mlx
from models import LINEAR_ROPE, LLAMA3_ROPE, PROJECTIONS, VARIANTS, YARN_ROPE, tiny_config, variant_config

from mesp_mlx.errors import UserError
from mesp_mlx.model.families import FAMILIES
from mesp_mlx.model.ropes import Rope
from mesp_mlx.model.spec import load_spec, read_config

LLAMAS = ("llama", "mistral", "qwen2", "qwen3")  # whose layer is Llama's
SERVED_TYPES = f"Served: {', '.join(sorted(FAMILIES))}."
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}


def refusal(family: str = "llama", **overrides: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_spec(tiny_config(family) | overrides, "the/config.json")
    message = str(caught.value)
    assert message.startswith("reading the/config.json: ") and "\n" not in message
    return message.removeprefix("reading the/config.json: ")


@pytest.mark.parametrize("family", LLAMAS)
def test_the_config_is_read(family):
    spec = load_spec(tiny_config(family, num_key_value_heads=2, tie_word_embeddings=True))
    assert (spec.model_type, spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (family, 2, 64, 96, 160)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32 if family == "qwen3" else 16)
    assert (spec.norm_eps, spec.max_positions, spec.tied) == (1e-6 if family == "qwen3" else 1e-5, 128, True)
    assert spec.ropes[0] == Rope(spec.head_dim, 10000.0)
    assert spec.windows == (None, None) and not spec.quantization and spec.dtype == "F32"


@pytest.mark.parametrize(
    ("family", "theta", "eps", "positions", "biases"),
    [
        ("llama", 1e4, 1e-6, 2048, []),
        ("mistral", 1e4, 1e-6, 2048, []),
        ("qwen2", 1e6, 1e-6, 32768, ["q", "k", "v"]),
        ("qwen3", 1e6, 1e-6, 32768, []),
    ],
)
def test_what_a_short_config_leaves_out(family, theta, eps, positions, biases):
    spec = load_spec({"model_type": family, **WIDTHS})
    assert (spec.num_kv_heads, spec.head_dim, spec.tied) == (4, 16, True)
    assert (spec.ropes[0].base, spec.norm_eps, spec.max_positions) == (theta, eps, positions)
    assert [name for name in PROJECTIONS if spec.has_bias(name)] == [f"self_attn.{name}_proj" for name in biases]
    assert (spec.qk_norm == "head") == (family == "qwen3")


@pytest.mark.parametrize("family", LLAMAS)
def test_which_biases_a_config_switches_on(family):
    """Qwen's are the family's own: its configs' switches are not heeded by mlx-lm either."""
    spec = load_spec(tiny_config(family, attention_bias=True, mlp_bias=True))
    expected = PROJECTIONS if family in ("llama", "mistral") else PROJECTIONS[:3] if family == "qwen2" else ()
    assert tuple(name for name in PROJECTIONS if spec.has_bias(name)) == expected


def test_a_head_may_have_its_own_width():
    assert load_spec(tiny_config("llama", head_dim=24)).linears(0)["self_attn.q_proj"] == (96, 64)
    assert load_spec(tiny_config("llama", head_dim=24)).linears(0)["self_attn.o_proj"] == (64, 96)
    assert load_spec(tiny_config("llama", head_dim=24)).linears(0)["self_attn.k_proj"] == (48, 64)
    assert load_spec(tiny_config("qwen2", head_dim=24)).head_dim == 16


@needs_mlx
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tensors_are_those_of_mlx_lm_s_model(variant):
    from mlx.utils import tree_flatten

    config = variant_config(variant)
    family = config["model_type"].replace("mistral", "llama")  # which mlx-lm serves by Llama's module
    module = importlib.import_module(f"mlx_lm.models.{family}")
    parameters: Any = tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters())
    assert load_spec(config).tensors() == {name: array.shape for name, array in parameters}


def test_tensors_come_in_the_order_of_use():
    names = [name.removeprefix("model.layers.1.").removesuffix(".weight") for name in load_spec(tiny_config("qwen3")).layer_tensors(1)]
    layer = ["input_layernorm", *PROJECTIONS[:4], "post_attention_layernorm", *PROJECTIONS[4:]]
    assert [name for name in names if name not in ("self_attn.q_norm", "self_attn.k_norm")] == layer and len(names) == 11
    whole = list(load_spec(tiny_config("llama", tie_word_embeddings=False)).tensors())
    assert (whole[0], *whole[-2:]) == ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@pytest.mark.parametrize("key", [*WIDTHS])
def test_a_missing_width(key):
    assert refusal("llama", **{key: None}) == f"it lacks {key!r}. Download the model again."


@pytest.mark.parametrize("key", [*WIDTHS, "num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", ["64", 0, -4, 64.0, 64.5, True, [64], math.nan])
def test_a_width_that_is_no_width(key, value):
    assert refusal("llama", **{key: value}) == f"{key!r} is {value!r}, expected a positive whole number."


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_type": None}, f"model_type None is not served. {SERVED_TYPES}"),
        ({"model_type": "bert"}, f"model_type 'bert' is not served. {SERVED_TYPES}"),
        ({"model_type": ["llama"]}, f"model_type ['llama'] is not served. {SERVED_TYPES}"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes', expected true or false."),
        ({"attention_bias": 1}, "'attention_bias' is 1, expected true or false."),
        ({"mlp_bias": "no"}, "'mlp_bias' is 'no', expected true or false."),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' is 0, expected a positive number."),
        ({"rms_norm_eps": math.nan}, "'rms_norm_eps' is nan, expected a positive number."),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' is '1e-5', expected a positive number."),
        ({"num_key_value_heads": 3}, "4 heads of width 16 over 3 key/value heads do not fit together."),
        ({"num_key_value_heads": 8}, "4 heads of width 16 over 8 key/value heads do not fit together."),
        ({"head_dim": 15}, "4 heads of width 15 over 2 key/value heads do not fit together."),
        ({"rms_norm_eps": math.inf}, "'rms_norm_eps' is inf, expected a positive number."),
        ({"rope_theta": 10**400}, f"'rope_theta' is {reprlib.repr(10**400)}, expected a positive number."),
        ({"num_hidden_layers": 3_000_000}, "'num_hidden_layers' is 3000000, expected at most 10000. Download the model again."),
        ({"hidden_size": 2}, "'head_dim' is 0, expected a positive whole number."),
        ({"hidden_size": 2, "model_type": "qwen2"}, "4 heads of width 0 over 2 key/value heads do not fit together."),
        ({"rope_traditional": 1}, "'rope_traditional' is 1, expected true or false."),
    ],
)
def test_values_that_do_not_fit(overrides, message):
    assert refusal(**overrides) == message


SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "config", "windows"),
    [
        ("llama", {"sliding_window": None}, (None, None, None)),
        ("llama", {"sliding_window": 5}, (None, None, None)),  # mlx-lm: only with layer_types
        ("llama", {"sliding_window": 5, "layer_types": SLIDING}, (5, None, 5)),
        ("llama", {"layer_types": SLIDING}, (None, None, None)),
        ("mistral", {"sliding_window": 5}, (5, 5, 5)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {"sliding_window": 5, "layer_types": SLIDING}, (5, None, 5)),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 1}, (None, None, None)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": False}, (None, None, None)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": False, "layer_types": SLIDING}, (None, None, None)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, (None, 5, 5)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}, (5, 5, 5)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None)),
        ("qwen3", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 5)),
        ("qwen3", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1, "layer_types": SLIDING}, (5, None, 5)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, (None, None, None)),
    ],
)
def test_windows(family, config, windows):
    assert load_spec(tiny_config(family, num_hidden_layers=3) | config).windows == windows


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_switched_on_begin_at_layer_28_unless_said(family):
    """As in transformers' Qwen2Config and Qwen3Config."""
    config = tiny_config(family, num_hidden_layers=30, sliding_window=5, use_sliding_window=True)
    assert load_spec(config).windows == (None,) * 28 + (5, 5)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("mistral", {"sliding_window": 0}, "'sliding_window' is 0, expected a positive whole number."),
        ("mistral", {"sliding_window": "5"}, "'sliding_window' is '5', expected a positive whole number."),
        ("mistral", {"sliding_window": True}, "'sliding_window' is True, expected a positive whole number."),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": "1"}, "'max_window_layers' is '1', expected a number of layers."),
        ("qwen3", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": None}, "'max_window_layers' is None, expected a number of layers."),
    ],
)
def test_windows_that_make_no_sense(family, config, message):
    assert refusal(family, **config) == message


@pytest.mark.parametrize("kinds", [SLIDING, ["full_attention", "chunked_attention"], "full_attention", 3, dict.fromkeys(SLIDING, 1), [["full_attention"]] * 2])
def test_layer_types_that_make_no_sense(kinds):
    message = "'layer_types' should name full_attention or sliding_attention for each of 2 layers."
    assert refusal(sliding_window=5, layer_types=kinds) == message


@pytest.mark.parametrize("kind", ["torch_dtype", "dtype"])
@pytest.mark.parametrize(("name", "stored"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32"), ("torch.bfloat16", "BF16")])
def test_the_dtype(kind, name, stored):
    assert load_spec(tiny_config("llama") | {kind: name}).dtype == stored


def test_quantisation_module_by_module():
    quantization = {"bits": 4, "group_size": 64, "mode": "affine", "lm_head": {"bits": 8, "group_size": 32}, "a": False, "b": {"bits": 3}}
    spec = load_spec(tiny_config("llama", quantization=quantization))
    found = {name: setting and setting[:2] for name in ("lm_head", "a", "b", "c") for setting in (spec.quantized_as(name),)}
    assert found == {"lm_head": (8, 32), "a": None, "b": (3, 64), "c": (4, 64)}
    assert load_spec(tiny_config("llama", quantization={"bits": 6})).quantized_as("c") == (6, 64, "affine")
    assert load_spec(tiny_config("llama")).quantized_as("c") is None


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_quantisation_served(bits, group_size):
    assert load_spec(tiny_config("llama", quantization={"bits": bits, "group_size": group_size})).quantized_as("x") == (bits, group_size, "affine")


GIVE = "Give the unquantised model, or one that mlx_lm.convert quantised."
ONLY_THEIRS = "it has 'quantization_config' but not MLX's 'quantization', which mlx-lm wants too"
SERVED = "served: bits (2, 3, 4, 5, 6, 8), groups (32, 64, 128)."


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization": {"bits": 7, "group_size": 64}}, f"quantization has 7 bits in groups of 64; {SERVED}"),
        ({"quantization": {"bits": 4, "group_size": 16}}, f"quantization has 4 bits in groups of 16; {SERVED}"),
        ({"quantization": {"bits": "4", "group_size": 64}}, f"quantization has 4 bits in groups of 64; {SERVED}"),
        ({"quantization": {"bits": 4.0, "group_size": 64}}, f"quantization has 4.0 bits in groups of 64; {SERVED}"),
        ({"quantization": {"bits": 4, "group_size": 64.0}}, f"quantization has 4 bits in groups of 64.0; {SERVED}"),
        ({"quantization": {"group_size": 64}}, f"quantization has None bits in groups of 64; {SERVED}"),
        ({"quantization": {"bits": 4, "lm_head": {"bits": 1}}}, f"lm_head has 1 bits in groups of 64; {SERVED}"),
        ({"quantization": {"bits": 4, "lm_head": {"group_size": 32}}}, f"lm_head has None bits in groups of 32; {SERVED}"),
        (
            {"quantization": {"bits": 4, "group_size": 32, "mode": "int4"}},
            "quantization uses quantisation mode 'int4'; served: affine, mxfp4, mxfp8, nvfp4. Convert the model with mlx_lm.convert -q.",
        ),
        (
            {"quantization": {"bits": 4, "a.b": {"bits": 4, "mode": "mxfp8"}}},
            "a.b has 4 bits in groups of 32; mxfp8 has 8 bits in groups of 32. Download or convert the model again.",
        ),
        ({"quantization": [4, 64]}, "'quantization' should be an object with bits and group_size, found [4, 64]."),
        ({"quantization_config": {"quant_method": "awq"}}, f"the weights are quantised by 'awq'. {GIVE}"),
        ({"quantization_config": "int4"}, f"{ONLY_THEIRS}. {GIVE}"),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, f"{ONLY_THEIRS}. {GIVE}"),
    ],
)
def test_quantisation_that_is_not_served(config, message):
    assert refusal(**config) == message


def test_mlx_s_own_quantisation_is_written_twice():
    setting = {"bits": 4, "group_size": 64}
    assert load_spec(tiny_config("llama", quantization=setting, quantization_config=setting)).quantized_as("x") == (4, 64, "affine")


def test_positions_scaled_linearly():
    for scaling in (LINEAR_ROPE, {"rope_type": "linear", "factor": 2}):
        assert load_spec(tiny_config("llama", rope_scaling=scaling)).ropes[0] == Rope(16, 10000.0, scale=0.5)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"type": "default"}, {"rope_type": "dynamic", "factor": 2.0}, {}])
def test_positions_that_are_not_scaled(scaling):
    assert load_spec(tiny_config("llama", rope_scaling=scaling, rope_traditional=True)).ropes[0] == Rope(16, 10000.0, traditional=True)


def test_newer_configs_nest_the_positions():
    for scaling in ({"rope_type": "default"}, LLAMA3_ROPE, YARN_ROPE, {"rope_type": "linear", "factor": 2.0}):
        old = load_spec(tiny_config("llama", rope_theta=5e5, rope_scaling=scaling))
        new = load_spec(tiny_config("llama", rope_theta=None, rope_parameters={**scaling, "rope_theta": 5e5}))
        assert new.ropes == old.ropes and new.ropes[0] == old.ropes[1] and new.ropes[0].base == 5e5
    both = load_spec(tiny_config("llama", rope_theta=1e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert both.ropes[0] == Rope(16, 1e5)


YARN = [
    YARN_ROPE,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192, "beta_fast": 8, "beta_slow": 2, "mscale": 0.7},
    {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.8},
    {"rope_type": "yarn", "factor": 1.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 6, "beta_fast": 1, "beta_slow": 1},  # the ramp has no width
]
LLAMA3 = [
    LLAMA3_ROPE,
    {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
    {"type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 3},
]


@needs_mlx
@pytest.mark.parametrize("dims", [16, 64, 128])
@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("scaling", [*LLAMA3, *YARN], ids=str)
def test_wavelengths_are_mlx_lm_s(scaling, base, dims):
    from mlx_lm.models.rope_utils import initialize_rope

    theirs = initialize_rope(dims, base, False, dict(scaling), 4096)
    rope = load_spec(tiny_config("llama", head_dim=dims, rope_theta=base, rope_scaling=scaling, max_position_embeddings=4096)).ropes[0]
    np.testing.assert_allclose(np.array(rope.wavelengths), np.array(theirs._freqs), rtol=2e-6)
    assert rope.magnitude == pytest.approx(getattr(theirs, "mscale", 1.0), rel=1e-12)


@needs_mlx
def test_a_ramp_of_wavelengths_is_really_tried():
    """Of each kind, pairs that are kept, stretched in part, and stretched whole."""
    for scaling in (LLAMA3[0], LLAMA3[1], YARN[0], YARN[1]):
        rope = load_spec(tiny_config("llama", head_dim=64, rope_scaling=scaling)).ropes[0]
        ratios = np.array(rope.wavelengths) / 10000.0 ** (np.arange(0, 64, 2) / 64)
        assert ratios[0] == pytest.approx(1) and ratios[-1] == pytest.approx(scaling["factor"])
        assert ((ratios > 1.01) & (ratios < scaling["factor"] - 0.01)).any()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "RoPE scaling of type 'longrope' is not served. Served: default, dynamic,"),
        ({"rope_parameters": {"rope_type": "su"}}, "RoPE scaling of type 'su' is not served. Served: default, dynamic, linear, llama3, yarn."),
        ({"rope_scaling": {"rope_type": "linear"}}, "the RoPE scaling {'rope_type': 'linear'} of type 'linear' can't be used (KeyError('factor'))."),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "(ZeroDivisionError("),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "(ValueError('it gives no positive numbers'))."),
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": math.inf}}, "(ValueError('it gives no positive numbers'))."),
        ({"rope_scaling": {**YARN_ROPE, "factor": math.nan}}, "(ValueError('it gives no positive numbers'))."),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "many"}}, "(ValueError("),
        ({"rope_scaling": {"rope_type": "llama3", "factor": [8]}}, "(TypeError("),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": "1"}}, "(TypeError("),
        ({"rope_scaling": {**YARN_ROPE, "beta_fast": 0}}, "(ZeroDivisionError("),
        ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear', expected an object."),
        ({"rope_parameters": [1]}, "'rope_parameters' is [1], expected an object."),
        ({"rope_theta": "10000"}, "'rope_theta' is '10000', expected a positive number."),
        ({"rope_theta": -1.0}, "'rope_theta' is -1.0, expected a positive number."),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": [1e4]}}, "'rope_theta' is [10000.0], expected a positive number."),
    ],
)
def test_positions_that_are_not_served(config, message):
    assert message in refusal(**config)


def test_reading_a_folder_s_config(tmp_path):
    def said() -> str:
        with pytest.raises(UserError) as caught:
            read_config(tmp_path)
        return str(caught.value)

    assert said() == f"reading the model in {tmp_path}: it has no config.json. Give a folder in MLX's or Hugging Face's layout."
    file = tmp_path / "config.json"
    for content in (b"{", b"", b"\xff\xfe", b"[]"):
        message = "expected a JSON object, found list." if content == b"[]" else "it is not JSON"
        file.write_bytes(content)
        assert said().startswith(f"reading {file}: {message}")
    file.write_text(json.dumps({"model_type": "llama", "name": "ü"}), encoding="utf-8")
    assert read_config(tmp_path) == {"model_type": "llama", "name": "ü"}


def test_a_config_that_can_not_be_read(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError) as caught:
        read_config(tmp_path)
    assert str(caught.value).startswith(f"reading {tmp_path / 'config.json'}: ")
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="it is not JSON"):
        read_config(tmp_path)


def test_a_factor_beyond_float():
    assert "can't be used" in refusal(rope_scaling={"type": "linear", "factor": 10**400})
