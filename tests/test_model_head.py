"""The head's loss, its gradient and its choice of token against plain NumPy, written out over the whole vocabulary."""

import weakref
from typing import Any

import numpy as np
import pytest
from backends import each_backend, mx, needs_mlx, numbers, ops
from engines import random_group
from models import make_model, tiny_config
from oracles import TOLERANCE, assert_no_worse, error

from mesp_mlx import reference
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch
from mesp_mlx.reference.quantized import dequantize
from mesp_mlx.stream.safetensors import read_array, read_folder, to_float32
from mesp_mlx.stream.store import Store

VOCABULARY = 160  # two and a half tiles
TILES = Strategy(vocabulary_tile=64)
TIED = [True, False]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Models with a tied and an untied head, by that."""
    return {tied: make_model(tmp_path_factory.mktemp("head"), tiny_config("llama", num_hidden_layers=1, tie_word_embeddings=tied)) for tied in TIED}


def table(folder) -> np.ndarray:
    """The output table [V, D], float64."""
    entries, spec = read_folder(folder), load_spec(read_config(folder))
    module = "model.embed_tokens" if spec.tied else "lm_head"
    bits, group, _ = spec.quantized_as(module) or (0, 0, "")
    parts = {part: to_float32(read_array(entries[f"{module}.{part}"]), entries[f"{module}.{part}"].dtype) for part in ("scales", "biases")}
    parts["weight"] = read_array(entries[f"{module}.weight"])
    return dequantize({**parts, "bits": bits, "group_size": group}, np.float64)


def norm(folder) -> tuple[np.ndarray, float]:
    entry = read_folder(folder)["model.norm.weight"]
    return to_float32(read_array(entry), entry.dtype).astype(np.float64), load_spec(read_config(folder)).norm_eps


def norm_bytes(folder) -> int:
    return read_folder(folder)["model.norm.weight"].size_bytes


def plain(folder, states, groups) -> tuple[float, list[np.ndarray]]:
    """Loss and dx, position by position, with the norm's Jacobian written out."""
    (weight, eps), rows = norm(folder), table(folder)
    total, gradients = 0.0, []
    for state, group in zip(states, groups, strict=True):
        gradient = np.zeros(state.shape)
        for b, t in zip(*np.nonzero(group.mask), strict=True):
            x, target = state[b, t].astype(np.float64), group.targets[b, t]
            size = 1 / np.sqrt(np.mean(x * x) + eps)
            logits = rows @ (x * size * weight)
            p = np.exp(logits - logits.max())
            p /= p.sum()
            total -= np.log(p[target])
            jacobian = weight[:, None] * (size * np.eye(len(x)) - size**3 / len(x) * np.outer(x, x))
            p[target] -= 1
            gradient[b, t] = (p @ rows) @ jacobian
        gradients.append(gradient)
    return total, gradients


def states_for(groups, width=64, seed=4, size=1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(size * rng.normal(size=(*group.ids.shape, width))).astype(np.float32) for group in groups]


def loss_of(folder, backend, states, groups, gradient=True, dtype=None, watch: Any = Store):
    """(loss, dx of each group, the store) by the head."""
    spec = load_spec(read_config(folder))
    head = build(spec, backend, 1.0, TILES).head
    arrays = [backend.arrays.asarray(state) for state in states]
    held = [{"x": array if dtype is None else backend.arrays.astype(array, dtype)} for array in arrays]
    with watch(read_folder(folder), spec, backend) as store, store.open(head) as w:
        losses, dstates = head.loss(w, held, [Batch(group) for group in groups], gradient=gradient)
    loss = sum(losses)
    assert len(losses) == len(groups) and type(loss) is float and all(dstate.keys() == {"x"} for dstate in dstates)
    return loss, [numbers(dstate["x"]) for dstate in dstates], store


UNEQUAL = [random_group(VOCABULARY, [13, 9, 5]), random_group(VOCABULARY, [21], seed=3, first_row=3)]


@pytest.mark.parametrize("tied", TIED)
def test_in_float64_it_is_the_plain_loss(made, tied):
    """Nothing but rounding lies between one sweep and the whole."""
    states = [state.astype(np.float64) for state in states_for(UNEQUAL)]
    loss, gradients, _ = loss_of(made[tied], reference, states, UNEQUAL, dtype=np.float64)
    want_loss, want = plain(made[tied], states, UNEQUAL)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert all(gradient.dtype == np.float64 and error(gradient, wanted) <= 1e-12 for gradient, wanted in zip(gradients, want, strict=True))


