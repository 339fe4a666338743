"""What a model is, read from its config.json: widths, heads, positions, biases and how its weights are quantised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import frexp, ldexp
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mesp_mlx.errors import Unserved, UserError
from mesp_mlx.model.families import FAMILIES, Names
from mesp_mlx.model.fields import MOST, NUMBER, Fields
from mesp_mlx.model.fields import read_config as read_config
from mesp_mlx.model.quantization import Quantization, quantized_as, read_quantization
from mesp_mlx.model.ropes import Rope, read_ropes

if TYPE_CHECKING:
    from mesp_mlx.model.generic import GenericSpec

Spec: TypeAlias = "ModelSpec | GenericSpec"

MAX_WINDOW_LAYERS = 28  # what transformers takes for Qwen2 and Qwen3 where a config says nothing
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Experts:
    """A routed MLP: `chosen` of `count` experts of width `width` serve a token; see the experts op for the routers."""

    count: int
    chosen: int
    width: int
    router: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    normalise: bool = True
    bias: bool = False
    activation: str = "silu"

    @property
    def over_all(self) -> bool:
        """Whether the weights of those chosen are of a softmax over all, and sum to less than 1."""
        return self.router == "softmax_topk" and not self.normalise


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only model. A layer is Llama's but where the fields say otherwise:

        m = x + residual_scale * after(out(attention(rope(qk_norm(q)), rope(qk_norm(k)), v)))     # q, k, v projected from before(x)
        y = m + residual_scale * after(down(activation(gate) * up))                               # gate, up from before(m); parallel: from before(x)

    with a norm before, after, or both; x starts as embedding_scale times the tokens' rows of the embedding (plus the positions' rows), and the logits are
    logit_cap tanh(logit_scale l / logit_cap).

    Attributes:
        windows: for each layer, the keys a query sees, or None for all.
        ropes: for each layer, how q and k are rotated, or None: not.
        norm_offset: a norm multiplies by that plus its weight.
        qk_norm: over each head's features, or over the whole projection.
        fused_qkv: q, k and v are rows of one linear: three blocks, or three blocks for each head.
        sinks: each head has a logit more in its softmax, without a value.
        positions: rows of a table of learned positions; the first row of text has that many less max_positions before it.
        experts: for each layer, its routed MLP, or None: one MLP for all tokens.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    tied: bool
    quantization: Mapping[str, Any]
    dtype: str  # that the config names, "F32", "F16" or "BF16", to tell sizes before there are files
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    attention_scale: float
    experts: tuple[Experts | None, ...]
    names: Names = Names()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    norm_bias: bool = False
    qk_norm: Literal["head", "width"] | None = None
    fused_qkv: Literal["blocks", "heads"] | None = None
    gated: bool = True
    activation: str = "silu"
    parallel: bool = False
    attention_cap: float | None = None
    sinks: bool = False
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    positions: int = 0

    @property
    def post_norm(self) -> bool:
        return self.names.attention_norms[1] is not None

    @property
    def fused_gate_up(self) -> bool:
        """Whether gate and up are the two halves of one linear's rows."""
        return self.gated and len(self.names.inner) == 1

    @property
    def table(self) -> str:
        """The module whose rows make the logits."""
        return self.names.embedding if self.tied else self.names.head

    def layer_name(self, layer: int) -> str:
        return f"{self.names.layers}.{layer}"

    def sinks_module(self, layer: int) -> str:
        """The module that the sinks of a layer's heads stand in directly."""
        return f"{self.layer_name(layer)}.{self.names.sinks}"

    def split(self, module: str) -> tuple[int, str]:
        """The layer that a module's full name puts it in, and its key there."""
        layer, _, key = module.removeprefix(f"{self.names.layers}.").partition(".")
        return int(layer), key

    def layer_of(self, module: str) -> int:
        """The layer that a module's full name puts it in."""
        return self.split(module)[0]

    def attention_keys(self, layer: int) -> tuple[str, ...]:
        """The linears of a layer's attention, in the order of use."""
        return (*self.names.qkv, self.names.out)

    def mlp_keys(self, layer: int) -> tuple[str, ...]:
        """The linears of a layer's MLP, in the order of use: of a routed one the router, then what stacks the experts' gate, up and down."""
        return self._routed if self.experts[layer] else (*self.names.inner, self.names.down)

    @property
    def _routed(self) -> tuple[str, ...]:
        return (self.names.router, *(f"{self.names.experts}.{part}" for part in ("gate_proj", "up_proj", "down_proj")))

    def linears(self, layer: int) -> dict[str, Shape]:
        """[out, in] of a layer's linears, in the order of use; experts' are stacked: [E, out, in]."""
        return {key: self._linears[key] for key in (*self.attention_keys(layer), *self.mlp_keys(layer))}

    @cached_property
    def _linears(self) -> dict[str, Shape]:
        width, mlp = self.hidden_size, self.intermediate_size
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = (heads + 2 * kv,) if self.fused_qkv else (heads, kv, kv)
        inner = (2 * mlp,) if self.fused_gate_up else (mlp,) * len(self.names.inner)
        shapes = [(out, width) for out in qkv], [(width, heads)], [(out, width) for out in inner], [(width, mlp)]
        keys = (*self.names.qkv, self.names.out, *self.names.inner, self.names.down)
        linears: dict[str, Shape] = dict(zip(keys, [shape for part in shapes for shape in part], strict=True))
        if experts := next(filter(None, self.experts), None):
            inner, outer = (experts.count, experts.width, width), (experts.count, width, experts.width)
            linears |= zip(self._routed, ((experts.count, width), inner, inner, outer), strict=True)
        return linears

    def has_bias(self, key: str) -> bool:
        """Whether one of a layer's linears adds a bias."""
        if key in self.names.qkv or key == self.names.out:
            return self.o_bias if key == self.names.out else self.qkv_bias
        return any(experts and experts.bias for experts in self.experts) if key in self._routed else self.mlp_bias

    def attention_modules(self, layer: int) -> tuple[str, ...]:
        """Full names of all that a layer's attention reads, in the order of use."""
        before, after = self.names.attention_norms
        qk_norms = self.names.qk_norms if self.qk_norm else ()
        sinks = self.names.sinks if self.sinks else None
        return self._full(layer, before, *self.names.qkv, *qk_norms, sinks, self.names.out, after)

    def mlp_modules(self, layer: int) -> tuple[str, ...]:
        """Full names of all that a layer's MLP reads, in the order of use."""
        before, after = self.names.mlp_norms
        return self._full(layer, before, *self.mlp_keys(layer), after)

    def _full(self, layer: int, *keys: str | None) -> tuple[str, ...]:
        return tuple(f"{self.layer_name(layer)}.{key}" for key in keys if key)

    def module_tensors(self, module: str) -> dict[str, Shape]:
        """Name and logical shape (as if nothing were quantised) of every tensor of a module."""
        weight, bias = f"{module}.weight", f"{module}.bias"
        if module in (self.names.embedding, self.names.head):
            return {weight: (self.vocab_size, self.hidden_size)}
        if module == self.names.positions:
            return {weight: (self.positions, self.hidden_size)}
        key = "" if module == self.names.norm else self.split(module)[1]
        if key in self._linears:
            shape = self._linears[key]
            return {weight: shape} | ({bias: shape[:-1]} if self.has_bias(key) else {})
        if self.qk_norm and key in self.names.qk_norms:
            heads = 1 if self.qk_norm == "head" else self.num_heads if key == self.names.qk_norms[0] else self.num_kv_heads
            return {weight: (heads * self.head_dim,)}
        if self.sinks and key == self.names.sinks:
            return {f"{module}.sinks": (self.num_heads,)}
        return {weight: (self.hidden_size,)} | ({bias: (self.hidden_size,)} if self.norm_bias else {})

    def layer_tensors(self, layer: int) -> dict[str, Shape]:
        """Name and logical shape of every tensor of one layer, in the order the layer uses them."""
        modules = (*self.attention_modules(layer), *self.mlp_modules(layer))
        return {name: shape for module in modules for name, shape in self.module_tensors(module).items()}

    def tensors(self) -> dict[str, Shape]:
        """Name and logical shape of every tensor of the model."""
        shapes = self.module_tensors(self.names.embedding)
        if self.positions:
            shapes |= self.module_tensors(self.names.positions)
        for layer in range(self.num_layers):
            shapes |= self.layer_tensors(layer)
        shapes |= self.module_tensors(self.names.norm)
        return shapes if self.tied else shapes | self.module_tensors(self.names.head)

    def adaptable_keys(self) -> tuple[str, ...]:
        """Names, inside a layer, of what can be adapted, in the order of use."""
        return tuple(dict.fromkeys(key for layer in range(self.num_layers) for key in self.linears(layer)))

    def outside_keys(self) -> tuple[str, ...]:
        """Full names of what else can be adapted, embeddings and heads: only generic models have some."""
        return ()

    def choose(self, num_layers: int, keys: Sequence[str]) -> list[str]:
        """Full names of the modules of these keys in the last num_layers layers, in the order in which mlx-lm adapts them, and draws."""
        last = range(self.num_layers - num_layers, self.num_layers)
        return [f"{self.layer_name(layer)}.{key}" for layer in last for key in self._adapted_order(layer) if key in keys]

    def _adapted_order(self, layer: int) -> tuple[str, ...]:
        """mlx.nn walks a layer's modules from the last one set to the first; that is the order in which mlx-lm draws."""
        first, *rest = self.mlp_keys(layer)
        if self.experts[layer]:
            return tuple(reversed((*self.attention_keys(layer), *((*rest, first) if self.names.router_last else (first, *rest)))))
        if not self.names.down_last:
            rest = [rest[-1], *rest[:-1]]
        return tuple(reversed((*self.attention_keys(layer), first, *rest)))

    def pair_shapes(self, module: str, rank: int) -> tuple[Shape, Shape]:
        """The shapes of a module's lora_a and lora_b: [in, R] and [R, out], or of stacked experts [E, R, in] and [E, out, R]."""
        layer, key = self.split(module)
        *count, width_out, width_in = self.linears(layer)[key]
        return ((*count, rank, width_in), (*count, width_out, rank)) if count else ((width_in, rank), (rank, width_out))

    def first_layers(self, count: int) -> "ModelSpec":
        """The same model without the layers above."""
        return replace(self, num_layers=count, windows=self.windows[:count], ropes=self.ropes[:count], experts=self.experts[:count])

    def quantized_as(self, module: str) -> Quantization | None:
        """How the config packs a module, or None when it names it unquantised or nothing is."""
        return quantized_as(self.quantization, module)


