"""The shapes of popular models by name: what a plan can be made for, and a random model written in, before anything is downloaded."""

from typing import Any


def _qwen2(**own: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 32768}
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", **common, **own}


def _llama(**own: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **common, **own}


def _qwen3_moe(**own: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None, "max_position_embeddings": 40960, "attention_bias": False}
    common |= {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", **common, **own}


def _widths(width: int, mlp: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


_LLAMA_3_2 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
_YARN_OSS = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}


def _types(layers: int, full_every: int) -> list[str]:
    """Of layers of which every so manieth has full attention, the others a window."""
    return ["full_attention" if (layer + 1) % full_every == 0 else "sliding_attention" for layer in range(layers)]


# The published config.json of each model, but for what only a tokenizer or a generator reads.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _qwen2(**_widths(896, 4864, 24, 14, 2, 151936, True), max_window_layers=24),
    "qwen2.5-1.5b": _qwen2(**_widths(1536, 8960, 28, 12, 2, 151936, True), max_window_layers=28),
    "qwen2.5-3b": _qwen2(**_widths(2048, 11008, 36, 16, 2, 151936, True), max_window_layers=36),
    "qwen2.5-7b": _qwen2(**_widths(3584, 18944, 28, 28, 4, 152064, False), max_window_layers=28),
    "qwen3-30b-a3b": _qwen3_moe(
        **_widths(2048, 6144, 48, 32, 4, 151936, False), head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "llama-3.2-1b": _llama(**_widths(2048, 8192, 16, 32, 8, 128256, True), head_dim=64, max_position_embeddings=131072, rope_scaling=_LLAMA_3_2),
    "llama-3.2-3b": _llama(**_widths(3072, 8192, 28, 24, 8, 128256, True), head_dim=128, max_position_embeddings=131072, rope_scaling=_LLAMA_3_2),
    "llama-3-8b": _llama(**_widths(4096, 14336, 32, 32, 8, 128256, False), max_position_embeddings=8192),
    "llama-3-70b": _llama(**_widths(8192, 28672, 80, 64, 8, 128256, False), max_position_embeddings=8192),
    "smollm2-135m": _llama(**_widths(576, 1536, 30, 9, 3, 49152, True), head_dim=64, max_position_embeddings=8192, rope_theta=100000.0),
    "qwen3-4b": {
        "model_type": "qwen3",
        **_widths(2560, 9728, 36, 32, 8, 151936, True),
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
    },
    "gemma-2b": {
        "model_type": "gemma",
        **_widths(2048, 16384, 18, 8, 1, 256000, True),
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        **_widths(2304, 9216, 26, 8, 4, 256000, True),
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        **_widths(1152, 6912, 26, 4, 1, 262144, True),
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
    },
    "phi-3-mini": {
        "model_type": "phi3",
        **_widths(3072, 8192, 32, 32, 32, 32064, False),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    },
    "smollm3-3b": {
        "model_type": "smollm3",
        **_widths(2048, 11008, 36, 16, 4, 128256, True),
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "no_rope_layer_interval": 4,
        "max_position_embeddings": 65536,
    },
    "olmo-2-1b": {
        "model_type": "olmo2",
        **_widths(2048, 8192, 16, 16, 16, 100352, False),
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "max_position_embeddings": 4096,
    },
    "olmo-3-7b": {
        "model_type": "olmo3",
        **_widths(4096, 11008, 32, 32, 32, 100278, False),
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "layer_types": _types(32, 4),
    },
    "granite-3.3-2b": {
        "model_type": "granite",
        **_widths(2048, 8192, 40, 32, 8, 49159, True),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 131072,
    },
    "glm-4-9b": {
        "model_type": "glm4",
        **_widths(4096, 13696, 40, 32, 2, 151552, False),
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "max_position_embeddings": 32768,
    },
    "command-r7b": {
        "model_type": "cohere2",
        **_widths(4096, 14336, 32, 32, 8, 256000, True),
        "head_dim": 128,
        "layer_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "logit_scale": 0.25,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "max_position_embeddings": 132096,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2",
        **_widths(3072, 12288, 30, 24, 2, 49152, True),
        "norm_epsilon": 1e-5,
        "rope_theta": 999999.4420358813,
        "max_position_embeddings": 16384,
        "use_bias": True,
    },
    "pythia-1.4b": {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50304,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_ctx": 1024,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 50257,
    },
    "opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "tie_word_embeddings": True,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        **_widths(4096, 14336, 32, 32, 8, 32000, False),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        **_widths(2048, 1024, 16, 16, 16, 50304, False),
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        **_widths(2880, 2880, 24, 64, 8, 201088, False),
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "layer_types": _types(24, 2),
        "rope_theta": 150000,
        "rope_scaling": _YARN_OSS,
        "max_position_embeddings": 131072,
        "swiglu_limit": 7.0,
    },
}

# The demo model's weights come from a GGUF file: Q4_1 and Q8_0 in groups of 32.
DEMO: dict[str, Any] = {
    **SHAPES["smollm2-135m"],
    "torch_dtype": "float16",
    "quantization": {"bits": 4, "group_size": 32, "model.embed_tokens": {"bits": 8, "group_size": 32}},
}