@each_backend
@pytest.mark.parametrize("tied", TIED)
def test_loss_and_gradient(made, backend, tied):
    states = states_for(UNEQUAL)
    loss, gradients, store = loss_of(made[tied], backend, states, UNEQUAL)
    want_loss, want = plain(made[tied], states, UNEQUAL)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert max(error(gradient, wanted) for gradient, wanted in zip(gradients, want, strict=True)) <= 2e-6
    for gradient, group in zip(gradients, UNEQUAL, strict=True):
        assert (gradient[~group.mask] == 0).all() and (gradient[group.mask] != 0).any(axis=-1).all()
    module = "model.embed_tokens" if tied else "lm_head"
    read = sum(entry.size_bytes for name, entry in read_folder(made[tied]).items() if name.startswith((f"{module}.", "model.norm.")))
    row = (read - norm_bytes(made[tied])) // VOCABULARY
    targets = sum(len(np.unique(group.targets[group.mask])) for group in UNEQUAL)
    assert store.bytes_read == read + row * targets, "each row of the table once, for all groups, and those of each group's targets"
    assert store.loads == {"model.norm": 1}


@needs_mlx
@pytest.mark.parametrize("tied", TIED)
def test_equals_the_autodiff_of_mlx(made, tied):
    import mlx.nn as nn

    states, (weight, eps), rows = states_for(UNEQUAL), norm(made[tied]), mx.array(table(made[tied]).astype(np.float32))

    def whole(*xs):
        total = mx.zeros(())
        for x, group in zip(xs, UNEQUAL, strict=True):
            logits = mx.fast.rms_norm(x, mx.array(weight.astype(np.float32)), eps) @ rows.T
            total = total + (nn.losses.cross_entropy(logits, mx.array(group.targets)) * mx.array(group.mask)).sum()
        return total

    want_loss, want = mx.value_and_grad(whole, argnums=(0, 1))(*map(mx.array, states))
    loss, gradients, _ = loss_of(made[tied], ops, states, UNEQUAL)
    assert loss == pytest.approx(want_loss.item(), rel=1e-6)
    assert max(error(gradient, np.array(wanted)) for gradient, wanted in zip(gradients, want, strict=True)) <= 2e-6


@each_backend
def test_without_a_gradient_the_loss_is_the_same(made, backend):
    states = states_for(UNEQUAL)
    loss, gradients, store = loss_of(made[True], backend, states, UNEQUAL, gradient=False)
    assert gradients == [] and loss == pytest.approx(loss_of(made[True], backend, states, UNEQUAL)[0], rel=1e-7)


@each_backend
def test_groups_are_summed(made, backend):
    """And a group's gradient is its own, whatever stands beside it."""
    states = states_for(UNEQUAL)
    loss, gradients, _ = loss_of(made[True], backend, states, UNEQUAL)
    apart = [loss_of(made[True], backend, [state], [group]) for state, group in zip(states, UNEQUAL, strict=True)]
    assert loss == pytest.approx(apart[0][0] + apart[1][0], rel=1e-7)
    for gradient, (_, (alone,), _) in zip(gradients, apart, strict=True):
        assert error(gradient, alone) <= 1e-6


@each_backend
def test_a_group_with_nothing_supervised(made, backend):
    groups = [UNEQUAL[0], random_group(VOCABULARY, [6, 4], seed=9, supervised=0.0)]
    assert not groups[1].mask.any()
    states = states_for(groups)
    loss, gradients, _ = loss_of(made[False], backend, states, groups)
    want_loss, want = plain(made[False], states, groups)
    assert loss == pytest.approx(want_loss, rel=1e-6) and error(gradients[0], want[0]) <= 2e-6
    assert gradients[1].shape == states[1].shape and (gradients[1] == 0).all()
    loss, gradients, _ = loss_of(made[False], backend, states[1:], groups[1:])
    assert loss == 0 and (gradients[0] == 0).all()