def load_spec(config: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
    """The spec that a config describes; `source` names it in errors.

    Raises:
        Unserved: an unserved model_type or RoPE type, or a feature that the family's row does not describe.
        UserError: a missing or impossible value, an unserved quantisation.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise Unserved(f"reading {source}: model_type {model_type!r} is not served. Served: {', '.join(sorted(FAMILIES))}.")
    if (theirs := config.get("quantization_config")) and not config.get("quantization"):
        method = theirs.get("quant_method") if isinstance(theirs, dict) else None
        found = f"the weights are quantised by {method!r}" if method else "it has 'quantization_config' but not MLX's 'quantization', which mlx-lm wants too"
        raise UserError(f"reading {source}: {found}. Give the unquantised model, or one that mlx_lm.convert quantised.")
    if family.inside:
        inner = config.get(family.inside)
        if not isinstance(inner, Mapping):
            raise UserError(f"reading {source}: {family.inside!r} is {inner!r}, expected an object.")
        config = {**config, **inner, **({"vocab_size": config["vocab_size"]} if config.get("vocab_size") else {})}

    fields = Fields(config, family, source)
    fields.require()
    value, heeded = fields.value, fields.heeded
    heads, width = value("num_attention_heads"), value("hidden_size")
    layers, kv_heads = fields.count("num_hidden_layers"), value("num_key_value_heads", heads)
    head_dim = heeded("head_dim", width // heads, int)
    head_dim = fields.checked("head_dim", head_dim, int) if "head_dim" in family.heeds else head_dim
    if heads % kv_heads or head_dim % 2 or not 0 < head_dim <= MOST or (family.fused_qkv == "heads" and heads != kv_heads):
        raise fields.error(f"{heads} heads of width {head_dim} over {kv_heads} key/value heads do not fit together.")
    max_positions = value("max_position_embeddings", 2048)
    attention_bias = value("attention_bias", False, bool) if None in (family.qkv_bias, family.o_bias) else False
    windows, root = _windows(fields, layers), width**0.5
    dtype = config.get("torch_dtype") or config.get("dtype")
    return ModelSpec(
        model_type=str(model_type),
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=value("intermediate_size", None if family.gated else 4 * width),
        vocab_size=value("vocab_size"),
        norm_eps=value(family.eps, 1e-6 if family.norm == "rms" else 1e-5, NUMBER),
        max_positions=max_positions,
        tied=family.tied if isinstance(family.tied, bool) else value("tie_word_embeddings", True, bool),
        quantization=read_quantization(config, source),
        dtype={"float16": "F16", "bfloat16": "BF16"}.get(str(dtype).removeprefix("torch."), "F32"),
        ropes=read_ropes(fields, head_dim, windows),
        windows=windows,
        attention_scale=heeded("attention_multiplier", heeded("query_pre_attn_scalar", head_dim) ** -0.5),
        experts=_experts(fields, layers),
        names=family.names,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=value("mlp_bias", False, bool) if family.mlp_bias is None else family.mlp_bias,
        norm=family.norm,
        norm_offset=family.norm_offset,
        norm_bias=value("layer_norm_bias", False, bool) if family.norm_bias is None else family.norm_bias,
        qk_norm=family.qk_norm,
        sinks=family.sinks,
        fused_qkv=family.fused_qkv,
        gated=family.gated,
        activation=family.activation,
        parallel=family.parallel and heeded("use_parallel_residual", True, bool),
        attention_cap=fields.cap("attn_logit_softcapping"),
        residual_scale=heeded("residual_multiplier", 1.0),
        embedding_scale={None: heeded("embedding_multiplier", 1.0), "root": root, "root in bfloat16": _bfloat16(root)}[family.embedding_scale],
        logit_scale=heeded("logit_scale", 1 / heeded("logits_scaling", 1.0)),
        logit_cap=fields.cap("final_logit_softcapping"),
        positions=max_positions + heeded("position_offset", 0, int) if family.names.positions else 0,
    )


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Layer types say which layers slide; without them all but one in so many do, or all, or, when switched on, Qwen's from max_window_layers."""
    switched = "use_sliding_window" in fields.family.heeds
    if fields.raw("sliding_window") is None or (switched and not fields.raw("use_sliding_window")):
        return (None,) * layers
    window = fields.value("sliding_window")
    if (kinds := fields.raw("layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
            raise fields.error(f"'layer_types' should name full_attention or sliding_attention for each of {layers} layers.")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if "sliding_window_pattern" in fields.family.defaults:
        every = fields.value("sliding_window_pattern")
        return tuple(window if (layer + 1) % every else None for layer in range(layers))
    first = fields.config.get("max_window_layers", MAX_WINDOW_LAYERS) if switched else 0 if fields.family.all_slide else layers
    if not isinstance(first, int):
        raise fields.error(f"'max_window_layers' is {first!r}, expected a number of layers.")
    return tuple(window if layer >= first else None for layer in range(layers))


def _experts(fields: Fields, layers: int) -> tuple[Experts | None, ...]:
    """Of each layer; Qwen's are routed every so many, but for those that are listed."""
    if (router := fields.family.router) is None:
        return (None,) * layers
    count, chosen = fields.count("num_experts"), fields.value("num_experts_per_tok")
    if chosen > count:
        raise fields.error(f"{chosen} of {count} experts serve a token. Download the model again.")
    normalise = fields.raw("norm_topk_prob")
    experts = Experts(count, chosen, fields.value("moe_intermediate_size"), router, bool(normalise), fields.family.expert_bias, fields.family.activation)
    dense, every = fields.raw("mlp_only_layers") or [], fields.heeded("decoder_sparse_step", 1, int)
    if not isinstance(dense, list):
        raise fields.error(f"'mlp_only_layers' is {dense!r}, expected a list of layers.")
    return tuple(experts if layer not in dense and (layer + 1) % every == 0 else None for layer in range(layers))


def _bfloat16(number: float) -> float:
    """The nearest number that bfloat16 has."""
    mantissa, exponent = frexp(number)
    return ldexp(round(mantissa * 256), exponent - 8)
