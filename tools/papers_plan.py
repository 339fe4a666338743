"""What tools/reproduce_papers.py measures: parts, their rows, the command of each row, and about how long it takes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PARTS = {
    "table": "MeSP's Table 1: peak and time by model and method",
    "tokens": "MeSP's sweep of the row's length",
    "ranks": "MeSP's sweep of the rank",
    "ablation": "MeSP's ablation: h stored against h recomputed",
    "estimates": "MeSP's analysis of MeZO: its estimates against the true gradient",
    "convergence": "loss against updates, seconds and forward passes",
    "inference": "PocketLLM's point: derivative-free training against inference",
    "bfloat16": "peaks in bfloat16, from truncated models",
}
# Learning rates tried: AdamW for the exact methods, SGD for MeZO, constant, with scale 20.
RATES = {"mesp": (1e-4, 3e-4, 1e-3), "mebp": (1e-4, 3e-4, 1e-3), "mezo": (1e-5, 3e-5, 1e-4)}
SWEPT = ("mesp", "mebp", "mebp-tiled")
DTYPES = ("bfloat16", "float32")  # of the truncated models: the second shows what the extrapolation is worth
# Seconds on two idle cores of the machine this was written on: a 0.5B step of 256 tokens, a demo update of 2 x 64 tokens on one core.
STEP_SECONDS = {"mesp": 14, "mebp": 20, "mebp-tiled": 18, "mezo": 11, "forward": 5}
SIZES = {"qwen2.5-0.5b": 1.0, "qwen2.5-1.5b": 3.0, "qwen2.5-3b": 6.0}  # relative to it
UPDATE_SECONDS = {"mesp": 1.7, "mebp": 1.9, "mezo": 1.4}


@dataclass(frozen=True)
class Bench:
    """One step of a random model, by tools/bench_step.py. layers: None is the shape's own depth."""

    shape: str
    tokens: int
    rank: int
    method: str
    layers: int | None = None
    dtype: str = "float32"
    keep_h: bool = False
    rounds: int = 1

    @property
    def key(self) -> str:
        """The name of the row in results.json; the same step measured for two parts has one row."""
        depth, often = "" if self.layers is None else f"/{self.layers}-layers", "" if self.rounds == 1 else f"/{self.rounds}-rounds"
        return f"step/{self.shape}{depth}/{self.tokens}-tokens/rank-{self.rank}/{self.dtype}{often}/{self.method}{'-keeping-h' if self.keep_h else ''}"

    @property
    def words(self) -> list[str]:
        words = ["tools/bench_step.py", "--shape", self.shape, "--seq", str(self.tokens), "--rank", str(self.rank), "--method", self.method]
        words += [] if self.layers is None else ["--layers", str(self.layers)]
        words += [] if self.dtype == "float32" else ["--dtype", self.dtype]
        words += ["--rounds", str(self.rounds)] if self.rounds > 1 else []
        return words + (["--keep-h"] if self.keep_h else [])

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        depth = 0.5 if self.layers else 1.0
        return 3 + self.rounds * STEP_SECONDS[self.method] * SIZES.get(self.shape, 1) * self.tokens / 256 * depth * (4 if self.dtype == "bfloat16" else 1)


@dataclass(frozen=True)
class Training:
    """One run of `mesp-mlx finetune` on the demo."""

    method: str
    rate: float
    seed: int
    updates: int
    every: int  # updates between validations
    layers: int
    val_batches: int
    rows: int = 2
    tokens: int = 64

    @property
    def key(self) -> str:
        return f"training/{self.method}/{self.updates}-updates/rate-{self.rate:g}/seed-{self.seed}"

    @property
    def words(self) -> list[str]:
        """Without the places it writes to, which are the runner's."""
        flags: dict[str, Any] = {"model": "demo", "data": "demo", "backend": "numpy", "method": self.method, "learning-rate": f"{self.rate:g}"}
        flags |= {"seed": self.seed, "iters": self.updates, "batch-size": self.rows, "max-seq-length": self.tokens, "num-layers": self.layers}
        flags |= {"optimizer": "sgd" if self.method == "mezo" else "adamw", "lr-schedule": "constant", "warmup": 0, "grad-clip": 0}
        flags |= {"steps-per-report": self.every, "steps-per-eval": self.every, "val-batches": self.val_batches, "reply-tokens": 0, "save-every": 10**6}
        return ["-m", "mesp_mlx", "finetune", *(f"--{name}={value}" for name, value in flags.items())]

    @property
    def seconds(self) -> float:
        """About how long it takes, one of two at a time; validations cost about a quarter more."""
        return 4 + 1.3 * self.updates * UPDATE_SECONDS[self.method] / 2


