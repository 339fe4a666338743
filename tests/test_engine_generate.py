"""Greedy replies through the streamed stages are mlx-lm's own greedy replies."""

import itertools
from typing import Any

import numpy as np
import pytest
from backends import each_backend, mx, needs_mlx
from engines import SCALE, random_adapter
from models import PROJECTIONS, make_model, tiny_config

from mesp_mlx import reference
from mesp_mlx.engine.generate import greedy_reply
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import Store

PROMPT = (3, 141, 59, 26, 53)
TILES = Strategy(vocabulary_tile=64)  # the output table takes three
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {family: make_model(tmp_path_factory.mktemp(family), tiny_config(family, tie_word_embeddings=family == "qwen2")) for family in FAMILIES}


def reply(folder, backend, prompt=PROMPT, stops=(), most=12, adapter=None, watch=Store) -> tuple[list[int], Store]:
    spec = load_spec(read_config(folder))
    arrays = {name: backend.arrays.asarray(value) for name, value in (adapter or {}).items()}
    with watch(read_folder(folder), spec, backend) as store:
        return greedy_reply(build(spec, backend, SCALE, TILES), store, arrays, prompt, stops, most), store


def mlx_lm_reply(folder, adapter, most=12) -> list[int]:
    from mlx_lm.generate import generate_step
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model: Any = load_model(folder)[0]
    model.set_dtype(mx.float32)
    if adapter:
        linear_to_lora_layers(model, len(model.layers), {"rank": 4, "scale": SCALE, "dropout": 0.0, "keys": list(PROJECTIONS)})
        model.load_weights([(name, mx.array(value)) for name, value in adapter.items()], strict=False)
    return [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=most)]


@needs_mlx
@each_backend
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_reply_of_mlx_lm(made, backend, family):
    """Without an adapter and with one, which changes it."""
    replies = []
    for adapter in (None, random_adapter(made[family])):
        replies.append(reply(made[family], backend, adapter=adapter)[0])
        assert replies[-1] == mlx_lm_reply(made[family], adapter)
    assert replies[0] != replies[1] and all(len(found) == 12 and len(set(found)) > 4 for found in replies)


@each_backend
def test_it_ends_before_a_stop_token(made, backend):
    whole, _ = reply(made["llama"], backend)
    for stop in dict.fromkeys(whole):
        assert reply(made["llama"], backend, stops=(158, stop))[0] == whole[: whole.index(stop)]
    assert reply(made["llama"], backend, stops=sorted(set(range(160)) - set(whole)))[0] == whole


@each_backend
def test_it_ends_at_the_limit(made, backend):
    whole, _ = reply(made["llama"], backend)
    for most in (0, 1, 5):
        found, store = reply(made["llama"], backend, most=most)
        assert found == whole[:most]
        assert set(store.loads.values()) == ({most} if most else set()), "one forward pass for each token"


@each_backend
def test_a_reply_goes_on_where_it_ended(made, backend):
    """Each token is what follows all before it; the prompt given is left as it was."""
    prompt = list(PROMPT)
    whole, _ = reply(made["qwen2"], backend, prompt)
    assert prompt == list(PROMPT)
    assert reply(made["qwen2"], backend, [*prompt, *whole[:7]], most=5)[0] == whole[7:]
    assert all(type(token) is int for token in whole)


def test_a_prompt_may_be_an_array(made):
    assert reply(made["llama"], reference, np.array(PROMPT))[0] == reply(made["llama"], reference)[0]


@each_backend
def test_each_stage_is_read_ahead(made, backend):
    """But the first of each token, whose ids must be known."""
    events: list[str] = []

    class Recording(Store):
        def load(self, stage: Any) -> Any:
            events.append(f"load {stage.name}")
            return super().load(stage)

        def free(self, stage: Any, weights: Any) -> None:
            events.append(f"free {stage.name}")
            super().free(stage, weights)

    reply(made["llama"], backend, most=2, watch=Recording)
    names = ["model.embed_tokens", *(f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("self_attn", "mlp")), "head"]
    between = [line for before, name in itertools.pairwise(names) for line in (f"load {name}", f"free {before}")]
    one = [f"load {names[0]}", *between, f"free {names[-1]}"]
    assert events == one + one
