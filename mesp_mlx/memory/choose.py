"""Which plan: the fastest that fits a budget.

The reasoning. The fastest plan keeps every frozen weight in memory and computes no product twice. Whatever it takes above the budget must go, and each way
of giving memory up costs time: so the way that costs the least seconds per byte saved is taken first, again and again, until the plan fits. Bytes are
those above the budget, summed over phases, because a step is as large as its fullest phase and giving up elsewhere saves nothing.

What an update pays for a byte, by option, from cheap to dear on most shapes:

- gradients applied as they come cost nothing; clipping by a global norm forbids it, and then spilling them costs one write and one read;
- resident weights: a byte given up is read twice an update, behind the computation when it is read ahead. A few hundred tokens hide it;
- held attention weights: read a third time;
- checkpoints in the file: a byte is written and read once. A disk wears by being written to: only the inputs of layers go there, and no more is kept;
- keeping less for backward: a byte of q, k, v or of gate and up is one product of the model's width for each of its numbers: dear for short rows, and
  the dearer the slower the machine computes;
- arrays between stages in the file: written and read at every stage; smaller groups with them: every weight dequantised once for each;
- adapters and moments in the file: opened stage by stage, three times an update;
- reading nothing ahead: all of the reading shows. Smaller tiles: more calls for the same work.

What is left of the budget in the end goes to resident stages, and to whatever else still fits. Last of all comes the least plan there is, and what is
larger than that is refused.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from mesp_mlx.errors import UserError
from mesp_mlx.memory import plan as plans
from mesp_mlx.memory import tiles
from mesp_mlx.memory.plan import TYPICAL, Plan, Speeds, Workload
from mesp_mlx.memory.strategy import ALL, KEEPS, Strategy
from mesp_mlx.units import megabytes

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
GROUP_TOKENS = 1024
FLAT = 2  # times the least plan: about what it takes to compute no stage's input twice
PLACES: tuple[Literal["memory"], Literal["file"]] = ("memory", "file")
LEAST_WEIGHT_TILE, LEAST_WIDTH_TILE = 1_000_000, 256


class DoesNotFit(UserError):
    """Not even the least plan fits; `plan` is that one."""

    def __init__(self, message: str, plan: Plan):
        super().__init__(message)
        self.plan = plan


def fastest(workload: Workload) -> Strategy:
    """Everything resident, nothing computed twice."""
    keep = "nothing" if workload.plain or workload.method == "mezo" else "all"
    return Strategy(resident=ALL, keep=keep, gradients=_sink(workload), group_tokens=GROUP_TOKENS)


def least(workload: Workload, adapter: Literal["memory", "file"] = "memory") -> Strategy:
    """The smallest peak that there is, with adapters and moments in memory unless told otherwise."""
    if workload.method == "backprop":
        return fastest(workload)
    exact, saves = workload.method != "mezo", workload.method in ("mesp", "mebp")
    strategy = Strategy(
        resident=0,
        prefetch=0,
        hold=False,
        keep="nothing",
        checkpoints="file" if saves else "memory",
        states="file",
        gradients="spilled" if workload.clip and exact else "applied",
        adapter=adapter,
        group_tokens=1,
    )
    # Of one group in memory the head reads smaller pieces of its table: less, where the head is the fullest phase. Tiles of short rows are small anyway.
    kinds = [dataclasses.replace(strategy, states=states) for states in ("file", "memory")]
    return min((_smallest_tiles(workload, kind) for kind in kinds), key=lambda strategy: plans.make(workload, strategy, 0).arrays_peak_bytes)


def choose(workload: Workload, budget_bytes: int, base_bytes: int, speeds: Speeds = TYPICAL, fixed: Mapping[str, Any] | None = None) -> Plan:
    """The fastest plan within a budget that the operating system's count keeps; `fixed` are fields of Strategy set by hand.

    Raises:
        DoesNotFit: no plan is that small.
    """
    fixed = fixed or {}

    def make(strategy: Strategy) -> Plan:
        return plans.make(workload, dataclasses.replace(strategy, **fixed), base_bytes)

    def excess(plan: Plan) -> int:
        over = plan.total_bytes - plan.arrays_peak_bytes - budget_bytes
        return sum(max(0, size + over) for size in plan.by_phase().values())

    smallest = min((make(least(workload, adapter)) for adapter in PLACES), key=lambda plan: plan.total_bytes)
    if excess(smallest):
        raise DoesNotFit(reason(smallest, budget_bytes), smallest)
    current = make(fastest(workload))
    while above := excess(current):
        found = []
        for strategy in steps(workload, current.strategy):
            tried = make(strategy)
            if (left := excess(tried)) < above:
                found.append((max(0.0, tried.seconds(speeds) - current.seconds(speeds)) / (above - left), left, len(found), tried))
        if not found:
            break
        *_, current = min(found, key=lambda step: step[:3])  # of steps that cost the same, as nothing, the one that saves most
    found = [smallest if excess(current) else current]
    # Many small steps may add up to more than the one that would have done: keeping less, with all else but residence as it was.
    plain = (make(dataclasses.replace(fastest(workload), keep=keep, resident=0)) for keep in reversed(KEEPS))
    found += [next((plan for plan in plain if not excess(plan)), found[0])]
    return min((_regained(workload, plan, make, excess, speeds) for plan in found), key=lambda plan: plan.seconds(speeds))


def flat_bytes(workload: Workload, base_bytes: int, fixed: Mapping[str, Any] | None = None) -> int:
    """What a run takes at most while nobody says how much it may: FLAT times the least plan, which grows neither with the depth of a model nor with a batch."""
    return FLAT * plans.make(workload, dataclasses.replace(least(workload), **(fixed or {})), base_bytes).total_bytes


def steps(workload: Workload, strategy: Strategy) -> Iterator[Strategy]:
    """Ways to give memory up, each one step further than a strategy."""
    change = dataclasses.replace
    if workload.method == "backprop":
        return
    count = workload.stages if strategy.resident == ALL else min(strategy.resident, workload.stages)
    if count:  # what of them the budget has room for comes back in the end
        yield change(strategy, resident=count // 2)
        yield change(strategy, resident=0)
    if strategy.prefetch > 0:
        yield change(strategy, prefetch=strategy.prefetch - 1)
    if strategy.states == "memory":
        yield change(strategy, states="file")
        yield change(strategy, states="file", group_tokens=1)
    if strategy.group_tokens > workload.width and workload.rows > 1:
        yield change(strategy, group_tokens=max(workload.width, strategy.group_tokens // 2))
    if strategy.adapter == "memory":
        yield change(strategy, adapter="file")
    if (smaller := _smallest_tiles(workload, strategy)) != strategy:
        yield smaller
    if workload.method == "mezo":
        return
    if strategy.gradients == "held":
        yield change(strategy, gradients="spilled")
    if strategy.checkpoints == "memory":
        yield change(strategy, checkpoints="file", keep=min(strategy.keep, "replay", key=KEEPS.index))
    if not workload.plain:
        for keep in KEEPS[: KEEPS.index(strategy.keep)]:
            yield change(strategy, keep=keep)
        if strategy.hold:
            yield change(strategy, hold=False)


def parse_budget(text: str, memory_bytes: int) -> Literal["auto", "least", "fastest"] | int:
    """What --memory was given: a word, or a size as "2GB" (10^9), "1.5GiB" (2^30) or "50%" of the machine's memory, in bytes.

    Raises:
        UserError: it is none of these.
    """
    words: tuple[Literal["auto", "least", "fastest"], ...] = ("auto", "least", "fastest")
    for word in words:
        if text.strip().lower() == word:
            return word
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%|[kmgt]?i?b)", text.strip().lower())
    if match and (unit := match[2]) and (unit == "%" or unit in UNITS):
        size = int(float(match[1]) * (memory_bytes / 100 if unit == "%" else UNITS[unit]))
        if size > 0 and not (unit == "%" and float(match[1]) > 100):
            return size
    raise UserError(f"--memory {text!r}: expected auto, least, fastest, a size as 2GB, 512MB or 1.5GiB, or a part of this machine's memory as 50%.")


def as_budget(size_bytes: int) -> str:
    """A size as --memory takes it, rounded up and a megabyte more: what the process takes before its first array differs a little from run to run."""
    return f"{math.ceil(size_bytes / 1e6) + 1}MB"


def find_largest(
    what: Literal["seq", "batch", "rank"],
    workload: Workload,
    budget_bytes: int,
    base_bytes: int,
    fixed: Mapping[str, Any] | None = None,
    most: int | None = None,
) -> int:
    """The longest row, the most rows of an update, or the highest rank whose least plan fits a budget; 0 if nothing does.

    most: where to stop looking; the model's positions, 2^20 rows and the model's width unless given.
    """
    limits = {"seq": workload.spec.max_positions, "batch": 1 << 20, "rank": workload.spec.hidden_size}
    most = most or limits[what]

    def fits(value: int) -> bool:
        tried = dataclasses.replace(workload, **{{"seq": "width", "batch": "rows", "rank": "rank"}[what]: value})
        if what == "seq" and workload.supervised is not None:  # rows supervised in the same part
            tried = dataclasses.replace(tried, supervised=-(-workload.supervised * value // workload.width))
        sizes = (plans.make(tried, dataclasses.replace(least(tried, adapter), **(fixed or {})), base_bytes).total_bytes for adapter in PLACES)
        return min(sizes) <= budget_bytes

    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def reason(plan: Plan, budget_bytes: int) -> str:
    """Why a plan, the least there is, does not fit, and what would help."""
    largest = sorted(((size, part) for part, size in plan.by_part().items()), reverse=True)[:3]
    rows = ", ".join(f"{part} {size / 1e6:.0f} MB" for size, part in largest)
    help_by = {
        "adapter": "a lower --rank or fewer --num-layers",
        "optimizer": "--optimizer sgd",
        "stage": "a smaller --max-seq-length",
        "head": "a smaller --max-seq-length",
        "states": "a smaller --max-seq-length",
        **({} if plan.workload.spec.quantization else {"weights": "a model quantised to 4 bits"}),
        "checkpoints": "a smaller --max-seq-length",
    }
    hints = list(dict.fromkeys(help_by[part] for _, part in largest if part in help_by))
    return (
        f"planning a run within {megabytes(budget_bytes)}: even with the least memory it takes {megabytes(plan.total_bytes)} "
        f"(largest: {rows}; fullest in the phase '{plan.peak_phase}'). Raise --memory to {as_budget(plan.total_bytes)}"
        + (f", or give {' or '.join(hints)}." if hints else ".")
    )


def _sink(workload: Workload) -> Literal["applied", "held"]:
    return "held" if workload.clip and workload.method != "mezo" else "applied"


def _smallest_tiles(workload: Workload, strategy: Strategy) -> Strategy:
    """The smallest tiles that still cost little."""
    width = min(LEAST_WIDTH_TILE, tiles.width_tile(workload.width, workload.spec.hidden_size))
    return dataclasses.replace(strategy, query_tile=tiles.LEAST_QUERIES, width_tile=width, weight_tile=LEAST_WEIGHT_TILE)


def _regained(workload: Workload, plan: Plan, make: Any, excess: Any, speeds: Speeds) -> Plan:
    """The plan with what the budget still has room for: as many resident stages as fit, and each choice set back that makes it faster."""
    full = fastest(workload)
    for field in ("prefetch", "hold", "group_tokens", "weight_tile", "width_tile", "query_tile", "states", "checkpoints", "adapter", "gradients", "keep"):
        if field == "keep" and plan.strategy.checkpoints == "file":
            continue
        tried = make(dataclasses.replace(plan.strategy, **{field: getattr(full, field)}))
        if not excess(tried) and tried.seconds(speeds) <= plan.seconds(speeds):
            plan = tried
    low, high = plan.strategy.resident, workload.stages + 1
    while low != ALL and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if not excess(make(dataclasses.replace(plan.strategy, resident=middle))) else (low, middle)
    return make(dataclasses.replace(plan.strategy, resident=ALL if low >= workload.stages else low))
