"""Which plan is chosen: within the budget, the faster the larger the budget, and refused with a reason where nothing fits."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tool

from mesp_mlx import adapter as adapters
from mesp_mlx.errors import UserError
from mesp_mlx.memory import choose, plan
from mesp_mlx.memory.choose import DoesNotFit
from mesp_mlx.memory.plan import TYPICAL, Workload
from mesp_mlx.memory.strategy import ALL, KEEPS
from mesp_mlx.model.spec import load_spec

BASE = 40_000_000


def workload(name: str = "smollm2-135m", layers: int | None = None, **fields: Any) -> Workload:
    shape = tool("make_random_model").SHAPES[name] | {"quantization": {"bits": 4, "group_size": 64}}
    spec = load_spec(shape | ({"num_hidden_layers": layers} if layers else {}))
    return Workload(spec, tuple(adapters.choose_modules(spec)), **fields)


def total(load: Workload, strategy: Any) -> int:
    return plan.make(load, strategy, BASE).total_bytes


def smallest(load: Workload) -> int:
    return min(total(load, choose.least(load, place)) for place in ("memory", "file"))


LOADS = st.builds(
    workload,
    st.sampled_from(["smollm2-135m", "qwen2.5-0.5b"]),
    st.integers(1, 6),
    method=st.sampled_from(["mesp", "mesp", "mebp", "mezo"]),
    backend=st.sampled_from(["mlx", "numpy"]),
    rank=st.integers(1, 64),
    moments=st.integers(0, 2),
    clip=st.booleans(),
    rows=st.integers(1, 9),
    width=st.integers(8, 1500),
)


@settings(max_examples=40, deadline=None)
@given(LOADS, st.floats(0, 1.2))
def test_any_budget_from_the_least_upwards_is_kept(load, part):
    low, high = smallest(load), total(load, choose.fastest(load))
    budget = low + int(part * max(high - low, 0))
    chosen = choose.choose(load, budget, BASE)
    assert chosen.total_bytes <= budget
    assert chosen.strategy.gradients in (("held", "spilled") if load.clip and load.method != "mezo" else ("applied",))
    if budget >= high:
        assert chosen.strategy == choose.fastest(load)
    with pytest.raises(DoesNotFit, match="even with the least memory"):
        choose.choose(load, low - 1, BASE)


def test_more_memory_is_not_slower():
    load = workload("qwen2.5-0.5b", rows=4)
    low, high = smallest(load), total(load, choose.fastest(load))
    chosen = [choose.choose(load, low + (high - low) * k // 12, BASE) for k in range(13)]
    seconds = [plan.seconds(TYPICAL) for plan in chosen]
    assert all(later <= 1.05 * earlier for earlier, later in zip(seconds, seconds[1:], strict=False))
    assert seconds[-1] < 0.8 * seconds[0]
    assert chosen[-1].strategy.resident == ALL and chosen[-1].strategy.keep == "all"
    assert chosen[0].strategy.resident <= 1 and chosen[0].strategy.checkpoints == "file"


def test_what_goes_to_the_file_is_little():
    """A disk wears by being written to."""
    load = workload("qwen2.5-0.5b", rows=4)
    for megabytes in range(100, 400, 25):
        chosen = choose.choose(load, megabytes * 1_000_000, BASE).strategy
        assert chosen.checkpoints == "memory" or chosen.keep in KEEPS[:2]


def test_a_choice_by_hand_stays():
    load = workload(rows=4, clip=False)
    fixed = {"keep": "inputs", "prefetch": 2, "checkpoints": "file", "group_tokens": 512}
    for budget in (smallest(load) * 2, 10**10):
        chosen = choose.choose(load, budget, BASE, fixed=fixed)
        assert {key: getattr(chosen.strategy, key) for key in fixed} == fixed
    with pytest.raises(DoesNotFit):
        choose.choose(load, smallest(load), BASE, fixed={"resident": ALL})


def test_a_refusal_says_what_would_help():
    load = workload("qwen2.5-3b", rank=64)
    with pytest.raises(DoesNotFit) as refused:
        choose.choose(load, 50_000_000, BASE)
    needed = min((plan.make(load, choose.least(load, place), BASE) for place in ("memory", "file")), key=lambda plan: plan.total_bytes)
    said = str(refused.value)
    assert "within 50.0 MB" in said and f"takes {needed.total_bytes / 1e6:,.1f} MB" in said and "weights" in said
    raised = said.partition("Raise --memory to ")[2].split(",")[0].rstrip(".")
    advised = choose.parse_budget(raised, 0)
    assert isinstance(advised, int) and needed.total_bytes < advised <= needed.total_bytes + 2_000_000
    assert choose.choose(load, advised, BASE).total_bytes <= advised, "the advice is not circular"
    quantised = dataclasses.replace(load, spec=dataclasses.replace(load.spec, quantization={"bits": 4, "group_size": 64}))
    asked = [choose.reason(plan.make(each, choose.least(each), BASE), 50_000_000) for each in (load, quantised)]
    assert ["a model quantised to 4 bits" in each for each in asked] == ["weights" in asked[0], False]
    assert refused.value.plan.strategy == needed.strategy


def test_every_byte_costs_the_least_first():
    """Just below the fastest plan, what goes is residence: reading ahead hides behind computing, and recomputing does not."""
    load = workload("qwen2.5-0.5b", rows=4, clip=True)
    chosen = choose.choose(load, total(load, choose.fastest(load)) - 1, BASE).strategy
    assert chosen.keep == "all" and chosen.resident != 0
    assert chosen.resident != ALL or chosen.gradients == "spilled"


MEMORY = 8 * 2**30
SIZES = {"2GB": 2 * 10**9, "512MB": 512 * 10**6, "1.5GiB": 3 * 2**29, "50%": 4 * 2**30, " 100 mib ": 100 * 2**20, "0.5gb": 5 * 10**8}


@pytest.mark.parametrize(("text", "size"), [*SIZES.items(), ("auto", "auto"), ("Least", "least"), ("fastest", "fastest")])
def test_budgets(text, size):
    assert choose.parse_budget(text, MEMORY) == size


@pytest.mark.parametrize("text", ["", "2", "GB", "-1GB", "0MB", "150%", "2 G B", "1e9B", "all", "1..5GB"])
def test_budgets_refused(text):
    with pytest.raises(UserError, match="--memory"):
        choose.parse_budget(text, MEMORY)


@pytest.mark.parametrize(("what", "field"), [("seq", "width"), ("batch", "rows"), ("rank", "rank")])
def test_the_largest_that_fits(what, field):
    load = workload(layers=4, rows=2, width=64)
    budget = smallest(load) + 20_000_000
    found = choose.find_largest(what, load, budget, BASE, most=3000)
    assert getattr(load, field) < found
    assert smallest(dataclasses.replace(load, **{field: found})) <= budget
    assert found == 3000 or smallest(dataclasses.replace(load, **{field: found + 1})) > budget
    assert choose.find_largest(what, load, BASE, BASE) == 0
