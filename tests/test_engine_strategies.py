"""Whatever a plan chooses, losses and adapters are the same, every byte is read as often as was promised, and nothing is multiplied once too often."""

import dataclasses
import gc
import itertools
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, each_backend
from engines import SCALE, random_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import exactly
from models import make_model, tiny_config
from strategies import DEFAULT, RATE, UPDATES, VOCABULARY, Trained, groups_for, train

from mesp_mlx import reference
from mesp_mlx.data.group import Group
from mesp_mlx.memory.strategy import ALL, KEEPS, Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec
from mesp_mlx.model.stages import Dropout
from mesp_mlx.optim import clip_factor
from mesp_mlx.stream.run_file import RunFile
from mesp_mlx.stream.safetensors import read_folder

CLIP = 0.5
WIDE = {"intermediate_size": 256}  # two tiles of the MLP's width
SHAPES: dict[str, dict[str, Any]] = {
    "tied, biases": tiny_config("qwen2", **WIDE),
    "sliding window": tiny_config("mistral", **WIDE, sliding_window=5, layer_types=["full_attention", "sliding_attention"]),
}
# Every value of every field (of numbers, some) but the default's: what only says where things are and when they are read, and what changes the order of sums.
PLACES: dict[str, list[Any]] = {
    "resident": [1, 2, ALL],
    "prefetch": [0, 3],
    "hold": [False],
    "checkpoints": ["file"],
    "states": ["file"],
    "gradients": ["spilled"],
    "adapter": ["file"],
}
SUMS: dict[str, list[Any]] = {
    "keep": list(KEEPS[1:]),
    "gradients": ["applied"],
    "group_tokens": [1, 1024],
    "query_tile": [7, 64],
    "width_tile": [128],
    "vocabulary_tile": [13, 160],
    "weight_tile": [1, 6000],
}


def alone(fields: dict[str, list[Any]]) -> list[Strategy]:
    return [dataclasses.replace(DEFAULT, **{field: value}) for field, values in fields.items() for value in values]


def name_of(strategy: Strategy) -> str:
    return ",".join(f"{field}={value}" for field, value in dataclasses.asdict(strategy).items() if value != getattr(DEFAULT, field))


TOKENS = sum(int(group.mask.sum()) for group in groups_for(DEFAULT))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {shape: make_model(tmp_path_factory.mktemp("model"), config) for shape, config in SHAPES.items()}


def off(found: dict[str, np.ndarray], want: dict[str, np.ndarray], start: dict[str, np.ndarray]) -> float:
    """The largest, over tensors, of the Frobenius norm of what differs over that of what changed; not a number where either is not."""
    assert found.keys() == want.keys() == start.keys()
    errors = [float(np.linalg.norm(np.float64(found[name]) - want[name]) / np.linalg.norm(np.float64(want[name]) - start[name])) for name in want]
    return max(errors, key=lambda error: (np.isnan(error), error))


