"""How often each frozen weight is multiplied by what is kept: as called for, module by module, and the sums of a real shape."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import each_backend, needs_mlx, ops
from models import make_model, tiny_config, tool, variant_config
from strategies import VOCABULARY, train

from mesp_mlx import reference
from mesp_mlx.data.group import Group
from mesp_mlx.memory.strategy import KEEPS, Strategy
from mesp_mlx.model import work
from mesp_mlx.model.spec import load_spec
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import Store

# SmolLM2's proportions: a third of the heads for keys and values, an MLP of 8/3; one width for each kind of product.
SMALL = tiny_config("llama", hidden_size=96, num_attention_heads=3, num_key_value_heads=1, intermediate_size=256, num_hidden_layers=3)
# Passes of q, k and v; o; gate and up; down; the table: as issue 4 promises them.
PASSES = {"nothing": (4, 3, 3, 2, 2), "replay": (3, 3, 3, 2, 2), "inputs": (3, 2, 3, 2, 2), "attention": (2, 2, 3, 2, 2), "all": (2, 2, 2, 2, 2)}


class NumberedStore(Store):
    """Gives each linear its module's place among the model's, which slices of it keep, as they keep `bits`."""

    def wait(self, loading: Any) -> Any:
        found: Any = super().wait(loading)
        for module, linear in found.items():
            linear["module"] = sorted({name.rpartition(".")[0] for name in self._entries}).index(module)
        return found


def multiplied(folder: Path, backend: Any, keep: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Multiply-adds of an update of two rows of 24 tokens with each frozen weight, as `quantized` is called for them."""
    found, names = Counter(), sorted({name.rpartition(".")[0] for name in read_folder(folder)})
    unpacked = backend.quantized.unpacked

    def counting(inner: Any) -> Any:
        def called(x: Any, linear: Any, *tile: Any, **named: Any) -> Any:
            out, width = backend.quantized.shape(linear)
            found[names[linear["module"]]] += int(np.prod(x.shape[:-1])) * out * width
            return inner(x, linear, *tile, **named)

        return called

    for function in ("matmul", "matmul_transposed"):
        monkeypatch.setattr(backend.quantized, function, counting(getattr(backend.quantized, function)))
    monkeypatch.setattr(backend.quantized, "unpacked", lambda linear, dtype: unpacked(linear, dtype) | {"module": linear["module"]})
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 25), dtype=np.int32)
    group = Group(ids[:, :-1], ids[:, 1:], np.ones((2, 24), bool), (0, 1), (24, 24))
    train(folder, backend, Strategy(keep=keep), updates=1, groups=[group], store_type=NumberedStore)
    return found


@each_backend
@pytest.mark.parametrize("keep", KEEPS)
def test_how_often_each_weight_is_multiplied(tmp_path, monkeypatch, backend, keep):
    """By module, as called for; the first q, k and v get no dx. NumPy multiplies once by gate and up, and by the table, without calling a function."""
    folder, spec, tokens, numpy = make_model(tmp_path / "model", SMALL), load_spec(SMALL), 2 * 24, backend is reference
    found = multiplied(folder, backend, keep, monkeypatch)
    qkv, out, gate_up, down, table = PASSES[keep]
    for layer in range(spec.num_layers):
        times = dict.fromkeys(("q_proj", "k_proj", "v_proj"), qkv - (layer == 0)) | {"o_proj": out}
        times |= dict.fromkeys(("gate_proj", "up_proj"), gate_up - numpy) | {"down_proj": down}
        for key, (width_out, width_in) in spec.linears(layer).items():
            count = times[key.split(".")[1]]
            assert found.pop(f"model.layers.{layer}.{key}") == count * tokens * width_out * width_in, (key, count)
    assert found == {"model.embed_tokens": (table - numpy) * tokens * VOCABULARY * 96}


@needs_mlx
@pytest.mark.parametrize("variant", ["gemma3_text", "olmo2", "glm4", "phi3", "cohere2", "gpt_neox", "gpt2"])
def test_with_all_kept_no_family_multiplies_twice(tmp_path, monkeypatch, variant):
    """Once forward and once backward: norms after a sublayer, fused linears and parallel blocks included; the first layer's first ones get no dx."""
    folder = make_model(tmp_path / "model", variant_config(variant))
    spec, found = load_spec(variant_config(variant)), multiplied(folder, ops, "all", monkeypatch)
    for layer in range(spec.num_layers):
        for key, (width_out, width_in) in spec.linears(layer).items():
            count = 1 if layer == 0 and key in spec.names.qkv else 2
            assert found.pop(f"{spec.layer_name(layer)}.{key}") == count * 2 * 24 * width_out * width_in, key
    assert set(found) == {spec.table}


def test_the_weight_products_of_smollm2():
    """Multiply-adds with frozen weights, a token: 269 million with everything kept, and 365 with nothing (0.55 less each than whole passes: no first dx)."""
    spec = load_spec(tool("make_random_model").SHAPES["smollm2-135m"])
    table, first = spec.vocab_size * spec.hidden_size, 576 * (576 + 2 * 192)
    layers = [spec.num_layers * size for size in (576 * (576 + 2 * 192), 576 * 576, 2 * 576 * 1536, 576 * 1536)]
    found = {keep: work.of_update(spec, "mesp", 4, 256, 8, keep=keep).weights / (4 * 256) for keep in KEEPS}
    for keep, passes in PASSES.items():
        assert found[keep] == sum(times * size for times, size in zip(passes, [*layers, table], strict=True)) - first
    assert round((found["all"] + first) / 1e6) == 269 and round((found["nothing"] + first) / 1e6) == 365
    assert sorted(found.values(), reverse=True) == list(found.values())
