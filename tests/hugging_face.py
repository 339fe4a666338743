"""Folders of the families' models as Hugging Face's library saves them."""

import json
from pathlib import Path

import numpy as np
from models import variant_config

from mesp_mlx.model.spec import load_spec
from mesp_mlx.stream.safetensors import Writer

# What Hugging Face calls the modules that mlx-lm calls otherwise, and what its folders have beside them.
HUGGING_FACE = {
    "gpt_neox": [("model.h.", "gpt_neox.layers."), ("model.embed_out.", "embed_out."), ("model.", "gpt_neox.")],
    "gpt2": [("model.", "")],
    "opt": [("model.decoder.", "decoder.")],  # as OPTModel saves it
}
EXTRA = {
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": (1, 1, 8, 8), "gpt_neox.layers.1.attention.masked_bias": (1,),
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": (2,),
    },
    "gpt2": {"h.1.attn.bias": (1, 1, 8, 8)},
    "gemma3": {"vision_tower.vision_model.embeddings.weight": (4, 64), "multi_modal_projector.mm_soft_emb_norm.weight": (64,)},
    "llama": {"lm_head.weight": (160, 64)},  # a copy of the embedding, which mlx-lm drops
}  # fmt: skip
STORED_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # by GPT-2


def write_hugging_face_folder(folder: Path, variant: str) -> dict[str, np.ndarray]:
    """A folder of random weights named, and for GPT-2 laid out, as Hugging Face does. Returns the weights by mlx-lm's names."""
    rng, config = np.random.default_rng(0), variant_config(variant)
    family, weights, stored = config["model_type"], {}, {}
    for name, shape in load_spec(config).tensors().items():
        weights[name] = rng.normal(scale=0.3, size=shape).astype(np.float32)
        theirs = next((old + name.removeprefix(new) for new, old in HUGGING_FACE.get(family, []) if name.startswith(new)), name)
        transposed = family == "gpt2" and name.endswith(STORED_TRANSPOSED)
        stored[theirs] = np.ascontiguousarray(weights[name].T) if transposed else weights[name]
    stored |= {name: np.zeros(shape, np.float32) for name, shape in EXTRA.get(family, {}).items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with Writer(folder / "model.safetensors", {name: ("F32", array.shape) for name, array in stored.items()}, {"format": "pt"}) as writer:
        for name, array in stored.items():
            writer.write(name, array)
    return weights