class Truth:
    """What each setting gives by default, computed when asked for."""

    def __init__(self, made: dict[str, Path]) -> None:
        self.made, self.known = made, {}

    def default(self, shape: str, backend: Any, clip: float, rate: float, method: str = "mesp") -> Trained:
        key = shape, backend.arrays.name, clip, rate, method
        if key not in self.known:
            self.known[key] = train(self.made[shape], backend, DEFAULT, clip, rate, method)
        return self.known[key]

    def one_update(self, shape: str, clip: float, rate: float) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and adapter in float64."""
        if (key := (shape, clip, rate)) not in self.known:
            start = random_adapter(self.made[shape])
            dropout = Dropout(7, 0, rate) if rate else None
            loss, gradients = exactly(self.made[shape], start, groups_for(DEFAULT), dropout, backend=reference)
            norm = np.sqrt(sum(np.square(value).sum() for value in gradients.values())) / TOKENS
            assert norm > 2 * CLIP, "the bound must cut"
            step = RATE * clip_factor(float(norm), clip) / TOKENS
            self.known[key] = loss, {name: np.float64(start[name]) - step * gradients[name] for name in start}
        return self.known[key]


@pytest.fixture(scope="module")
def truth(made):
    return Truth(made)


def assert_same(truth: Truth, shape: str, backend: Any, strategy: Strategy, clip: float, rate: float, method: str = "mesp", bits: bool = False) -> None:
    start, want = random_adapter(truth.made[shape]), truth.default(shape, backend, clip, rate, method)
    got = train(truth.made[shape], backend, strategy, clip, rate, method)
    if bits:
        assert got.losses == want.losses and all(got.adapter[name].tobytes() == want.adapter[name].tobytes() for name in start)
    else:
        assert got.losses == pytest.approx(want.losses, rel=1e-6)
        assert off(got.adapter, want.adapter, start) <= 1e-5
    adapter = sum(-(-value.nbytes // 4096) * 4096 for value in start.values())
    assert got.left == [adapter if strategy.adapter == "file" else 0] * UPDATES, "nothing else may stay in the file"


@each_backend
@pytest.mark.parametrize(
    ("shape", "clip", "rate"),
    [("tied, biases", 0.0, 0.0), ("tied, biases", CLIP, 0.25), ("sliding window", 0.0, 0.25), ("sliding window", CLIP, 0.0)],
)
def test_one_update_is_the_true_one(truth, backend, shape, clip, rate):
    """By default, and with everything kept, in other groups and other tiles: what all others are compared with."""
    want_loss, want = truth.one_update(shape, clip, rate)
    other = Strategy(keep="all", group_tokens=30, query_tile=5, width_tile=128, vocabulary_tile=33, weight_tile=5000)
    for strategy in (DEFAULT, other):
        got = train(truth.made[shape], backend, strategy, clip, rate, updates=1)
        assert got.losses == [pytest.approx(want_loss, rel=1e-6)]
        assert off(got.adapter, want, random_adapter(truth.made[shape])) <= 1e-5


@each_backend
@pytest.mark.parametrize("strategy", alone(PLACES), ids=name_of)
def test_where_things_are_changes_no_bit(truth, backend, strategy):
    assert_same(truth, "tied, biases", backend, strategy, CLIP, 0.0, bits=True)


@each_backend
@pytest.mark.parametrize("strategy", alone(SUMS), ids=name_of)
def test_what_is_kept_and_how_it_is_tiled_changes_rounding_alone(truth, backend, strategy):
    assert_same(truth, "sliding window", backend, strategy, clip=0.0 if strategy.gradients == "applied" else CLIP, rate=0.0)


def chosen_from(*parts: dict[str, list[Any]]) -> st.SearchStrategy[Strategy]:
    values: dict[str, list[Any]] = {field.name: [getattr(DEFAULT, field.name)] for field in dataclasses.fields(Strategy)}
    for field, others in itertools.chain.from_iterable(part.items() for part in parts):
        values[field] = values[field] + others
    return st.builds(Strategy, **{field: st.sampled_from(options) for field, options in values.items()})


@settings(max_examples=24)
@given(
    strategy=chosen_from(PLACES, SUMS),
    backend=st.sampled_from(BACKENDS),
    shape=st.sampled_from(list(SHAPES)),
    clip=st.sampled_from([0.0, CLIP]),
    rate=st.sampled_from([0.0, 0.25]),
)
def test_all_choices_together(truth, strategy, backend, shape, clip, rate):
    assert_same(truth, shape, backend, strategy, 0.0 if strategy.gradients == "applied" else clip, rate)


@each_backend
@pytest.mark.parametrize("method", ["mebp", "mezo"])
@pytest.mark.parametrize(
    "strategy",
    [*alone({field: PLACES[field][-1:] for field in ("resident", "states", "gradients")})]
    + [Strategy(group_tokens=64, resident=2, prefetch=2, checkpoints="file", states="file", gradients="spilled", adapter="file")],
    ids=name_of,
)
def test_other_methods_wherever_things_are(truth, backend, method, strategy):
    assert_same(truth, "tied, biases", backend, strategy, CLIP, 0.0, method, bits=True)


@each_backend
def test_other_methods_stage_by_stage_and_tile_by_tile(truth, backend):
    assert_same(truth, "sliding window", backend, dataclasses.replace(DEFAULT, gradients="applied", group_tokens=30), 0.0, 0.25, "mebp")
    start, want = random_adapter(truth.made["sliding window"]), truth.default("sliding window", backend, 0.0, 0.25, "mezo")
    tiles = Strategy(group_tokens=30, query_tile=5, width_tile=128, vocabulary_tile=33, weight_tile=5000)
    got = train(truth.made["sliding window"], backend, tiles, 0.0, 0.25, "mezo")
    # Losses are rounded by some 2^-24 of theirs, which a slope shows divided by twice epsilon.
    assert got.losses == pytest.approx(want.losses, rel=1e-6) and off(got.adapter, want.adapter, start) <= 5e-3


@each_backend
def test_adapter_and_moments_alone_stay_in_the_file(made, backend):
    """Adam, with all that can be in the file: the same bits; three regions of a tensor's size are in use after each update, whatever was there in between."""
    everything = Strategy(group_tokens=64, checkpoints="file", states="file", gradients="spilled", adapter="file")
    folder = made["tied, biases"]
    got, want = (train(folder, backend, strategy, clip=CLIP, optimizer="adamw", updates=3) for strategy in (everything, DEFAULT))
    assert got.losses == want.losses and all((got.adapter[name] == value).all() for name, value in want.adapter.items())
    start = random_adapter(folder).values()
    assert got.left == [sum(-(-value.nbytes // 4096) * 4096 + -(-2 * value.nbytes // 4096) * 4096 for value in start)] * 3
    assert got.left[0] < got.file.peak_bytes <= got.file.size_bytes < got.file.peak_bytes + 16 * 4096 and want.file.bytes_written == 0


class WatchedFile(RunFile):
    """Knows how many bytes of the arrays that were put into it, or read from it, are in memory."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.evaluate, self.known = self.watch, {}
        self.alive = self.most = 0

    def put(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            self.watch(list(tree.values()))
        return super().put(tree)

    def watch(self, arrays: list[Any]) -> list[Any]:
        for array in arrays:
            if isinstance(array, np.ndarray) and id(array) not in self.known:
                self.known[id(array)] = array.nbytes
                self.alive += array.nbytes
                weakref.finalize(array, self.gone, id(array))
        self.most = max(self.most, self.alive)
        return arrays

    def gone(self, key: int) -> None:
        self.alive -= self.known.pop(key)


@pytest.mark.parametrize("method", ["mesp", "mebp", "mezo"])
def test_one_group_is_in_memory_when_states_are_in_the_file(made, method):
    """With twelve rows, each a group: of x, dx, what a stage gives for them and what was kept for it, all [T, D], four at most exist at a time."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (12, 33), dtype=np.int32)
    rows = [Group(ids[i : i + 1, :-1], ids[i : i + 1, 1:], np.ones((1, 32), bool), (i,), (32,)) for i in range(12)]
    gc.collect()
    found: Any = train(made["tied, biases"], reference, Strategy(checkpoints="file", states="file"), method=method, groups=rows, run_file=WatchedFile)
    array = 4 * 32 * 64
    assert 2 * array <= found.file.most <= 4 * array + 4096 and found.file.alive == 0
    assert found.file.peak_bytes >= 12 * array * (1 if method == "mezo" else 2)


def expected_loads(spec: Any, strategy: Strategy, updates: int) -> dict[str, int]:
    """How often each stage is read whole in so many updates."""
    resident, loads = build(spec, reference, SCALE, strategy).resident_stages(), {}
    replayed = 0 if strategy.hold or strategy.keep not in ("nothing", "replay") else 1
    for layer in range(spec.num_layers):
        for half, times in (("self_attn", 2 + replayed), ("mlp", 2)):
            name = f"model.layers.{layer}.{half}"
            loads[name] = 1 if name in resident else times * updates
    return loads | {"head": 1 if "head" in resident else updates}


READING = [
    Strategy(),
    Strategy(prefetch=0, hold=False),
    Strategy(prefetch=3, hold=False, keep="replay"),
    Strategy(prefetch=2, hold=False, keep="all", group_tokens=64),
    Strategy(resident=1, keep="inputs", group_tokens=64),
    Strategy(resident=4, prefetch=3, hold=False),
    Strategy(resident=ALL, prefetch=0, hold=False),
]


@each_backend
@pytest.mark.parametrize("shape", SHAPES)
def test_each_byte_is_read_twice(made, backend, shape):
    """Attention three times where it is not held; what is resident once in a run; and the table once, but for rows that tokens and targets name."""
    folder, spec, entries = made[shape], load_spec(SHAPES[shape]), read_folder(made[shape])
    table = "model.embed_tokens" if spec.tied else "lm_head"
    size: Counter[str] = Counter()
    for name, entry in entries.items():
        size[name.rpartition(".")[0]] += entry.size_bytes
    model = build(spec, backend, SCALE)
    for strategy in READING:
        resident = strategy.resident
        updates = 1 + (resident != 0)
        store = train(folder, backend, strategy, updates=updates).store
        want: Counter[str] = Counter()
        for stage in (*itertools.chain.from_iterable(model.segments), model.head):
            want |= Counter(dict.fromkeys(stage.modules, expected_loads(spec, strategy, updates)[stage.name]))
        if resident:
            want[table] = 1
        assert store.loads == want, strategy
        embedded = sum(len(np.unique(group.ids)) for group in groups_for(strategy)) * size["model.embed_tokens"] // VOCABULARY
        targets = sum(len(np.unique(group.targets[group.mask])) for group in groups_for(strategy)) * size[table] // VOCABULARY
        swept = size[table] + targets if not resident else 0
        assert store.bytes_read == sum(times * size[module] for module, times in want.items()) + updates * (embedded + swept), strategy
