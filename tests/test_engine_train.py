"""Updates in turn: what is left of a run, what the disk did, and another model from one update to the next."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from backends import each_backend, numbers
from engines import SCALE
from models import make_model, tiny_config
from trainings import Told, a_run

from mesp_mlx import reference
from mesp_mlx.engine import train as training
from mesp_mlx.engine.train import tokens_in_all, train
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config

LENGTHS = [5, 41, 12, 30, 9, 22, 17]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny"), tiny_config("qwen2"))


def trained(folder, backend, updates, after_update=lambda: None):
    """What was told, and the adapter."""
    told = Told()
    with a_run(folder, backend, LENGTHS, updates, told=told, batch_size=3) as run:
        train(dataclasses.replace(run, after_update=after_update))
        return told, {name: numbers(value) for name, value in run.adapter.items()}


def test_what_is_left_follows_the_tokens_not_the_updates(tiny, monkeypatch):
    """Every update takes a hundredth of a second a position here: then what is left is told to the digit, from the first update on."""
    step, sizes = training.step, []
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: sum(sizes) / 100))

    def timed(run, update, groups):
        sizes.append(sum(sum(group.lengths) for group in groups))
        return step(run, update, groups)

    monkeypatch.setattr(training, "step", timed)
    told, _ = trained(tiny, reference, 8)  # three updates pass over all rows: 3, 3 and 1
    assert len(sizes) == 8 and max(sizes) > 4 * min(sizes)
    assert [told["seconds_left"] for told in told.steps] == pytest.approx([sum(sizes[done + 1 :]) / 100 for done in range(8)], abs=1e-9)
    assert [told["seconds_left"] for told in told.trains] == [told["seconds_left"] for told in told.steps]


@pytest.mark.parametrize("updates", [1, 2, 3, 4, 9])
def test_the_tokens_of_a_run_are_those_it_trains_on(tiny, updates):
    with a_run(tiny, reference, LENGTHS, updates, batch_size=3) as run:
        assert tokens_in_all(run) == sum(sum(sum(group.lengths) for group in groups) for groups in training.updates_from(run, 0))


def test_the_disk_is_told_of_once_by_the_first_update_alone(tiny):
    told, _ = trained(tiny, reference, 2)
    (disk,) = told.disks
    with a_run(tiny, reference, LENGTHS, 1, batch_size=3) as run:
        train(run)
        assert disk["read_bytes"] == run.store.bytes_read > 0
    assert disk["read_seconds"] > 0 and 0 <= disk["waited_seconds"] <= disk["seconds"]


@each_backend
def test_another_model_goes_on_from_one_update_to_the_next(tiny, backend):
    """With rows one by one and tiles as small as can be: the same adapter, to rounding."""
    small = Strategy(group_tokens=1, query_tile=16, width_tile=32, weight_tile=4096, vocabulary_tile=64, hold=False)
    seen, used, step = [], [], training.step

    def change():
        return build(load_spec(read_config(tiny)), backend, SCALE, small) if len(seen) == 2 else None

    def spy(run, update, groups):
        seen.append([len(group.rows) for group in groups])
        used.append(run.model.strategy)
        return step(run, update, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "step", spy)
        told, adapter = trained(tiny, backend, 5, change)
    whole, want = trained(tiny, backend, 5)
    assert used == [Strategy()] * 2 + [small] * 3
    assert seen[3] == [1, 1, 1], "rows pass one by one"
    assert [told["train_loss"] for told in told.steps] == pytest.approx([told["train_loss"] for told in whole.steps], rel=1e-6)
    for name, value in want.items():
        assert np.linalg.norm(adapter[name] - value) <= 1e-5 * np.linalg.norm(value), name


def test_validation_rows_are_made_a_batch_at_a_time(tiny, monkeypatch):
    """And the loss is the mean over the tokens of all of them."""
    with a_run(tiny, reference, LENGTHS, 1, batch_size=3) as run:
        run = dataclasses.replace(run, rows=dataclasses.replace(run.rows, valid=run.rows.train))
        want, events, inner = training.validate(run, len(LENGTHS)), [], training.forward
        make = training.batches.groups
        monkeypatch.setattr(training.batches, "groups", lambda *given: events.append("made") or make(*given))
        monkeypatch.setattr(training, "forward", lambda *given: events.append("measured") or inner(*given))
        assert training.validate(run, len(LENGTHS)) == want > 0
        assert events == ["made", "measured"] * 3
        singly = [training.validate(dataclasses.replace(run, rows=dataclasses.replace(run.rows, valid=run.rows.valid[i : i + 1])), 1) for i in range(7)]
        assert want == pytest.approx(np.average(singly, weights=np.array(LENGTHS) - 1), rel=1e-5)
