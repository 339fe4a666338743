"""Tiny random models of every family served, in many variants, for tests."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

TOOLS = Path(__file__).parent.parent / "tools"

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR_ROPE = {"type": "linear", "factor": 2.0}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # of most

# What each family is trained with in the tests: (family, what differs from tiny_config's defaults).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "llama-traditional-rope": ("llama", {"rope_traditional": True}),
    "llama-llama3-rope": ("llama", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}),
    "llama-linear-rope": ("llama", {"rope_scaling": LINEAR_ROPE}),
    "llama-sliding": ("llama", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": ("mistral", {}),
    "mistral-sliding": ("mistral", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-yarn-rope": ("qwen2", {"rope_scaling": YARN_ROPE}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-yarn-rope": ("qwen3", {"rope_scaling": YARN_ROPE}),
}

LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0]}
SMALL_MLP = {"intermediate_size": 256}  # four times the width, as mlx-lm has it whatever the config says
# The families whose layer is not Llama's: (family, what differs from its row of FAMILY_CONFIGS).
FAMILY_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {}),
    "gemma3": ("gemma3", {}),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", {"partial_rotary_factor": 0.5, "rope_scaling": LONG_ROPE, "original_max_position_embeddings": 32}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {"attention_bias": True, "mlp_bias": True}),
    "olmo3": ("olmo3", {}),
    "granite": ("granite", {}),
    "glm4": ("glm4", {"attention_bias": True}),
    "cohere": ("cohere", {"layer_norm_bias": True, "attention_bias": True}),
    "cohere2": ("cohere2", {}),
    "starcoder2": ("starcoder2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
}
# What a family's tiny config has beside or instead of Llama's; None: nothing.
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32, "rms_norm_eps": 1e-6},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24, "sliding_window": 64},
    "gemma3_text": {
        "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 5, "sliding_window_pattern": 2, "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo3": {"rope_scaling": YARN_ROPE, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {
        "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 0.5, "attention_bias": True, "mlp_bias": True,
    },
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": False},
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 2.0},
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 2.0, "head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2},
    "starcoder2": {"norm_epsilon": 1e-5},
    "gpt_neox": {"num_key_value_heads": 4, "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "rotary_emb_base": 10000, **SMALL_MLP},
    "gpt2": {
        "hidden_size": None, "intermediate_size": None, "num_hidden_layers": None, "num_attention_heads": None, "num_key_value_heads": None,
        "max_position_embeddings": None, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128, "layer_norm_epsilon": 1e-5,
    },
    "opt": {"intermediate_size": None, "ffn_dim": 96, "num_key_value_heads": None},
}  # fmt: skip


def tool(name: str) -> ModuleType:
    """The module of tools/NAME.py, which is not a package."""
    description = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model of a family, 64 wide, of two layers; overrides replace its values, or remove them if None."""
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": family not in ("mistral", "qwen3", "gpt_neox", "glm4", "granite"),
    }
    config |= FAMILY_CONFIGS.get("gemma3_text" if family == "gemma3" else family, {})
    config = {key: value for key, value in (config | overrides).items() if value is not None}
    if family != "gemma3":
        return config
    outer = {"model_type", "vocab_size", "tie_word_embeddings"}
    inner = {key: value for key, value in config.items() if key not in outer}
    return {**{key: config[key] for key in outer}, "text_config": {"model_type": "gemma3_text", **inner}}


def variant_config(name: str) -> dict[str, Any]:
    """The config.json of one row of `VARIANTS` or `FAMILY_VARIANTS`."""
    family, overrides = (VARIANTS | FAMILY_VARIANTS)[name]
    return tiny_config(family, **overrides)


def make_model(
    folder: Path,
    config: Mapping[str, Any],
    seed: int = 0,
    bits: int | None = 4,
    group_size: int = 32,
    dtype: str = "float32",
    quantization: Mapping[str, Any] | None = None,
    mode: str = "affine",
) -> Path:
    """Write a random model of that config into folder (bits None: not quantised) and return the folder."""
    return tool("make_random_model").make(config, folder, seed, bits, group_size, dtype, quantization, mode)
