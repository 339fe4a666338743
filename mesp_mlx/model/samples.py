"""A small configuration for every model type of the installed mlx-lm, for tests and for the verb `architectures`.

It is derived from the fields of the type's ModelArgs: what a field is called says what it counts, in nearly every architecture alike, so that a type
which nobody here has seen mostly gets a configuration as well. Where the names do not say enough, OVERRIDES has a line.

mlx-lm, and with it MLX, is imported inside the functions only.
"""

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import io
import re
import sys
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mesp_mlx.errors import UserError

LAYERS = 4  # two each of two kinds that take turns, or of two that follow each other (dense MLPs, then experts)

# What a field counts or measures, by its whole name; the first that matches decides. Widths are multiples of 32, the smallest group of a quantised weight.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"num_vocab|vocab_size(_per_layer_input)?", 160),
    (r"hidden_size|hidden_dim|d_model|n_embd|model_dim|block_dim", 64),
    (r"n_layers?|num_(hidden_|transformer_)?layers", LAYERS),
    (r"(\w+_)?(kv|key_value|key)_heads|num_attention_groups|n_shared_head", 2),
    (r"n_heads?|\w+_heads", 4),
    (r"qk_rope_head_dim|rotary_dim", 16),
    (r"\w*head_dim|kv_channels|hidden_size_per_\w+|mamba_d_head|\w+_lora_rank|laurel_rank|time_step_rank|\w+_low_rank_dim", 32),
    (r"(moe_)?num_shared_experts?|n_shared_experts?", 1),
    (r"(moe_)?num_(local_)?experts|n_routed_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", 2),
    (r"\w*(moe|expert)\w*_(size|dim)", 32),
    (r"\w*intermediate_size\w*|ffn_hidden_size|n_inner|block_ff_dim", 96),
    (r"n_group|num_expert_group|n_groups|mamba_n_groups|o_groups|group_norm_size", 2),
    (r"topk_group|moe_layer_freq|moe_layer_interval|decoder_sparse_step", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 2),
    (r"mlp_only_layers", [0, 1]),
    (r"index_topk", 6),
    (r"\w*window(_size)?|attention_chunk_size", 8),
    (r"sliding_window_pattern|full_attention_interval|layer_group_size|no_rope_layer_interval|\w+_layer_(period|step)|mamba_step|dense_\w+_n_layers", 2),
    (r"(\w+_)?conv_(kernel\w*|L_cache)|\w+_d_conv|conv1d_width", 4),
    (r"(ssm_)?state_size|mamba_d_state", 16),
    (r"max_position_embeddings|n_positions|n_ctx|block_size|model_max_length", 128),
    (r"(swa_|compress_)?rope_theta|rope_local_base_freq|rotary_emb_base", 10000.0),
)

# What else a field gets where it has no default. Where no name matches, its type decides: true, 0.5, nothing.
REQUIRED: tuple[tuple[str, Any], ...] = (
    (r"\w*(eps|epsilon)", 1e-5),
    (r"\w*soft_?cap(ping)?", 8.0),
    (r"partial_rotary_factor", 0.5),
    (r"time_step_limit", [0.001, 100.0]),
    (r"rope_parameters|rope_scaling", {"rope_type": "default", "rope_theta": 10000.0}),
    (r"scoring_func", "sigmoid"),
    (r"topk_method", "noaux_tc"),
    (r"hidden_act", "silu"),
    (r"tie_\w+|share_\w+", False),
)

