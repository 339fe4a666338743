"""The plan of a benchmark's step: the flags that choose it, and what it says beside what is measured."""

import argparse
import dataclasses
from typing import Any

import make_random_model

from mesp_mlx.errors import UserError
from mesp_mlx.memory.plan import Plan, Workload
from mesp_mlx.memory.strategy import ALL, KEEPS, Strategy

MOMENTS = {"sgd": 0, "adam": 2, "adamw": 2}
TILES = {"group": "positions of the rows that pass a stage together", "query": "rows of queries", "width": "columns of F", "vocabulary": "rows of the table"}
TILES["weight"] = "bytes of dequantised weights"
FIELDS = [field.name for field in dataclasses.fields(Strategy)]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--memory, and every field of Strategy by hand: None where it is not given."""
    parser.add_argument("--memory", type=_memory, default="default", metavar="PLAN", help="default, auto, least, fastest, or the most arrays may take: 40MB")
    parser.add_argument("--resident", type=_resident, metavar="N", help="stages whose weights stay, from the head down; all")
    parser.add_argument("--prefetch", type=_whole, metavar="N", help="stages read ahead")
    parser.add_argument("--no-hold", dest="hold", action="store_const", const=False, help="attention's weights are read a third time")
    parser.add_argument("--keep", choices=KEEPS, help="what backward finds instead of computing it again")
    parser.add_argument("--checkpoints", choices=("memory", "file"))
    parser.add_argument("--states", choices=("memory", "file"), help="arrays between two stages")
    parser.add_argument("--gradients", choices=("applied", "held", "spilled"))
    parser.add_argument("--adapters", dest="adapter", choices=("memory", "file"), help="and the optimizer's moments")
    for name, what in TILES.items():
        parser.add_argument("--group-tokens" if name == "group" else f"--{name}-tile", type=positive, metavar="N", help=what)


def flags_of(strategy: Strategy) -> list[str]:
    """The flags that give a strategy by hand."""
    names = {"hold": "--no-hold", "adapter": "--adapters"}
    words = []
    for field in dataclasses.fields(strategy):
        if (value := getattr(strategy, field.name)) != field.default:
            words.append(names.get(field.name, f"--{field.name.replace('_', '-')}"))
            words += [] if value is False else ["all" if field.name == "resident" and value == ALL else str(value)]
    return words


def workload_of(arguments: argparse.Namespace, name: str, layers: int) -> Workload:
    """What a method's step is planned for. A pass without gradients has the streaming of mesp's, and no plan of its own.

    Raises:
        UserError: the shape can't be used, or MLX is not there.
    """
    from mesp_mlx import adapter as adapters
    from mesp_mlx import backend as backends
    from mesp_mlx.config import VARIANTS
    from mesp_mlx.model.spec import load_spec

    spec = load_spec(make_random_model.quantized(make_random_model.SHAPES[arguments.shape] | {"num_hidden_layers": layers}), "the shape")
    backend, itemsize = backends.choose(arguments.backend), 2 if arguments.dtype == "bfloat16" else 4
    fields = {"backend": arguments.backend, "itemsize": itemsize, "rank": arguments.rank, "moments": MOMENTS[arguments.optimizer], "clip": False}
    fields |= {"rows": arguments.batch, "width": arguments.seq, "on_cpu": backends.on_cpu(backend)}
    return Workload(spec, tuple(adapters.choose_modules(spec)), **fields, **VARIANTS.get(name, {}))


def plan_of(arguments: argparse.Namespace, name: str, layers: int, base_bytes: int = 0) -> Plan:
    """How a method's step spends memory, as --memory and the fields given by hand want it.

    Raises:
        UserError: no plan is so small; or as above.
    """
    from mesp_mlx.memory import choose
    from mesp_mlx.memory import plan as plans
    from mesp_mlx.plan_command import BASE_BYTES

    workload = workload_of(arguments, name, layers)
    fixed = {field: value for field in FIELDS if (value := getattr(arguments, field)) is not None}
    if isinstance(arguments.memory, int):
        budget = _total(workload, arguments.memory)
        chosen = choose.choose(workload, budget, 0, fixed=fixed)
        if (excess := chosen.arrays_peak_bytes - arguments.memory) > 0:  # what is beyond arrays differs from plan to plan
            budget -= 2 * excess
            chosen = choose.choose(workload, budget, 0, fixed=fixed)
        return dataclasses.replace(plans.roomier(chosen, budget), base_bytes=base_bytes)
    if arguments.memory == "auto":
        base = BASE_BYTES[workload.backend]
        budget = choose.flat_bytes(workload, base, fixed)
        return dataclasses.replace(plans.roomier(choose.choose(workload, budget, base, fixed=fixed), budget), base_bytes=base_bytes)
    ends = {"least": lambda: choose.least(workload, fixed.get("adapter", "memory")), "fastest": lambda: choose.fastest(workload)}
    plan = plans.make(workload, dataclasses.replace(ends.get(arguments.memory, Strategy)(), **fixed), base_bytes)
    return dataclasses.replace(plan, keep_bytes=plans.MOST_KEPT_BYTES) if arguments.memory == "fastest" else plan


def of_plan(plan: Plan, name: str) -> dict[str, Any]:
    """What a plan says of a step, as JSON values."""
    from mesp_mlx.model import work

    workload = plan.workload
    rows, width = workload.rows, workload.width
    spec: Any = workload.spec
    counted = work.of_update(spec, name, rows, width, workload.rank) if name == "forward" else plan.work
    exact = workload.method != "mezo" and name != "forward"
    checkpoints = [tensor.bytes for tensor in plan.tensors if tensor.part == "checkpoints" and "head" in tensor.phases]
    predicted = {"arrays_peak_predicted_bytes": plan.arrays_peak_bytes, "process_peak_predicted_bytes": plan.total_bytes, "peak_phase": plan.peak_phase}
    return {
        "strategy": dataclasses.asdict(plan.strategy),
        **(predicted if name != "forward" else {}),
        "limit_bytes": plan.limit_bytes,
        "keep_bytes": plan.keep_bytes,
        "evaluations_predicted": plan.evaluations,
        "bytes_read_predicted": plan.read_bytes,
        "file_written_predicted": plan.spill_written_bytes,
        "file_read_predicted": plan.spill_read_bytes,
        "adapter_bytes": workload.adapter_bytes,
        "gradient_bytes": workload.adapter_bytes if exact and plan.strategy.gradients == "held" else 0,
        "checkpoint_bytes": sum(checkpoints) if exact else 0,
        "layer_bytes": sum(layouts[-1].bytes for layouts in workload.weights.values()),
        "state_bytes": rows * width * workload.spec.hidden_size * workload.itemsize,
        "weight_products_per_token": counted.weights // (rows * width),
        "flops": counted.flops,
    }


def _total(workload: Workload, arrays_bytes: int) -> int:
    """What the operating system counts, base apart, when arrays take so much."""
    from mesp_mlx.memory import plan as plans

    plan = plans.make(workload, Strategy(), 0)
    share = plans.SLACK if workload.backend == "mlx" else plans.NUMPY_SLACK
    return plan.total_bytes + int((1 + share) * (arrays_bytes - plan.arrays_peak_bytes))


def _memory(text: str) -> str | int:
    from mesp_mlx.memory.choose import parse_budget

    try:
        return text if text == "default" else parse_budget(text, 0)
    except UserError:
        raise argparse.ArgumentTypeError(f"{text} is neither default, auto, least or fastest nor a size such as 40MB") from None


def _resident(text: str) -> int:
    return ALL if text == "all" else _whole(text)


def depths(text: str) -> list[int]:
    """A flag's positive whole numbers, with commas between them."""
    return [positive(word) for word in text.split(",")]


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 0 or more")
    return int(text)


def positive(text: str) -> int:
    """A flag's whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)
