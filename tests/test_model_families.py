"""What the rows of the table of families make of a config: layer by layer, where configs say nothing, and what they do not describe."""

import math
from dataclasses import replace
from typing import Any

import pytest
from models import LONG_ROPE, YARN_ROPE, tiny_config

from mesp_mlx.errors import Unserved, UserError
from mesp_mlx.model.ropes import Rope
from mesp_mlx.model.spec import load_spec

PLAIN = Rope(16, 10000.0)


def spec_of(family: str, **overrides: Any) -> Any:
    return load_spec(tiny_config(family, **overrides), "the/config.json")


def refusal(family: str, kind: type[UserError] = UserError, **overrides: Any) -> str:
    with pytest.raises(UserError) as caught:
        spec_of(family, **overrides)
    assert type(caught.value) is kind
    return str(caught.value).removeprefix("reading the/config.json: ")


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("gemma", {"sliding_window": 5}, (None,) * 4),
        ("gemma2", {"sliding_window": 5}, (5, None, 5, None)),
        ("gemma2", {"sliding_window": None}, (None,) * 4),
        ("gemma3_text", {"sliding_window_pattern": 3}, (5, 5, None, 5)),
        ("gemma3_text", {"sliding_window_pattern": None, "layer_types": ["full_attention"] + ["sliding_attention"] * 3}, (None, 5, 5, 5)),
        ("phi3", {"sliding_window": 5}, (5,) * 4),
        ("olmo3", {"layer_types": None}, (5, 5, 5, None)),
        ("cohere2", {"sliding_window_pattern": 4}, (5, 5, 5, None)),
        ("cohere", {"sliding_window": 5}, (None,) * 4),
        ("starcoder2", {"sliding_window": 5}, (5,) * 4),
        ("smollm3", {"sliding_window": 5, "use_sliding_window": False, "no_rope_layers": None}, (None,) * 4),
    ],
)
def test_windows(family, overrides, windows):
    assert spec_of(family, num_hidden_layers=4, **overrides).windows == windows


