"""A budget is kept by giving up speed, in this order: residency, tiles, the run."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from engines import random_adapter
from models import make_model, tiny_config
from runs import BACKENDS, chat_rows, data_folder, read_adapter, run, tiny_model
from trainings import Told, a_run

from mesp_mlx import adapter as adapters
from mesp_mlx import finetune, reference
from mesp_mlx.engine.train import train
from mesp_mlx.errors import RunStopped
from mesp_mlx.memory import choose, plan
from mesp_mlx.memory.plan import Workload
from mesp_mlx.memory.strategy import ALL, Strategy
from mesp_mlx.memory.watchdog import Watchdog, leaner
from mesp_mlx.model.spec import load_spec

MB = 10**6
LENGTHS = [40, 9, 21, 64, 33, 12, 50, 28]


LARGE = Strategy(resident=ALL, keep="all")


def a_plan(strategy: Strategy = LARGE, **given) -> plan.Plan:
    spec = load_spec(tiny_config("qwen2"))
    workload = Workload(spec, tuple(adapters.choose_modules(spec)), rows=4, width=64, **given)
    return plan.make(workload, strategy, base_bytes=40 * MB)


class Watched:
    """A watchdog over a budget of 100 MB; `footprint` is what it reads next, `done` is everything it does."""

    def __init__(self, given: plan.Plan):
        self.done: list[str] = []
        self.footprint = 0.0
        self.watchdog = Watchdog(given, 100 * MB, lambda: self.done.append("relieve"), self._save, self.done.append, self._read)

    def _save(self) -> Path:
        self.done.append("save")
        return Path("out/adapters.safetensors")

    def _read(self) -> int:
        return int(self.footprint * MB)

    def stages(self, *footprints: float) -> list[str]:
        """What is done as stages are opened at these footprints."""
        before = len(self.done)
        for self.footprint in footprints:
            self.watchdog("model.layers.1.mlp")
        return self.done[before:]

    def after_update(self) -> tuple[plan.Plan | None, list[str]]:
        before = len(self.done)
        return self.watchdog.after_update(), self.done[before:]


RELIEVED = ["relieve", "memory: 99.0 MB at model.layers.1.mlp, the budget is 100.0 MB: no weights stay resident or are read ahead from now on"]
SHRUNK = ["relieve", "memory: from update 3 on rows pass one by one, in the smallest tiles, and less is kept: slower, with the same results"]


def test_each_thing_is_given_up_in_its_turn_and_said_once():
    given = a_plan()
    watched = Watched(given)
    assert watched.stages(10, 98.9, 50) == [] and watched.after_update() == (None, [])
    assert watched.stages(98.9, 99.0) == RELIEVED
    assert watched.stages(99.5, 130.0, 50) == []  # until the update is over nothing more can be given up
    smaller, done = watched.after_update()
    assert smaller == leaner(given) and done == SHRUNK
    assert watched.stages(60, 99.9, 100.0) == [] and watched.after_update() == (None, [])
    with pytest.raises(RunStopped) as stopped:
        watched.stages(50, 100.1)
    assert watched.done == [*RELIEVED, *SHRUNK, "save"]
    first, *table = str(stopped.value).splitlines()
    assert first == (
        "the process takes 100.1 MB of memory, the budget is 100.0 MB, and nothing is left to give up. The adapter after 3 updates is in "
        "out/adapters.safetensors. Raise --memory, or lower --max-seq-length or --rank. By the plan an update takes"
    )
    sizes = {line.split()[0]: float(line.split()[1]) for line in table}
    assert sizes == {part: pytest.approx(size / MB, abs=0.051) for part, size in leaner(given).by_part().items()}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True) and sizes["base"] == 40.0


def test_an_adapter_that_changes_within_an_update_is_saved_when_it_is_whole():
    watched = Watched(a_plan(Strategy(gradients="applied"), clip=False))
    watched.stages(99.0)
    watched.after_update()
    assert watched.stages(120.0, 130.0, 40.0) == []
    with pytest.raises(RunStopped, match=r"takes 130.0 MB .* after 2 updates is in out"):
        watched.after_update()
    assert watched.done[-1] == "save"


def test_what_was_taken_before_the_plan_changed_does_not_stop_the_run():
    """The first reading by the new plan may find the mark that the end of the last update left."""
    readings = iter([99 * MB, 300 * MB, 50 * MB])
    watchdog = Watchdog(a_plan(), 100 * MB, lambda: None, lambda: Path(), lambda _: None, lambda: next(readings))
    watchdog("head")
    assert watchdog.after_update() is not None
    watchdog("embedding")


def test_a_run_that_has_nothing_smaller_is_not_said_to_shrink():
    for given in (a_plan(leaner(a_plan()).strategy), a_plan(choose.fastest(a_plan(method="backprop").workload), method="backprop")):
        watched = Watched(given)
        assert watched.stages(99.0) == RELIEVED and watched.after_update() == (None, ["relieve"])
        with pytest.raises(RunStopped):
            watched.stages(101.0)


def test_the_leaner_plan_takes_less_and_moves_nothing():
    for strategy in (
        Strategy(),
        Strategy(resident=ALL, keep="all", group_tokens=4096),
        Strategy(resident=2, prefetch=2, keep="inputs", checkpoints="file", states="file", gradients="spilled", adapter="file"),
    ):
        found = leaner(a_plan(strategy))
        least = choose.least(found.workload)
        places = {field: getattr(strategy, field) for field in ("checkpoints", "states", "gradients", "adapter")}
        assert found.strategy == dataclasses.replace(least, **places)
        assert found.total_bytes < a_plan(strategy).total_bytes


def readings(*first_bytes: int):
    """A watchdog as the command makes it, but for what it reads: these footprints, then the last of them again and again."""
    remaining = list(first_bytes)
    return functools.partial(Watchdog, footprint=lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0])


@pytest.mark.parametrize(("grad_clip", "updates"), [(1e9, "1 update"), (0.0, "2 updates")], ids=["held", "applied"])
def test_the_command_stops_with_an_adapter_that_can_be_used(tmp_path, one_process, monkeypatch, capsys, grad_clip, updates):
    """Over the budget from the first stage on: one update whole, one by the smaller plan, given up at once if gradients are held until it ends."""
    model, data = tiny_model(tmp_path / "model"), data_folder(tmp_path / "data", chat_rows(8))
    given = {"iters": 5, "learning_rate": 0.05, "optimizer": "sgd", "grad_clip": grad_clip, "val_batches": 0, "lr_schedule": "constant", "warmup": 0}
    monkeypatch.setattr(finetune, "Watchdog", readings(10**15))
    with pytest.raises(RunStopped, match=rf"after {updates} is in {re.escape(str(tmp_path / 'stopped' / 'adapters.safetensors'))}"):
        run(model, data, tmp_path / "stopped", **given)
    monkeypatch.undo()
    monkeypatch.setenv("MESP_MLX_CACHE", str(one_process))
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("memory: ")] == ["memory"] * 2
    assert json.loads((tmp_path / "stopped" / adapters.CONFIG_FILE).read_text())["num_layers"] == 2
    want = run(model, data, tmp_path / "want", **given | {"iters": int(updates.split()[0])}).adapter
    for name, value in read_adapter(tmp_path / "stopped" / adapters.ADAPTER_FILE).items():
        assert np.linalg.norm(value - want[name]) <= 1e-5 * np.linalg.norm(want[name]), name


def test_the_command_goes_on_where_giving_up_speed_was_enough(tmp_path, one_process, monkeypatch):
    model, data = tiny_model(tmp_path / "model"), data_folder(tmp_path / "data", chat_rows(8), chat_rows(3, first=50))
    given = {"iters": 4, "learning_rate": 0.05, "optimizer": "sgd", "grad_clip": 0.0, "steps_per_eval": 2}
    want = run(model, data, tmp_path / "undisturbed", **given)
    monkeypatch.setattr(finetune, "Watchdog", readings(10**15, 0))
    found = run(model, data, tmp_path / "shrunk", **given)
    for kind, field in (("train", "train_loss"), ("validation", "val_loss")):
        assert found.values(kind, field) == pytest.approx(want.values(kind, field), rel=1e-5)
    for name, value in want.adapter.items():
        assert np.linalg.norm(found.adapter[name] - value) <= 1e-5 * np.linalg.norm(value), name


CHILD = """
import dataclasses, json, sys
from pathlib import Path
import numpy as np
from backends import BACKENDS
from engines import SCALE
from mesp_mlx.adapter import ADAPTER_FILE
from mesp_mlx.engine import train as training
from mesp_mlx.errors import RunStopped
from mesp_mlx.memory import measure
from mesp_mlx.memory.watchdog import Watchdog
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from test_memory_watchdog import LENGTHS, a_plan
from trainings import Told, a_run