@each_backend
def test_logits_too_large_to_exponentiate(made, backend):
    """A final norm whose weight is 500 times larger: e^logit overflows, the loss does not."""
    folder, groups = made[True], UNEQUAL[:1]
    states, (weight, eps), rows = states_for(groups), norm(folder), table(folder)
    spec = load_spec(read_config(folder))
    head = build(spec, backend, 1.0, TILES).head
    with Store(read_folder(folder), spec, backend) as store, store.open(head) as w:
        w["model.norm"]["weight"] = backend.arrays.asarray((500 * weight).astype(np.float32))
        (loss,), (dstate,) = head.loss(w, [{"x": backend.arrays.asarray(states[0])}], [Batch(groups[0])])
    x = states[0][groups[0].mask].astype(np.float64)
    logits = (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (500 * weight).astype(np.float32)) @ rows.T
    top = logits.max(axis=1)
    assert top.max() > 500
    want = np.sum(top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - logits[np.arange(len(x)), groups[0].targets[groups[0].mask]])
    assert loss == pytest.approx(want, rel=1e-6) and np.isfinite(numbers(dstate["x"])).all()


@needs_mlx
def test_in_bfloat16_it_is_no_worse_than_plain_code(tmp_path):
    """The dtype of a GPU's activations: sums are float32, dx has the state's dtype."""
    folder = make_model(tmp_path / "model", tiny_config("llama", num_hidden_layers=1), dtype="bfloat16")
    halves = [mx.array(state).astype(mx.bfloat16) for state in states_for(UNEQUAL)]
    rounded = [numbers(half) for half in halves]
    want_loss, want = plain(folder, rounded, UNEQUAL)
    loss, gradients, _ = loss_of(folder, ops, rounded, UNEQUAL, dtype=mx.bfloat16)

    stored: Any = mx.load(str(folder / "model.safetensors"))
    rows = mx.dequantize(*(stored[f"model.embed_tokens.{part}"] for part in ("weight", "scales", "biases")), group_size=32, bits=4)
    assert rows.dtype == stored["model.norm.weight"].dtype == mx.bfloat16

    def naive(*xs):
        total = mx.zeros(())
        for x, group in zip(xs, UNEQUAL, strict=True):
            logits = mx.fast.rms_norm(x, stored["model.norm.weight"], norm(folder)[1]) @ rows.T
            losses = mx.logsumexp(logits.astype(mx.float32), axis=-1) - mx.take_along_axis(logits, mx.array(group.targets)[..., None], -1)[..., 0]
            total = total + (losses * mx.array(group.mask)).sum()
        return total

    naive_loss, naive_gradients = mx.value_and_grad(naive, argnums=(0, 1))(*halves)
    assert abs(loss - want_loss) <= TOLERANCE["low precision"] * abs(naive_loss.item() - want_loss)
    assert_no_worse(gradients, [numbers(gradient) for gradient in naive_gradients], want)


class Watching(Store):
    """Counts the tiles in memory when another is asked for."""

    most = 0

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.alive = 0

    def start(self, wanted: Any) -> Any:
        loading: Any = super().start(wanted)
        if any(runs is not None for runs in wanted.values()):
            self.alive += 1
            self.most = max(self.most, self.alive)
            loading.tile = True
        return loading

    def wait(self, loading: Any) -> Any:
        modules = super().wait(loading)
        if hasattr(loading, "tile"):
            (linear,) = modules.values()
            weakref.finalize(linear["weight"], self.gone)
        return modules

    def gone(self) -> None:
        self.alive -= 1


@each_backend
def test_two_tiles_are_in_memory_at_most(made, backend):
    *_, store = loss_of(made[True], backend, states_for(UNEQUAL), UNEQUAL, watch=Watching)
    assert store.most == 2 and store.alive == 0


def best_of(folder, backend, state) -> int:
    spec = load_spec(read_config(folder))
    head = build(spec, backend, 1.0, TILES).head
    with Watching(read_folder(folder), spec, backend) as store, store.open(head) as w:
        token = head.likeliest(w, {"x": backend.arrays.asarray(state)})
    assert store.most == 2
    return token


@each_backend
@pytest.mark.parametrize("tied", TIED)
def test_the_likeliest_token(made, backend, tied):
    """Of the last position; over many states, so that each tile wins some."""
    (weight, eps), rows, won = norm(made[tied]), table(made[tied]), set()
    for seed in range(24):
        state = np.random.default_rng(seed).normal(size=(1, 3, 64)).astype(np.float32)
        x = state[0, -1].astype(np.float64)
        logits = rows @ (x / np.sqrt(np.mean(x * x) + eps) * weight)
        token = best_of(made[tied], backend, state)
        assert type(token) is int and token == int(np.argmax(logits))
        won.add(token // 64)
    assert won == {0, 1, 2}


@each_backend
def test_of_equal_logits_the_first(made, backend):
    assert best_of(made[True], backend, np.zeros((1, 2, 64), np.float32)) == 0
