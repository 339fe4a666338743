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
        "tie_word_embeddings": family in ("llama", "qwen2"),
    }
    if family == "qwen3":
        config |= {"head_dim": 32, "rms_norm_eps": 1e-6}
    return {key: value for key, value in (config | overrides).items() if value is not None}


def variant_config(name: str) -> dict[str, Any]:
    """The config.json of one row of `VARIANTS`."""
    family, overrides = VARIANTS[name]
    return tiny_config(family, **overrides)


def make_model(
    folder: Path,
    config: Mapping[str, Any],
    seed: int = 0,
    bits: int | None = 4,
    group_size: int = 32,
    dtype: str = "float32",
    quantization: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random model of that config into folder (bits None: not quantised) and return the folder."""
    return tool("make_random_model").make(config, folder, seed, bits, group_size, dtype, quantization)