YARN = {"rope_type": "yarn", "type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.7}
MISTRAL_ROPE = YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}
ROPE_BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": {"rope_type": "default", "rope_theta": 50000.0}}
KDA = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}
SHARED = {"num_hidden_layers": 8, "num_kv_shared_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 4}
PACKED = [f"model.layers.{i}.mlp.{name}" for i in range(LAYERS) for name in ("gate_proj", "up_proj")]
NAS = [{"no_op": False, "n_heads_in_group": 2}, {"replace_with_linear": True}, {"no_op": True}]

# What names and types do not say, by model type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2, "hidden_dim_scale_factor": 1.5},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "cohere2": {"head_dim": 16},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "deepseek_v41": {
        **{"num_hidden_layers": 6, "compress_ratios": [0, 0, 2, 2, 2, 2], "kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4]},
        **{"candidate_source_layer_id": 2, "candidate_topk_blocks": 4, "candidate_block_size": 2},
    },
    "exaone": {"head_dim": 16},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, False, True, True]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gear": {"num_hidden_layers": 6, "layer_types": ["conv_mixer", "sliding_attention", "full_attention"] * 2},
    "gemma3n": {
        "text_config": {
            **SHARED,
            **{"activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0] * 2, "altup_num_inputs": 3, "altup_coef_clip": 120.0, "altup_active_idx": 0},
        }
    },
    "gemma4": {"text_config": {**SHARED, "enable_moe_block": True}},
    "gemma4_text": SHARED,
    "gemma3": {"text_config": {"tie_word_embeddings": False}},  # mlx-lm takes a head for one if a file has it
    "gemma3_text": {"tie_word_embeddings": False},
    "gpt2": {"num_key_value_heads": 4},
    "gpt_neox": {"num_key_value_heads": 4},
    "granite": {"intermediate_size": 128},
    "granitemoe": {"intermediate_size": 128},
    "hunyuan": {"cla_share_factor": 2, "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 2.0}},
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 1, "mamba_expand": 2},
    "kimi_k3": {"text_config": {"linear_attn_config": KDA, "activation_situ_beta": 2.0, "activation_situ_linear_beta": 3.0, "attn_res_block_size": 2}},
    "kimi_linear": {"linear_attn_config": KDA},
    "laguna": {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "num_attention_heads_per_layer": [4, 8, 4, 8]},
    "lfm2": {"block_multiple_of": 32},
    "lfm2-vl": {"text_config": {"block_multiple_of": 32}},
    "llama4": {"text_config": {"num_hidden_layers": 8, "num_experts_per_tok": 1}},  # each fourth sees beyond its chunk
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 2},
    "longcat_flash_ngram": {"zero_expert_num": 2, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mellum": {"rope_parameters": ROPE_BY_KIND},
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 0, 1, 1], "partial_rotary_factor": 0.5},
    "minicpm": {"dim_model_base": 32},
    "minicpm3": {"dim_model_base": 32, "rope_scaling": LONG_ROPE},
    "minimax_m3_vl": {
        "text_config": {
            **{"moe_layer_freq": [0, 0, 1, 1], "layer_types": ["full_attention", "sparse_attention"] * 2},
            **{"index_block_size": 4, "index_topk_blocks": 2},
        }
    },
    "ministral3": {"rope_parameters": MISTRAL_ROPE},
    "mistral4": {"rope_parameters": MISTRAL_ROPE},
    "muse_spark": {"text_config": {"num_shared_experts": 0, "layer_rope_theta": [10000.0, 0.0, 10000.0, 0.0]}},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"num_hidden_layers": 6, "block_configs": [{"attention": attention, "ffn": {"ffn_mult": 1.5}} for attention in NAS * 2]},
    "nemotron_h": {"num_hidden_layers": 8, "hybrid_override_pattern": list("M*-E") * 2, "routed_scaling_factor": 1.5},
    "openelm": {"num_query_heads": [4] * 4, "num_kv_heads": [2] * 4, "ffn_multipliers": [1.0, 1.0, 2.0, 2.0], "ffn_dim_divisor": 32},
    "phi3small": {
        **{"hidden_size": 32, "vocab_size": 100_352},  # mlx-lm's model bars tokens up to 100,351 by number, whether there are as many or not
        **{"gegelu_limit": 2.0, "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 1, "blocksparse_vert_stride": 2},
    },
    "phixtral": {"num_layers": 2},
    "prism_hadamard_qwen35": {
        **{"schema_version": 1, "tensor_namespace": "mlx-lm-text", "quantization": {"bits": 2, "group_size": 128, "mode": "affine"}},
        **{"modules": [{"path": path, "embedding": False, "dtype": "float16", "block": 0} for path in PACKED]},
        "text_config": {"hidden_size": 128, "num_experts": 0},
    },
    "qwen": {"kv_channels": 16},
    "qwen3_5": {"text_config": {"num_experts": 0}},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv7": {"a_low_rank_dim": 64, "v_low_rank_dim": 64, "gate_low_rank_dim": 64, "decay_low_rank_dim": 64},
    "seed_oss": {"tie_word_embeddings": False},  # mlx-lm's model can't multiply by a quantised table
    "spark2_5": {"rope_parameters": ROPE_BY_KIND},
    "step3p5": {"moe_layers_enum": "2,3", "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0], "swiglu_limits": [0.0, 2.0, 0.0, 2.0]},
}


def model_types() -> list[str]:
    """Every model_type that the installed mlx-lm has a model for, sorted: its modules, and the other names that it knows them by."""
    from mlx_lm.utils import MODEL_REMAPPING

    found = importlib.util.find_spec("mlx_lm.models")
    assert found is not None and found.submodule_search_locations
    texts = {file.stem: file.read_text(encoding="utf-8") for folder in found.submodule_search_locations for file in Path(folder).glob("*.py")}
    has = [re.compile(rf"^(class |from .* import .*\b){name}\b", re.MULTILINE) for name in ("Model", "ModelArgs")]
    own = {name for name, text in texts.items() if all(pattern.search(text) for pattern in has)}
    return sorted(own | {alias for alias, name in MODEL_REMAPPING.items() if name in own})


def small_config(model_type: str) -> dict[str, Any]:
    """A config.json's contents for a small model of that type: 64 wide, at least two layers of each kind the type has, four experts of which two serve.

    Raises UserError where mlx-lm's module of the type can't be imported, or a field of its ModelArgs can't be guessed.
    """
    from mlx_lm.utils import MODEL_REMAPPING

    overrides = OVERRIDES.get(model_type, OVERRIDES.get(MODEL_REMAPPING.get(model_type, model_type), {}))
    return copy.deepcopy(_derived(model_type, _module(model_type).ModelArgs, overrides))


def _module(model_type: str) -> ModuleType:
    from mlx_lm.utils import MODEL_REMAPPING

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
    except (Exception, SystemExit) as error:  # a module that misses a package of its own ends the process
        raise UserError(f"mlx-lm's model type {model_type} can't be imported: {said.getvalue().strip() or error}.") from error


def _derived(model_type: str, arguments: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(arguments)}
    config = {**overrides, "model_type": model_type}
    for name, field in fields.items():
        if name == "text_config":
            config[name] = _derived(*_text_model(model_type, arguments, field), overrides.get(name, {}))
        elif name not in config:
            config |= _guessed(model_type, field, fields.keys())
    return config


def _guessed(model_type: str, field: dataclasses.Field[Any], names: Collection[str]) -> dict[str, Any]:
    """The field and its value, or nothing where the default is kept."""
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if field.name == "layer_types" and (kinds := _kinds(names)):
        return {field.name: kinds * (LAYERS // 2)}
    for pattern, value in SIZES + REQUIRED * required:
        if re.fullmatch(pattern, field.name):
            return {field.name: value}
    if not required:
        return {}
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
    if kind in (by_type := {"bool": True, "float": 0.5}):
        return {field.name: by_type[kind]}
    if type(None) in typing.get_args(field.type):
        return {field.name: None}
    raise UserError(
        f"No small configuration of mlx-lm's model type {model_type} can be derived: "
        f"nothing is known of the field {field.name} ({field.type}) of its ModelArgs. Give it a value in OVERRIDES of mesp_mlx/model/samples.py."
    )


def _kinds(names: Collection[str]) -> list[str]:
    """The two kinds of layers that a type with such fields tells apart by name."""
    others = {"conv_L_cache": "conv", "linear_num_key_heads": "linear_attention", "mamba_n_heads": "mamba", "sliding_window": "sliding_attention"}
    other = next((kind for name, kind in others.items() if name in names), None)
    return [other, "attention" if other == "mamba" else "full_attention"] if other else []


def _text_model(model_type: str, arguments: Any, field: dataclasses.Field[Any]) -> tuple[str, Any]:
    """The model type and the arguments of the language model in a model of several senses."""
    for candidate in _text_candidates(arguments, field):
        inner_type = model_type
        if isinstance(candidate, ModuleType):
            inner_type, candidate = candidate.__name__.rpartition(".")[2], getattr(candidate, "ModelArgs", None)
        if dataclasses.is_dataclass(candidate) and all(inner.name != field.name for inner in dataclasses.fields(candidate)):
            return inner_type, candidate
    raise UserError(f"No small configuration of mlx-lm's model type {model_type} can be derived: nothing says what its {field.name} has.")


def _text_candidates(arguments: Any, field: dataclasses.Field[Any]) -> Iterator[Any]:
    """What the field's type names; then the modules, and the classes with Text in their name, that the type's module or those it inherits from know."""
    yield from typing.get_args(field.type)
    for owner in (*arguments.__mro__, *vars(sys.modules[arguments.__module__])["Model"].__mro__):
        if owner.__module__.startswith("mlx_lm.models."):
            known = vars(sys.modules[owner.__module__]).values()
            yield from (value for value in known if isinstance(value, ModuleType) or "Text" in getattr(value, "__name__", ""))
