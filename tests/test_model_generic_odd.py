"""Model files that nobody here has seen, streamed as they are: what their code may do between layers and in them."""

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from backends import mx

pytest.importorskip("mlx_lm")

from test_model_generic import assert_exact, spec_of, streamed, whole  # noqa: E402

ODD = """
    from dataclasses import dataclass

    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.base import BaseModelArgs, create_attention_mask


    @dataclass
    class ModelArgs(BaseModelArgs):
        model_type: str
        width: int
        depth: int
        words: int


    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.mix, self.gate, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)
            self.strength = mx.zeros((width,))
            self.norm = nn.LayerNorm(width)

        def __call__(self, x, carry, mask):
            h = self.norm(x)
            q, k, v = mx.split(self.mix(h)[:, None], 3, axis=-1)
            y = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)[:, 0]
            gate = mx.sigmoid(self.gate(h) + carry) * (1 + self.strength)
            return x + self.out(y * gate), {"gate": gate}


    class Model(nn.Module):
        def __init__(self, args):
            super().__init__()
            self.embed, self.head = nn.Embedding(args.words, args.width), nn.Linear(args.width, args.words)
            self.blocks = [Block(args.width) for _ in range(args.depth)]

        @property
        def layers(self):
            return self.blocks

        def __call__(self, ids, cache=None):
            x = self.embed(ids)
            mask, carry = create_attention_mask(x), mx.zeros_like(x)
            for block in self.blocks:
                x, found = block(x, carry, mask)
                carry = 0.5 * carry + found["gate"]
            return 20 * mx.tanh(0.3 * self.head(x) / 20)
"""


def odd(folder: Path, source: str) -> Path:
    """A random model of code of its own."""
    (folder / "odd.py").write_text(source)
    config = {"model_type": "odd", "model_file": "odd.py", "width": 32, "depth": 3, "words": 96}
    (folder / "config.json").write_text(json.dumps(config))
    rng, shapes = np.random.default_rng(0), spec_of(folder).tensors()
    tensors = {name: mx.array((0.3 * rng.normal(size=shape)).astype(np.float32)) for name, shape in shapes.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def test_a_model_nobody_here_has_seen(tmp_path):
    """A gate that one block leaves to the next, a dict between them, a scale and a cap of its own."""
    model, loss, gradients, adapter = streamed(odd(tmp_path, textwrap.dedent(ODD)))
    assert len(adapter) == 2 * 3 * 3 and [stage.name for (stage,) in model.segments] == ["blocks.0", "blocks.1", "blocks.2"]
    assert model.head.end.engine.wiring.head == ("head", 0.3, 20.0)
    assert_exact(loss, gradients, whole(tmp_path, adapter))


CALL, RETURN = "x, found = block(x, carry, mask)", 'return x + self.out(y * gate), {"gate": gate}'
LOST = 'return {"gate": gate}'


@pytest.mark.parametrize(
    "changes",
    [
        {CALL: "found = block(x, carry, mask)", RETURN: f"x += self.out(y * gate); {LOST}"},
        {CALL: "y, found = block(x, carry, mask); x = 0.5 * x + y", RETURN: 'x += self.out(y * gate); return 0.7 * x, {"gate": gate}'},
        {CALL: "x, found = block(x, carry=carry, mask=mask)", RETURN: f"carry[...] = 0.5 * carry + gate; {RETURN}"},
        {CALL: "x = {0: x}; found = block(x, carry, mask); x = x[0]", "self.norm(x)": "self.norm(x[0])", RETURN: f"x[0] += self.out(y * gate); {LOST}"},
        {CALL: "x = [x]; found = block(x, carry, mask); x = x[0]", "self.norm(x)": "self.norm(x[0])", RETURN: f"x[0] *= self.out(y * gate); {LOST}"},
    ],
    ids=["all of it", "part of it", "by name", "in a dict", "in a list"],
)
def test_what_a_layer_changes_in_place(changes, tmp_path):
    """The model goes on with what became of it."""
    source = textwrap.dedent(ODD)
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    _, loss, gradients, adapter = streamed(odd(tmp_path, source))
    assert_exact(loss, gradients, whole(tmp_path, adapter))


def test_a_model_that_catches_its_layers_errors(tmp_path):
    """A walk leaves it all the same."""
    caught = f"try: {CALL}\n            except Exception: raise RuntimeError from None"
    source = textwrap.dedent(ODD).replace(CALL, caught)
    _, loss, gradients, adapter = streamed(odd(tmp_path, source))
    assert_exact(loss, gradients, whole(tmp_path, adapter))


def test_dropout_of_its_own_is_off(tmp_path):
    """It would drop other things forward than backward: --dropout is ours."""
    dropping = textwrap.dedent(ODD).replace("self.norm(x)", "self.drop(self.norm(x))")
    dropping = dropping.replace("self.norm = nn", "self.drop = nn.Dropout(0.5)\n        self.norm = nn")
    (tmp_path / "plain").mkdir()
    _, loss, gradients, adapter = streamed(odd(tmp_path, dropping))
    assert_exact(loss, gradients, whole(odd(tmp_path / "plain", textwrap.dedent(ODD)), adapter))