def test_each_layer_s_positions():
    assert spec_of("smollm3", num_hidden_layers=5, no_rope_layers=None).ropes == (PLAIN, PLAIN, PLAIN, None, PLAIN)
    assert spec_of("smollm3", num_hidden_layers=3, no_rope_layers=None, no_rope_layer_interval=2).ropes == (PLAIN, None, PLAIN)
    assert spec_of("smollm3").ropes == (PLAIN, None)
    assert spec_of("cohere2").ropes == (replace(PLAIN, traditional=True), None)
    assert spec_of("gemma3_text").ropes == (Rope(32, 100.0), Rope(32, 10000.0, scale=1 / 8))
    local, scaled = spec_of("olmo3").ropes
    assert local == PLAIN and scaled.wavelengths and scaled.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert scaled == spec_of("olmo2", rope_scaling=YARN_ROPE).ropes[1]
    assert spec_of("gpt2").ropes == spec_of("opt").ropes == (None, None)
    assert spec_of("gpt_neox").ropes[0] == Rope(4, 10000.0) and spec_of("glm4").ropes[0] == Rope(8, 10000.0, traditional=True)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_newer_configs_nest_the_positions_of_each_type_of_layer(family):
    config = tiny_config(family)
    scaled, local = config["rope_scaling"], config.get("rope_local_base_freq", config["rope_theta"])
    kinds = {
        "full_attention": {**scaled, "rope_theta": config["rope_theta"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    nested = spec_of(family, rope_scaling=None, rope_theta=None, rope_local_base_freq=None, rope_parameters=kinds)
    assert nested.ropes == load_spec(config).ropes and nested.ropes[0] != nested.ropes[1]
    kinds["sliding_attention"]["rope_theta"] = 77.0
    assert spec_of(family, rope_scaling=None, rope_theta=None, rope_local_base_freq=None, rope_parameters=kinds).ropes[0].base == 77.0
    assert refusal(family, rope_parameters={**kinds, "sliding_attention": 3}) == "'sliding_attention' is 3, expected an object."


@pytest.mark.parametrize("family", ["phi3", "glm4", "gpt_neox"])
def test_newer_configs_nest_what_else_positions_need(family):
    nested = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    assert spec_of(family, rope_theta=None, rotary_emb_base=None, rotary_pct=None, partial_rotary_factor=None, rope_parameters=nested).ropes == (
        Rope(12, 500.0, traditional=family == "glm4"),
    ) * 2  # fmt: skip
    if family == "phi3":
        longrope = {**LONG_ROPE, "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
        flat = spec_of(family, rope_scaling=LONG_ROPE, partial_rotary_factor=0.5, original_max_position_embeddings=32)
        assert spec_of(family, rope_theta=None, rope_parameters={**longrope, "original_max_position_embeddings": 32}).ropes == flat.ropes


def test_longrope_takes_the_long_factors_and_its_magnitude():
    rope = spec_of("phi3", partial_rotary_factor=0.5, rope_scaling=LONG_ROPE, original_max_position_embeddings=32).ropes[0]
    assert rope.wavelengths == tuple(factor * 10000.0 ** (i / 4) for i, factor in enumerate(LONG_ROPE["long_factor"]))
    assert rope.magnitude == pytest.approx(math.sqrt(1 + math.log(128 / 32) / math.log(32)))
    short = spec_of("phi3", partial_rotary_factor=0.5, rope_scaling=LONG_ROPE, original_max_position_embeddings=128).ropes[0]
    assert short.magnitude == 1.0


def test_scales_and_caps():
    gemma2 = spec_of("gemma2")
    assert (gemma2.attention_scale, gemma2.attention_cap, gemma2.logit_cap, gemma2.embedding_scale) == (24**-0.5, 2.0, 3.0, 8.0)
    none = spec_of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=None)
    assert (none.attention_scale, none.attention_cap, none.logit_cap) == (144**-0.5, 50.0, 30.0), "mlx-lm's, where the config has none"
    config = {**tiny_config("gemma2"), "attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert (load_spec(config).attention_cap, load_spec(config).logit_cap) == (None, None), "null takes them away"
    assert spec_of("gemma3_text", hidden_size=1152).embedding_scale == 34.0, "the nearest to 33.94 that bfloat16 has"
    assert spec_of("gemma", hidden_size=1152).embedding_scale == 1152**0.5
    granite = spec_of("granite")
    assert (granite.attention_scale, granite.embedding_scale, granite.residual_scale, granite.logit_scale) == (0.2, 3.0, 0.3, 2.0)
    assert spec_of("llama", attention_multiplier=0.2, embedding_multiplier=3.0, logit_scale=2.0) == spec_of("llama"), "others do not look at them"
    assert spec_of("cohere", logit_scale=None).logit_scale == 0.0625


def test_what_stands_around_a_sublayer():
    norms = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    around = {
        "llama": ((norms[0], None), (norms[1], None), False), "gemma2": (norms[:2], norms[2:], False), "olmo2": ((None, norms[1]), (None, norms[3]), False),
        "cohere": ((norms[0], None), (norms[0], None), True), "gpt_neox": ((norms[0], None), (norms[1], None), True),
    }  # fmt: skip
    for family, (attention, mlp, parallel) in around.items():
        spec = spec_of(family)
        assert (spec.names.attention_norms, spec.names.mlp_norms, spec.parallel) == (attention, mlp, parallel), family
        assert spec.post_norm == (attention[1] is not None)
    assert not spec_of("gpt_neox", use_parallel_residual=False).parallel


def test_a_row_s_defaults_and_names():
    gemma3 = load_spec({"model_type": "gemma3", "text_config": {"hidden_size": 64}})
    assert (gemma3.num_layers, gemma3.num_heads, gemma3.num_kv_heads, gemma3.head_dim, gemma3.vocab_size) == (26, 8, 4, 256, 262208)
    assert gemma3.choose(1, ["mlp.up_proj"]) == ["language_model.model.layers.25.mlp.up_proj"]
    assert gemma3.layer_of("language_model.model.layers.25.mlp.up_proj") == 25
    gpt2 = spec_of("gpt2", n_inner=128)
    assert (gpt2.intermediate_size, gpt2.positions, gpt2.max_positions, gpt2.norm_eps) == (128, 128, 128, 1e-5)
    assert list(gpt2.tensors())[:3] == ["model.wte.weight", "model.wpe.weight", "model.h.0.ln_1.weight"] and list(gpt2.tensors())[-1] == "model.ln_f.bias"
    assert spec_of("gpt2").linears(0)["mlp.c_fc"] == (256, 64) and spec_of("gpt2").linears(0)["attn.c_attn"] == (192, 64)
    assert spec_of("opt").tensors()["model.decoder.embed_positions.weight"] == (130, 64), "two rows more than positions"
    assert spec_of("phi3").linears(0)["self_attn.qkv_proj"] == (128, 64) and spec_of("phi3").linears(0)["mlp.gate_up_proj"] == (192, 64)
    assert load_spec({**tiny_config("gpt_neox"), "rotary_pct": None}).ropes[0] == Rope(4, 10000.0)


def test_fewer_layers_of_the_same_model():
    whole = spec_of("gemma3_text", num_hidden_layers=4)
    assert whole.first_layers(2) == spec_of("gemma3_text") and list(whole.first_layers(4).tensors()) == list(whole.tensors())


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("cohere", {"use_qk_norm": True}, "'use_qk_norm' is True, served: False."),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is 30.0, served: None."),
        ("starcoder2", {"use_bias": False}, "'use_bias' is False, served: True."),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx' is True, served: False."),
        ("opt", {"do_layer_norm_before": False}, "'do_layer_norm_before' is False, served: True."),
        ("opt", {"activation_function": "gelu"}, "'activation_function' is 'gelu', served: 'relu'."),
        ("gpt_neox", {"attention_bias": False}, "'attention_bias' is False, served: True."),
        ("gemma", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling of type 'linear' is not served. Served: default."),
        ("phi3", {"rope_scaling": YARN_ROPE}, "RoPE scaling of type 'yarn' is not served. Served: default, linear, longrope, su."),
        (
            "gemma2", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "RoPE parameters by type of layer are not served. Served: one 'rope_theta', and one 'rope_scaling'.",
        ),
        (
            "gemma3_text", {"rope_scaling": None, "rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "RoPE scaling of type 'linear' in layers with a window is not served. Served: default.",
        ),
    ],
)  # fmt: skip
def test_features_that_no_row_describes_are_left_to_the_generic_stage(family, overrides, message):
    assert refusal(family, Unserved, **overrides) == message


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("gpt2", {"n_embd": "64"}, "'n_embd' is '64', expected a positive whole number."),
        ("gpt2", {"n_layer": 20_000}, "'n_layer' is 20000, expected at most 10000. Download the model again."),
        ("qwen3_moe", {"num_experts": 10**9, "num_experts_per_tok": 2}, "'num_experts' is 1000000000, expected at most 10000. Download the model again."),
        ("gemma", {"head_dim": 2**40}, "4 heads of width 1099511627776 over 2 key/value heads do not fit together."),
        ("phi3", {"partial_rotary_factor": 1e308}, "10000 of the 16 features of a head are to be rotated, expected an even number up to all."),
        ("gpt_neox", {"num_key_value_heads": 2}, "4 heads of width 16 over 2 key/value heads do not fit together."),
        ("smollm3", {"no_rope_layers": [1]}, "'no_rope_layers' should have 0 or 1 for each of 2 layers."),
        ("glm4", {"partial_rotary_factor": 0.45}, "7 of the 16 features of a head are to be rotated, expected an even number up to all."),
        ("granite", {"residual_multiplier": -1.0}, "'residual_multiplier' is -1.0, expected a positive number."),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "the RoPE scaling {'type': 'longrope', 'long_factor': [1.0]} of type"),
    ],
)
def test_values_that_do_not_fit(family, overrides, message):
    assert refusal(family, **overrides).startswith(message)


def test_a_wrapper_without_its_text_model():
    with pytest.raises(UserError, match="'text_config' is None, expected an object."):
        load_spec({"model_type": "gemma3"})
