"""The model families served, one row each. All are Llama's layer with small differences; a row names the differences."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama. A bias of None follows the config's attention_bias."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool = False  # whether the config's mlp_bias is heeded
    qk_norm: bool = False  # RMSNorm over each head's query and key
    own_head_dim: bool = True  # whether the config's head_dim is heeded; else width / heads
    window_switch: bool = False  # whether use_sliding_window decides
    all_slide: bool = False  # whether a window without layer_types holds for all layers
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048  # where the config says nothing


FAMILIES = {
    "llama": Family(mlp_bias=True),
    "mistral": Family(mlp_bias=True, all_slide=True),
    "qwen2": Family(qkv_bias=True, o_bias=False, own_head_dim=False, window_switch=True, rope_theta=1_000_000.0, max_positions=32768),
    "qwen3": Family(qkv_bias=False, o_bias=False, qk_norm=True, window_switch=True, rope_theta=1_000_000.0, max_positions=32768),
}
