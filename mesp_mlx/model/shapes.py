"""The shapes of popular models by name: what a plan can be made for, and a random model written in, before anything is downloaded."""

from typing import Any


def _qwen2(**own: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 32768}
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", **common, **own}


def _llama(**own: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **common, **own}


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

# The published config.json of each model, but for what only a tokenizer or a generator reads.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _qwen2(**_widths(896, 4864, 24, 14, 2, 151936, True), max_window_layers=24),
    "qwen2.5-1.5b": _qwen2(**_widths(1536, 8960, 28, 12, 2, 151936, True), max_window_layers=28),
    "qwen2.5-3b": _qwen2(**_widths(2048, 11008, 36, 16, 2, 151936, True), max_window_layers=36),
    "qwen2.5-7b": _qwen2(**_widths(3584, 18944, 28, 28, 4, 152064, False), max_window_layers=28),
    "llama-3.2-1b": _llama(**_widths(2048, 8192, 16, 32, 8, 128256, True), head_dim=64, max_position_embeddings=131072, rope_scaling=_LLAMA_3_2),
    "llama-3.2-3b": _llama(**_widths(3072, 8192, 28, 24, 8, 128256, True), head_dim=128, max_position_embeddings=131072, rope_scaling=_LLAMA_3_2),
    "llama-3-8b": _llama(**_widths(4096, 14336, 32, 32, 8, 128256, False), max_position_embeddings=8192),
    "llama-3-70b": _llama(**_widths(8192, 28672, 80, 64, 8, 128256, False), max_position_embeddings=8192),
    "smollm2-135m": _llama(**_widths(576, 1536, 30, 9, 3, 49152, True), head_dim=64, max_position_embeddings=8192, rope_theta=100000.0),
}

# The demo model's weights come from a GGUF file: Q4_1 and Q8_0 in groups of 32.
DEMO: dict[str, Any] = {
    **SHAPES["smollm2-135m"],
    "torch_dtype": "float16",
    "quantization": {"bits": 4, "group_size": 32, "model.embed_tokens": {"bits": 8, "group_size": 32}},
}