folder, out, name, gives_way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "gives way"
backend = next(backend for backend in BACKENDS if backend.arrays.name == name)
given, told, ballast, opened, changed = a_plan(), Told(), [], [], []

def watch(stage):
    opened.append(stage)
    if stage == "head" and opened.count("head") == 3:
        ballast.append(np.ones(60_000_000 // 8))
    watchdog(stage)

def relieve():
    run.store.drop_resident()
    run.model.evaluate.limit(1_000_000)
    if gives_way:
        ballast.clear()
    measure.give_back(name)

def after_update():
    smaller = watchdog.after_update()
    changed.append(smaller is not None)
    return smaller and build(load_spec(read_config(folder)), backend, SCALE, smaller.strategy, limit_bytes=smaller.limit_bytes)

with measure.small_cache(name), a_run(folder, backend, LENGTHS, 8, given.strategy, watch, out=out, told=told, batch_size=4) as run:
    run = dataclasses.replace(run, after_update=after_update)
    warm = measure.process_now_bytes()
    watchdog = Watchdog(given, warm + 40_000_000, relieve, lambda: run.save(ADAPTER_FILE), told.note)
    message = ""
    try:
        training.train(run)
    except RunStopped as error:
        message = str(error)
print(json.dumps({"message": message, "notes": told.lines, "steps": len(told.steps), "changed": changed}))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny"), tiny_config("qwen2"))


def child(*arguments: str) -> dict:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def undisturbed(folder, out, updates):
    """What the same rows make of the adapter."""
    with a_run(folder, reference, LENGTHS, updates, out=out, told=Told(), batch_size=4) as run:
        train(run)
    return read_adapter(out / adapters.ADAPTER_FILE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ballast", ["gives way", "stays"])
def test_a_process_that_grows_by_60_mb_where_40_are_left(tiny, tmp_path, backend, ballast):
    """In the third update's head. If room can be had the run goes on to the end, in small tiles; if not, the adapter after that update is what is saved."""
    found = child(str(tiny), str(tmp_path / "out"), backend, ballast)
    assert [note.partition(" at head, the budget is ")[2] != "" for note in found["notes"]] == [True, False]
    updates = 8 if ballast == "gives way" else 3
    assert found["changed"] == [False, False, True] + [False] * (updates - 3) and found["steps"] == updates
    if ballast == "gives way":
        assert found["message"] == ""
    else:
        assert f"The adapter after 3 updates is in {tmp_path / 'out' / adapters.ADAPTER_FILE}. Raise --memory" in found["message"]
    start, want, got = random_adapter(tiny), undisturbed(tiny, tmp_path / "undisturbed", updates), read_adapter(tmp_path / "out" / adapters.ADAPTER_FILE)
    for name, value in want.items():
        assert np.linalg.norm(got[name] - value) <= 1e-5 * np.linalg.norm(value) < np.linalg.norm(value - start[name]), name