@dataclass(frozen=True)
class Plan:
    """What is measured. The first shape, with `tokens` and `rank`, is the base of all sweeps."""

    name: str
    shapes: tuple[str, ...]
    layers: int | None
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    tokens: int
    rank: int
    rounds: int  # of the base's rows, whose medians are taken
    kept_ranks: tuple[int, ...]
    half_tokens: int
    half_depths: tuple[int, int]
    directions: tuple[int, ...]  # averaged in one estimate; the last is how many are drawn in all
    updates: Mapping[str, int]
    every: Mapping[str, int]
    seeds: tuple[int, ...]
    demo_layers: int
    val_batches: int

    def bench(self, method: str, **other: Any) -> Bench:
        """The base's step by that method, but for what is given."""
        chosen = {"shape": self.shapes[0], "tokens": self.tokens, "rank": self.rank, "layers": self.layers} | other
        base = (chosen["shape"], chosen["tokens"], chosen["rank"]) == (self.shapes[0], self.tokens, self.rank)
        return Bench(method=method, rounds=self.rounds if base else 1, **chosen)

    def benches(self, part: str) -> list[Bench]:
        """The steps that a part is made of; none for the parts on the demo."""
        match part:
            case "table":
                return [self.bench(method, shape=shape) for shape in self.shapes for method in (*SWEPT, "mezo", "forward")]
            case "tokens":
                return [self.bench(method, tokens=tokens) for tokens in self.lengths for method in SWEPT]
            case "ranks":
                return [self.bench(method, rank=rank) for rank in self.ranks for method in SWEPT]
            case "ablation":
                return [self.bench("mesp", rank=rank, keep_h=keep) for rank in self.kept_ranks for keep in (False, True)]
            case "inference":
                return [self.bench(method, shape=shape) for shape in self.shapes for method in ("forward", "mezo")]
            case "bfloat16":
                cut = [(method, dtype, depth) for method in SWEPT for dtype in DTYPES for depth in self.half_depths]
                return [self.bench(method, tokens=self.half_tokens, layers=depth, dtype=dtype) for method, dtype, depth in cut] + [*map(self.whole, SWEPT)]
        return []

    def whole(self, method: str) -> Bench:
        """What the extrapolation in float32 is held against: the base at its own depth and the length of the bfloat16 rows."""
        return self.bench(method, tokens=self.half_tokens)

    def grid(self, method: str) -> list[Training]:
        """The runs that the learning rate is chosen by."""
        return [self.training(method, rate, self.seeds[0]) for rate in RATES[method]]

    def training(self, method: str, rate: float, seed: int) -> Training:
        return Training(method, rate, seed, self.updates[method], self.every[method], self.demo_layers, self.val_batches)

    def best(self, method: str, rows: Mapping[str, Any]) -> list[Training] | None:
        """The runs of all seeds at the rate with the lowest final validation loss; None before the grid is measured, or if all of it failed."""
        grid = self.grid(method)
        if any(run.key not in rows for run in grid):
            return None
        ended = [run for run in grid if "failed" not in rows[run.key]["result"]]
        if not ended:
            return None
        rate = min(ended, key=lambda run: rows[run.key]["result"]["val_loss"][-1]).rate
        return [self.training(method, rate, seed) for seed in self.seeds]

    def estimates(self) -> tuple[str, list[str]]:
        """(key, words) of the one row of the analysis of MeZO."""
        counts = ",".join(map(str, self.directions))
        return f"estimates/{counts}", ["tools/papers_estimates.py", "--counts", counts, f"--layers={self.demo_layers}"]

    def seconds(self, parts: Iterable[str], rows: Mapping[str, Any]) -> float:
        """About how long what is missing takes."""
        missing = {bench.key: bench.seconds for part in parts for bench in self.benches(part)}
        if "estimates" in parts:
            missing[self.estimates()[0]] = 10 + 1.3 * self.directions[-1]
        if "convergence" in parts:
            for method in RATES:
                runs = self.grid(method)
                missing |= {run.key: run.seconds for run in runs}
                chosen = self.best(method, rows) or [self.training(method, 0, seed) for seed in self.seeds[1:]]
                missing |= {run.key: run.seconds for run in chosen}
        return sum(seconds for key, seconds in missing.items() if key not in rows)


FULL = Plan(
    name="full",
    shapes=("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"),
    layers=None,
    lengths=(128, 256, 512, 1024),
    ranks=(4, 8, 16, 32),
    tokens=256,
    rank=8,
    rounds=2,
    kept_ranks=(8, 32),
    half_tokens=128,
    half_depths=(2, 4),
    directions=(1, 10, 100),
    updates={"mesp": 35, "mebp": 35, "mezo": 150},
    every={"mesp": 5, "mebp": 5, "mezo": 25},
    seeds=(0, 1, 2),
    demo_layers=-1,
    val_batches=-1,
)
QUICK = Plan(
    name="quick",
    shapes=("qwen2.5-0.5b",),
    layers=4,
    lengths=(64, 128, 256),
    ranks=(4, 8),
    tokens=128,
    rank=8,
    rounds=1,
    kept_ranks=(8,),
    half_tokens=16,
    half_depths=(2, 3),
    directions=(1, 2, 4),
    updates={"mesp": 4, "mebp": 4, "mezo": 8},
    every={"mesp": 2, "mebp": 2, "mezo": 4},
    seeds=(0, 1),
    demo_layers=2,
    val_batches=2,
)
