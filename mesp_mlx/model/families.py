"""The model families served, one row each: what each calls its modules, and how its layer differs from Llama's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SCALINGS = ("default", "dynamic", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Names:
    """What mlx-lm calls a family's modules; those of a layer begin there. A norm may stand before a sublayer, after it, or both."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    positions: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one that holds them all
    out: str = "self_attn.o_proj"
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    sinks: str = "self_attn"
    inner: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one: both in one, or no gate
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.switch_mlp"
    router_last: bool = False  # as down_last, of a routed MLP
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    down_last: bool = False  # mlx-lm's module sets down after gate and up; elsewhere it sets up last, and it adapts the last one first

    def within(self, prefix: str) -> "Names":
        """The same in a module of that name."""
        return replace(self, **{name: f"{prefix}.{getattr(self, name)}" for name in ("layers", "embedding", "norm", "head")})


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama.

    Attributes:
        defaults: what its config means where it says nothing.
        aliases: its config's names of what others call otherwise.
        heeds: optional keys of the config that mean something here: whatever is not among them is not looked at.
        requires: what optional keys of the config must be, if they are there, for the row to describe the model.
        inside: the key of the config that holds the text model's own config.
        tied: whether the embedding is the head too; None: as the config says, or, where it is silent, the tensors; "tensors": whatever it says, as those do.
        qkv_bias, o_bias, mlp_bias, norm_bias: None: as the config says (attention_bias, mlp_bias, layer_norm_bias).
        eps: the config's name of the norms' epsilon.
        embedding_scale: "root" of the width, or that rounded to bfloat16 ("root in bfloat16").
        rotates: which layers rotate q and k: all, those that no_rope_layers lists, or those with a window.
        local_ropes: layers with a window rotate by rope_local_base_freq or rope_theta, without scaling.
        scalings: RoPE scalings served.
        all_slide: a window without layer_types holds for all layers.
        renamed: prefixes of names in a Hugging Face folder, and what mlx-lm calls them.
        dropped: patterns of the names of tensors there that mlx-lm has no use for.
        router: how experts are weighed, of the families that have some; expert_bias: the router and they have biases.
        singles: names in a layer of a Hugging Face folder of one expert's gate, up and down.
        transposed: ends of the names of linears that are stored [in, out] there.
        finer: ends of the names of modules that mlx-lm quantises to 8 bits where others have 4.
    """

    names: Names = Names()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    heeds: tuple[str, ...] = ("head_dim",)
    requires: Mapping[str, Any] = field(default_factory=dict)
    inside: str = ""
    tied: bool | Literal["tensors"] | None = None
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    norm_bias: bool | None = False
    eps: str = "rms_norm_eps"
    qk_norm: Literal["head", "width"] | None = None
    fused_qkv: Literal["blocks", "heads"] | None = None
    gated: bool = True
    activation: str = "silu"
    router: Literal["softmax_topk", "topk_softmax"] | None = None
    expert_bias: bool = False
    sinks: bool = False
    parallel: bool = False
    embedding_scale: Literal["root", "root in bfloat16"] | None = None
    rotates: Literal["all", "listed", "windowed", "none"] = "all"
    local_ropes: bool = False
    scalings: tuple[str, ...] = SCALINGS
    all_slide: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    singles: tuple[str, ...] = ()
    finer: tuple[str, ...] = ()


_SINGLES = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
_PLAIN_ROPE = ("default",)
_QWEN = {"rope_theta": 1_000_000.0, "max_position_embeddings": 32768}
_FUSED_INNER = ("mlp.gate_up_proj",)
_BEFORE_AND_AFTER = Names(
    attention_norms=("input_layernorm", "post_attention_layernorm"),
    mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_AFTER = Names(attention_norms=(None, "post_attention_layernorm"), mlp_norms=(None, "post_feedforward_layernorm"))
_GEMMA = Family(tied=True, qkv_bias=False, o_bias=False, norm_offset=1.0, activation="gelu", embedding_scale="root", scalings=_PLAIN_ROPE)
_GEMMA3 = replace(
    _GEMMA,
    names=_BEFORE_AND_AFTER,
    defaults={
        "hidden_size": 1152, "num_hidden_layers": 26, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "vocab_size": 262144, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "query_pre_attn_scalar": 256, "sliding_window": 512,
        "sliding_window_pattern": 6, "max_position_embeddings": 32768,
    },
    heeds=("head_dim", "query_pre_attn_scalar"),
    requires={"attn_logit_softcapping": None, "final_logit_softcapping": None},
    tied="tensors", qk_norm="head", embedding_scale="root in bfloat16", local_ropes=True, scalings=SCALINGS,
)  # fmt: skip
_COHERE = Family(
    names=Names(mlp_norms=("input_layernorm", None), down_last=True),
    defaults={
        "hidden_size": 8192, "num_hidden_layers": 40, "intermediate_size": 22528, "num_attention_heads": 64, "num_key_value_heads": 64,
        "rope_theta": 8_000_000.0, "vocab_size": 256000, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_traditional": True,
        "max_position_embeddings": 8192,
    },
    heeds=("logit_scale",), requires={"use_qk_norm": False}, tied=True, norm="layer", norm_bias=None, eps="layer_norm_eps", parallel=True,
    scalings=_PLAIN_ROPE,
)  # fmt: skip

FAMILIES = {
    "llama": Family(heeds=("head_dim", "mlp_bias"), mlp_bias=None),
    "mistral": Family(heeds=("head_dim", "mlp_bias"), mlp_bias=None, all_slide=True),
    "qwen2": Family(heeds=("use_sliding_window",), qkv_bias=True, o_bias=False, defaults=_QWEN),
    "qwen3": Family(heeds=("head_dim", "use_sliding_window"), qkv_bias=False, o_bias=False, qk_norm="head", defaults=_QWEN),
    "gemma": replace(_GEMMA, activation="gelu_exact", defaults={"max_position_embeddings": 8192}),
    "gemma2": replace(
        _GEMMA,
        names=_BEFORE_AND_AFTER,
        defaults={
            "max_position_embeddings": 8192, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 144.0,
        },
        heeds=("head_dim", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(
        _GEMMA3,
        names=_BEFORE_AND_AFTER.within("language_model"),
        defaults={**_GEMMA3.defaults, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
        inside="text_config", dropped=(r"^(model\.)?(vision_tower|multi_modal_projector)\.",),
        renamed=(("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    ),
    "phi3": Family(
        names=Names(qkv=("self_attn.qkv_proj",), inner=_FUSED_INNER), heeds=("partial_rotary_factor",), qkv_bias=False, o_bias=False,
        defaults={"tie_word_embeddings": False, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
        fused_qkv="blocks", scalings=("default", "linear", "longrope", "su"), all_slide=True,
    ),
    "smollm3": Family(heeds=("head_dim", "mlp_bias"), mlp_bias=None, rotates="listed"),
    "olmo2": Family(names=_AFTER, heeds=("head_dim", "mlp_bias"), mlp_bias=None, qk_norm="width"),
    "olmo3": Family(
        names=_AFTER, qk_norm="width", local_ropes=True, defaults={"tie_word_embeddings": False, "sliding_window_pattern": 4},
    ),
    "granite": Family(
        heeds=("mlp_bias", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), mlp_bias=None,
        finer=("self_attn.o_proj", "mlp.down_proj", "lm_head"),
    ),
    "glm4": Family(
        names=Names(
            inner=_FUSED_INNER, attention_norms=("input_layernorm", "post_self_attn_layernorm"), mlp_norms=("post_attention_layernorm", "post_mlp_layernorm"),
        ),
        heeds=("head_dim", "partial_rotary_factor"), tied=False, o_bias=False,
        defaults={"rope_traditional": True, "max_position_embeddings": 32768, "partial_rotary_factor": 0.5},
        scalings=_PLAIN_ROPE,
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        defaults={
            **_COHERE.defaults, "hidden_size": 4096, "head_dim": 128, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "rope_theta": 50_000.0, "sliding_window": 4096, "sliding_window_pattern": 4,
        },
        heeds=("head_dim", "logit_scale"), requires={}, rotates="windowed",
    ),
    "starcoder2": Family(
        names=Names(inner=("mlp.c_fc",), down="mlp.c_proj"), heeds=(), requires={"use_bias": True}, qkv_bias=True, o_bias=True, mlp_bias=True,
        norm="layer", norm_bias=True, eps="norm_epsilon", gated=False, activation="gelu_exact", scalings=_PLAIN_ROPE, all_slide=True,
        defaults={"norm_epsilon": 1e-5, "vocab_size": 49152, "rope_theta": 100_000.0, "max_position_embeddings": 16384},
    ),
    "gpt_neox": Family(
        names=Names(
            layers="model.h", embedding="model.embed_in", norm="model.final_layer_norm", head="model.embed_out",
            qkv=("attention.query_key_value",), out="attention.dense", inner=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h",
        ),
        heeds=("partial_rotary_factor", "use_parallel_residual"), aliases={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        defaults={"partial_rotary_factor": 0.25}, requires={"attention_bias": True}, tied=False, qkv_bias=True, o_bias=True, mlp_bias=True,
        norm="layer", norm_bias=True, eps="layer_norm_eps", fused_qkv="heads", gated=False, activation="gelu", parallel=True, scalings=_PLAIN_ROPE,
        renamed=(("gpt_neox.layers.", "model.h."), ("gpt_neox.", "model."), ("embed_out.", "model.embed_out.")),
        dropped=(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
    ),
    "gpt2": Family(
        names=Names(
            layers="model.h", embedding="model.wte", positions="model.wpe", norm="model.ln_f", qkv=("attn.c_attn",), out="attn.c_proj",
            inner=("mlp.c_fc",), down="mlp.c_proj", attention_norms=("ln_1", None), mlp_norms=("ln_2", None),
        ),
        heeds=(), aliases={
            "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        requires={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}, tied=True, qkv_bias=True, o_bias=True, mlp_bias=True,
        norm="layer", norm_bias=True, eps="layer_norm_epsilon", fused_qkv="blocks", gated=False, activation="gelu", rotates="none",
        renamed=(("transformer.", "model."), ("wte.", "model.wte."), ("wpe.", "model.wpe."), ("h.", "model.h."), ("ln_f.", "model.ln_f.")),
        dropped=(r"\.attn\.(bias|masked_bias)$",), transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
    "qwen3_moe": Family(
        heeds=("head_dim", "decoder_sparse_step"), requires={"use_sliding_window": False}, qkv_bias=False, o_bias=False, qk_norm="head",
        router="softmax_topk", singles=_SINGLES, finer=("mlp.gate",), scalings=_PLAIN_ROPE,
        defaults={**_QWEN, "tie_word_embeddings": False, "num_experts": 128, "norm_topk_prob": False},
    ),
    "mixtral": Family(
        names=Names(router="block_sparse_moe.gate", experts="block_sparse_moe.switch_mlp"), heeds=(), all_slide=True, qkv_bias=False, o_bias=False,
        aliases={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}, router="topk_softmax", scalings=_PLAIN_ROPE,
        singles=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"),
        defaults={
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "moe_intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0, "tie_word_embeddings": False, "max_position_embeddings": 32768,
        },
    ),
    "olmoe": Family(
        requires={"clip_qkv": None, "mlp_bias": False}, aliases={"moe_intermediate_size": "intermediate_size"}, qk_norm="width",
        router="softmax_topk", singles=_SINGLES, defaults={"max_position_embeddings": 4096},
    ),
    "gpt_oss": Family(
        names=Names(router="mlp.router", experts="mlp.experts", router_last=True), requires={"swiglu_limit": 7.0}, tied=False,
        aliases={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}, router="topk_softmax", expert_bias=True, sinks=True,
        finer=("mlp.router",),
        qkv_bias=True, o_bias=True, activation="clipped_swiglu",
        defaults={
            "num_hidden_layers": 36, "num_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088, "rms_norm_eps": 1e-5, "hidden_size": 2880,
            "intermediate_size": 2880, "moe_intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
            "sliding_window": 128, "sliding_window_pattern": 2, "rope_theta": 150_000.0, "max_position_embeddings": 131072,
        },
    ),
    "opt": Family(  # mlx-lm has none: the names are Hugging Face's
        names=Names(
            layers="model.decoder.layers", embedding="model.decoder.embed_tokens", positions="model.decoder.embed_positions",
            norm="model.decoder.final_layer_norm", out="self_attn.out_proj", inner=("fc1",), down="fc2",
            attention_norms=("self_attn_layer_norm", None), mlp_norms=("final_layer_norm", None),
        ),
        heeds=("position_offset",), aliases={"intermediate_size": "ffn_dim"},
        defaults={"layer_norm_eps": 1e-5, "position_offset": 2},
        requires={
            "do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True, "activation_function": "relu",
            "_remove_final_layer_norm": False,
        },
        qkv_bias=True, o_bias=True, mlp_bias=True, norm="layer", norm_bias=True, eps="layer_norm_eps", gated=False, activation="relu", rotates="none",
        renamed=(("decoder.", "model.decoder."),),
    ),
}  # fmt: skip
