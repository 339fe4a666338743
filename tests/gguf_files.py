"""Tiny GGUF files for tests, written by the `gguf` package from random weights under Hugging Face's names."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from mesp_mlx.model.gguf import MODULES

WIDTH, HEADS, KV_HEADS, MLP, VOCAB, LAYERS = 64, 4, 2, 128, 96, 2
GGUF_NAMES = {hugging_face: llama_cpp for llama_cpp, hugging_face in MODULES.items()}


def shapes(architecture, tied, biases=False):
    head = WIDTH // HEADS if architecture != "qwen3" else 32
    layer = {
        "input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,),
        "self_attn.q_proj.weight": (HEADS * head, WIDTH), "self_attn.k_proj.weight": (KV_HEADS * head, WIDTH),
        "self_attn.v_proj.weight": (KV_HEADS * head, WIDTH), "self_attn.o_proj.weight": (WIDTH, HEADS * head),
        "mlp.gate_proj.weight": (MLP, WIDTH), "mlp.up_proj.weight": (MLP, WIDTH), "mlp.down_proj.weight": (WIDTH, MLP),
    }  # fmt: skip
    if biases:
        layer |= {name.replace("weight", "bias"): shape[:1] for name, shape in layer.items() if len(shape) == 2}
    if architecture == "qwen2":
        layer |= {f"self_attn.{p}_proj.bias": layer[f"self_attn.{p}_proj.weight"][:1] for p in "qkv"}
    if architecture == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    whole = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    whole |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return whole if tied else whole | {"lm_head.weight": (VOCAB, WIDTH)}


def random_weights(architecture="llama", tied=True, biases=False):
    rng = np.random.default_rng(0)
    return {name: rng.normal(scale=0.2, size=shape).astype(np.float32) for name, shape in shapes(architecture, tied, biases).items()}


def interleaved(weight, heads):
    """llama.cpp's row order, by the rule itself: row 2i of a head was row i, row 2i + 1 was row i + d/2."""
    half = len(weight) // heads // 2
    order = [head * 2 * half + (row // 2 + (row % 2) * half) for head in range(heads) for row in range(2 * half)]
    return weight[order]


def stored(name, weight, architecture):
    if architecture == "llama" and "q_proj" in name:
        return interleaved(weight, HEADS)
    return interleaved(weight, KV_HEADS) if architecture == "llama" and "k_proj" in name else weight


def gguf_name(name):
    *path, kind = name.removeprefix("model.layers.").split(".")
    layer, module = (path[0], ".".join(path[1:])) if name.startswith("model.layers.") else (None, name.removesuffix(f".{kind}"))
    return (f"blk.{layer}." if layer else "") + f"{GGUF_NAMES[module]}.{kind}"


BYTES = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["<|end|>", *(f"t{i}" for i in range(VOCAB - 1))],
    "types": [3] + [1] * (VOCAB - 1),
    "merges": [],
    "ids": {"eos": 0},
}


def write_gguf(path, weights, architecture="llama", kind=Type.F32, tokenizer=BYTES, extra=None, types=None, **metadata):
    """kind: the type of all matrices; types: by Hugging Face name where one differs; metadata: keys as `add_` methods of GGUFWriter name them."""
    writer = gguf.GGUFWriter(path, architecture)
    settings = {
        "context_length": 512, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": MLP, "head_count": HEADS,
        "head_count_kv": KV_HEADS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0,
    }  # fmt: skip
    if architecture == "qwen3":
        settings["key_length"] = 32
    for key, value in (settings | metadata).items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model(tokenizer["model"])
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer["types"])
    if "pre" in tokenizer:
        writer.add_tokenizer_pre(tokenizer["pre"])
        writer.add_token_merges(tokenizer["merges"])
    else:
        writer.add_token_scores(tokenizer["scores"])
    for name, value in tokenizer["ids"].items():
        getattr(writer, f"add_{name}_token_id")(value)
    for name, weight in weights.items():
        weight, its_kind = stored(name, weight, architecture), (types or {}).get(name, kind) if weight.ndim == 2 else Type.F32
        if its_kind in (Type.F32, Type.F16):
            writer.add_tensor(gguf_name(name), weight.astype(np.float16 if its_kind == Type.F16 else np.float32))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, its_kind), raw_dtype=its_kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
