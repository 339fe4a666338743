"""Which plan a run takes: what it is made for, how a budget is understood, what is refused, and that nothing is read or written before that."""

import dataclasses

import numpy as np
import pytest
from models import tiny_config
from runs import chat_rows, command, data_folder, read_adapter, read_log, run, tiny_model

from mesp_mlx import adapter as adapters
from mesp_mlx import finetune, plan_report, planning, sources
from mesp_mlx.config import Choices
from mesp_mlx.data import batches
from mesp_mlx.data.rows import Rows
from mesp_mlx.data.tokens import TokenSet
from mesp_mlx.errors import UserError
from mesp_mlx.memory import choose, machine
from mesp_mlx.memory import plan as plans
from mesp_mlx.memory.choose import DoesNotFit
from mesp_mlx.memory.machine import Memory
from mesp_mlx.memory.strategy import ALL, Strategy
from mesp_mlx.model.spec import load_spec
from mesp_mlx.planning import Room

MB = 10**6
SPEC = load_spec(tiny_config("llama", hidden_size=256, intermediate_size=768, num_hidden_layers=6, vocab_size=4096, max_position_embeddings=4096))
HAVE = Memory(8000 * MB, 3000 * MB, 2500 * MB)


def settings(**given):
    return sources.load(None, {"model": "m", "data": "d", "backend": "numpy"} | given)


def workload(rows=4, width=256, **given):
    return planning.shaped(settings(**given), SPEC, adapters.choose_modules(SPEC), "numpy", 4, True, rows, width, None)


def room(memory: str, have: Memory = HAVE, peak: int = 0, working: int | None = None) -> Room:
    return Room(memory, have, 60 * MB, peak, working)


def random_rows(rng: np.random.Generator, count: int) -> Rows:
    """Rows of very unlike lengths, of which unlike parts are supervised; a few are held out."""
    lengths = rng.integers(3, 30, count) * rng.choice([1, 1, 4, 9], count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = (rng.random(offsets[-1]) < np.repeat(rng.random(count), lengths)).astype(np.uint8)
    mask[offsets[1:] - 1] = 1
    mask[offsets[:-1]] = 0
    tokens = TokenSet(np.zeros(offsets[-1], np.int32), mask, offsets)
    limit = int(rng.integers(60, 300))
    train, valid = np.arange(count - 5), np.arange(count - 5, count)
    return Rows(tokens, tokens, train, valid, limit, batches.padded_widths(tokens.lengths(limit)), 0, 0, "", [], [])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("group_tokens", [1, 300, 1024])
def test_no_group_of_any_update_is_more_than_was_planned_for(seed, group_tokens):
    rng = np.random.default_rng(seed)
    rows, updates = random_rows(rng, 60), 25
    given = settings(batch_size=int(rng.integers(1, 9)), seed=seed)
    count, width, supervised = planning.rows_shape(given, rows, updates)
    load = planning.shaped(given, SPEC, adapters.choose_modules(SPEC), "numpy", 4, True, count, width, supervised)
    plan = planning.within(room("least"), load, {"group_tokens": group_tokens})
    tile = plan.strategy.group_tokens
    assert tile <= max(group_tokens, width)
    made = list(
        batches.updates(rows.train_set, rows.train, rows.limit, rows.widths, rows_per_update=given.rows_per_update, seed=seed, stop=updates, tile_tokens=tile)
    )
    positions = [sum(group.ids.size for group in groups) for groups in made]
    assert positions == planning.update_positions(rows, given.rows_per_update, seed, updates).tolist()
    assert max(positions) <= plan.shape.groups * plan.shape.tokens and (count - 1) * width < max(positions) <= count * width
    validation = [*rows.validation_groups(len(rows.valid), given.rows_per_update, tile)]
    for group in (group for groups in made + validation for group in groups):
        assert group.ids.size <= plan.shape.tokens and group.ids.shape[1] <= width
        assert group.mask.sum() <= plan.shape.supervised


def test_rows_that_are_alike_are_planned_for_as_they_are():
    lengths = np.full(20, 65)
    mask = np.tile(np.repeat([0, 1], [33, 32]), 20).astype(np.uint8)
    tokens = TokenSet(np.zeros(20 * 65, np.int32), mask, np.concatenate([[0], np.cumsum(lengths)]))
    rows = Rows(tokens, tokens, np.arange(20), np.arange(0), 65, batches.padded_widths(lengths), 0, 0, "", [], [])
    assert planning.rows_shape(settings(batch_size=3), rows, 4) == (3, 64, 32)


def test_the_longest_rows_come_first():
    rows = random_rows(np.random.default_rng(0), 40)
    lengths = rows.train_set.lengths(rows.limit)
    found = planning.longest_rows(rows, 7)
    assert len(set(found)) == 7 and set(found) <= set(rows.train) and lengths[found].tolist() == sorted(lengths[rows.train], reverse=True)[:7]


def test_a_workload_is_what_the_settings_say():
    momentum = {"sgd": {"momentum": 0.5}}
    found = workload(optimizer="sgd", optimizer_config=momentum, rank=3, grad_clip=0, dropout=0.1, method="mebp", tiled_head=True)
    assert (found.moments, found.rank, found.clip, found.dropout, found.method, found.tiled_head) == (1, 3, False, True, "mebp", True)
    assert (workload(optimizer="sgd").moments, workload(optimizer="adam").moments, workload().moments, workload().clip) == (0, 2, 2, True)
    assert workload(method="mezo", mezo_perturbations=3).perturbations == 3 and workload(method="backprop", grad_checkpoint=True).grad_checkpoint


CHOICES = {
    "resident": 3, "prefetch": 2, "hold": False, "keep": "inputs", "checkpoints": "file", "states": "file", "gradients": "spilled", "adapter": "file",
    "query_tile": 32, "width_tile": 128, "vocabulary_tile": 192, "weight_tile": 50_000, "group_tokens": 512,
}  # fmt: skip


def test_every_choice_is_in_the_table_above():
    assert set(CHOICES) == set(Choices.model_fields) == {field.name for field in dataclasses.fields(Strategy)}


@pytest.mark.parametrize("memory", ["auto", "least", "fastest", "1GB"])
@pytest.mark.parametrize("field", CHOICES)
def test_a_choice_by_hand_is_the_plans_whatever_the_memory(field, memory):
    plan = planning.within(room(memory), workload(), Choices(**{field: CHOICES[field]}).fixed)
    assert getattr(plan.strategy, field) == CHOICES[field]


def test_how_a_budget_is_understood():
    assert room("500MB").budget_bytes == 500 * MB and room("25%").budget_bytes == 2000 * MB
    assert room("90%").budget_bytes == 5500 * MB, "no more than there would be with all other programs closed"
    assert room("auto").budget_bytes == 3000 * MB and room("least").budget_bytes == room("fastest").budget_bytes == 5500 * MB
    assert room("auto", working=1000 * MB).budget_bytes == 1060 * MB, "Metal's buffers within its working set, beside the rest of the process"
    assert room("auto", working=4000 * MB).budget_bytes == 3000 * MB


def test_a_size_is_kept_and_more_makes_it_faster():
    load, typical = workload(), machine.typical(True)
    least = min(plans.make(load, choose.least(load, place), 60 * MB).total_bytes for place in ("memory", "file"))
    seconds = []
    for size in (least, int(1.3 * least), 2 * least, 10 * least):
        plan = planning.within(room(f"{size}B"), load, {})
        assert plan.total_bytes <= size and plan.base_bytes == 60 * MB
        seconds.append(plan.seconds(typical))
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert plan.strategy.resident == ALL and plan.strategy.keep == "all"
    with pytest.raises(DoesNotFit) as caught:
        planning.within(room(f"{int(0.9 * least)}B"), load, {})
    said = str(caught.value)
    assert f"{least / 1e6:,.1f} MB" in said and "largest: " in said and "--max-seq-length" in said
    assert ("--adapters file" in said) == (caught.value.plan.strategy.adapter == "memory")
    assert "other programs" not in said, "a size is the user's own"


def test_what_the_process_took_before_counts():
    with pytest.raises(UserError) as caught:
        planning.within(room("90MB", peak=95 * MB), workload(), {})
    assert str(caught.value).startswith("--memory 90MB: before the first step this process has taken 95.0 MB already")
    least = planning.least_bytes(workload(), {}, 60 * MB)
    needed = choose.as_budget(max(95 * MB, least))
    assert str(caught.value).endswith(f"Raise --memory to {needed}.") and planning.within(room(needed, peak=95 * MB), workload(), {})
    with pytest.raises(UserError, match=f"Raise --memory to {choose.as_budget(least)}"):
        planning.within(room("61MB", peak=62 * MB), workload(), {})
    assert planning.within(room("95MB", peak=95 * MB), workload(), {}).total_bytes <= 95 * MB


def test_auto_leaves_a_margin_while_it_can_and_refuses_nothing_that_fits():
    load = workload(rows=1, width=128)
    fastest = plans.make(load, choose.fastest(load), 60 * MB).total_bytes
    least = min(plans.make(load, choose.least(load, place), 60 * MB).total_bytes for place in ("memory", "file"))
    assert fastest < choose.flat_bytes(load, 60 * MB)
    total = 20 * fastest  # so that the margin is a fastest plan's size
    assert planning.within(room("auto", Memory(total, 2 * fastest + MB, 0)), load, {}).total_bytes == fastest
    smaller = planning.within(room("auto", Memory(total, 2 * fastest - 20 * MB, 0)), load, {})
    assert smaller.total_bytes <= fastest - 20 * MB
    assert planning.within(room("auto", Memory(total, fastest, 0)), load, {}).total_bytes == fastest, "where nothing fits beside the margin, it is given up"
    pushed = planning.within(room("auto", Memory(total, least - 5 * MB, 10 * MB)), load, {})
    assert pushed.total_bytes <= least + 5 * MB, "others can be pushed aside"
    with pytest.raises(DoesNotFit) as caught:
        planning.within(room("auto", Memory(total, least - 15 * MB, 10 * MB)), load, {})
    assert "Closing other programs would give up to 10.0 MB" in str(caught.value)


def test_auto_is_flat():
    """Not more than twice the least plan, however much memory the machine has."""
    plenty = room("auto", Memory(10**12, 10**12, 0))
    for rows in (4, 16):
        load = workload(rows=rows)
        least = plans.make(load, choose.least(load), 60 * MB).total_bytes
        assert least < planning.within(plenty, load, {}).total_bytes <= 2 * least < plans.make(load, choose.fastest(load), 60 * MB).total_bytes


def test_what_may_be_taken_and_what_more_memory_would_buy():
    load, plenty = workload(), Memory(10**12, 10**12, 0)
    flat = choose.flat_bytes(load, 60 * MB)
    assert planning.budget_bytes(room("auto", plenty), load, {}) == planning.budget_bytes(room("Auto", plenty), load, {}) == flat < 10**12
    assert planning.budget_bytes(room("auto", Memory(10**12, flat - 1, 0)), load, {}) == flat - 1
    assert planning.budget_bytes(room("1GB"), load, {}) == 1000 * MB
    assert planning.faster(room("Auto", plenty), load, {}).total_bytes > flat and planning.faster(room("1GB"), load, {}) is None
    assert "cut to the 5,500.0 MB" in planning.allowed(room("90%"), room("90%").budget_bytes) and not room("50%").cut


def test_all_stages_by_number_are_all():
    load = workload()
    plan = plans.make(load, choose.fastest(load), 60 * MB)
    for resident, fast in ((ALL, True), (13, True), (99, True), (12, False)):
        assert plan_report.fast(dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, resident=resident))) == fast


def test_a_rank_above_the_models_width_is_refused():
    assert workload(rank=256).rank == 256
    with pytest.raises(UserError, match="--rank is 257, above the model's width of 256"):
        workload(rank=257)


@pytest.mark.parametrize(("spare", "said"), [(0.5, True), (100, False)])
def test_other_programs_are_named_only_where_they_bind(model, data, tmp_path, one_process, monkeypatch, capsys, spare, said):
    flat = choose.flat_bytes
    monkeypatch.setattr(machine, "memory", lambda: Memory(10**13, int(spare * 1000 * MB), 10**10))
    monkeypatch.setattr(choose, "flat_bytes", lambda *given: max(800 * MB, flat(*given)))
    assert command(*flags(model, data, tmp_path, "--dry-run", "--resident", "1")) == 0
    assert ("closing other programs" in capsys.readouterr().out) == said


def test_least_and_fastest_are_refused_beyond_what_the_machine_has():
    load = workload()
    least, fastest = planning.within(room("least"), load, {}), planning.within(room("fastest"), load, {})
    assert dataclasses.replace(least.strategy, group_tokens=1) == choose.least(load) and fastest.strategy == choose.fastest(load)
    with pytest.raises(DoesNotFit) as caught:
        planning.within(room("fastest", Memory(100 * MB, 90 * MB, 5 * MB)), load, {"keep": "all", "hold": False})
    assert "--memory auto takes the fastest plan that fits" in str(caught.value) and "by hand: --keep all --no-hold" in str(caught.value)
    with pytest.raises(DoesNotFit):
        planning.within(room("least", Memory(70 * MB, 61 * MB, MB)), load, {})


# The whole command.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"), chat_rows(10), chat_rows(3, first=50))


def flags(model, data, tmp_path, *more):
    words = ["finetune", "--model", str(model), "--data", str(data), "--backend", "numpy", "--iters", "2", "--reply-tokens", "0", *more]
    return [*words, "--adapter-path", str(tmp_path / "out"), "--json-log", str(tmp_path / "log.jsonl")]


def test_a_dry_run_prints_the_plan_and_writes_nothing(model, data, tmp_path, one_process, monkeypatch, capsys):
    monkeypatch.setattr(finetune, "Store", None)  # would fail if it were opened
    assert command(*flags(model, data, tmp_path, "--dry-run")) == 0
    said = capsys.readouterr().out
    (event,) = read_log(tmp_path / "log.jsonl")
    assert event["event"] == "plan" and event["predicted_peak_bytes"] >= event["predicted_bytes"] and event["updates"] == 2
    assert sum(event["by_part"].values()) == event["predicted_bytes"] and max(event["by_phase"].values()) == event["predicted_arrays_bytes"]
    assert f"{event['predicted_peak_bytes'] / 1e6:,.1f} MB predicted peak" in said and "all weights stay in memory; backward recomputes no product" in said
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_refused_before_weights_are_read(model, data, tmp_path, one_process, monkeypatch, capsys):
    monkeypatch.setattr(finetune, "Store", None)
    monkeypatch.setattr(machine, "memory", lambda: Memory(10 * MB, 8 * MB, MB))
    assert command(*flags(model, data, tmp_path)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: planning a run within 9.0 MB: even with the least memory it takes ") and said.err.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "log.jsonl").exists()
    monkeypatch.undo()


def test_one_update_is_tried_on_the_longest_rows_and_nothing_saved(model, data, tmp_path, one_process, capsys):
    seen, inner = [], planning.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "step", lambda run, update, groups: (seen.extend(groups), inner(run, update, groups))[1])
        assert command(*flags(model, data, tmp_path, "--try-step", "--batch-size", "3")) == 0
    said = capsys.readouterr().out
    plan, tried = read_log(tmp_path / "log.jsonl")
    assert tried["event"] == "try_step" and tried["train_loss"] > 0 and tried["predicted_arrays_bytes"] == plan["predicted_arrays_bytes"]
    assert tried["process_peak_bytes"] > 0 and "nothing was saved" in said and "(planned: " in said
    lengths = sorted((length for group in seen for length in group.lengths), reverse=True)
    assert len(lengths) == 3 and lengths[0] == lengths[1] > lengths[2], "two of the ten rows are of the longest kind"
    assert not list((tmp_path / "out").glob("*"))


EVERYTHING_IN_THE_FILE = {
    "checkpoints": "file", "states": "file", "gradients": "spilled", "adapters": "file", "hold": False, "prefetch": 0, "keep": "nothing", "resident": 2,
    "group_tokens": 40, "query_tile": 16, "width_tile": 128, "vocabulary_tile": 64, "weight_tile": 9000,
}  # fmt: skip


def test_choices_reach_the_run_and_change_no_adapter(model, data, tmp_path, one_process, monkeypatch, capsys):
    steady = {"iters": 3, "optimizer": "sgd", "learning_rate": 0.05, "warmup": 0}
    free = run(model, data, tmp_path / "free", **steady)
    made, inner = [], finetune.RunFile
    monkeypatch.setattr(finetune, "RunFile", lambda *given, **named: made.append(inner(*given, **named)) or made[-1])
    bound = run(model, data, tmp_path / "bound", **steady, **EVERYTHING_IN_THE_FILE)
    (plan,), (file,) = bound.of("plan"), made
    given = {"adapter" if name == "adapters" else name: value for name, value in EVERYTHING_IN_THE_FILE.items()}
    assert plan["strategy"].items() >= {name: value for name, value in given.items() if name != "group_tokens"}.items()
    assert plan["strategy"]["group_tokens"] <= 40 and file.bytes_written > 0 and file.peak_bytes <= file.size_bytes <= plan["file_bytes"] * 1.5 + 400_000
    for name, array in free.adapter.items():
        assert np.linalg.norm(bound.adapter[name] - array) <= 1e-5 * max(np.linalg.norm(array), 1e-9), name
    assert "in the run's file" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "bound").iterdir()) == ["adapter_config.json", "adapters.safetensors"]


def test_predicted_stands_beside_measured_at_the_end(model, data, tmp_path, one_process, capsys):
    assert command(*flags(model, data, tmp_path)) == 0
    plan, end = (event for event in read_log(tmp_path / "log.jsonl") if event["event"] in ("plan", "end"))
    assert end["predicted_arrays_bytes"] == plan["predicted_arrays_bytes"] and end["predicted_peak_bytes"] >= plan["predicted_bytes"]
    said = capsys.readouterr().out
    assert f"{end['process_peak_bytes'] / 1e6:,.1f} MB (predicted: {end['predicted_peak_bytes'] / 1e6:,.1f} MB) by the operating system" in said
    assert set(read_adapter(tmp_path / "out" / "adapters.safetensors")) != set()


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.parametrize("extra", [400_000, 4_000_000])
def test_a_budget_is_kept_by_the_operating_systems_count(model, tmp_path, run_cli, backend, extra):
    """In processes of their own: the least plan's size and a little is enough, and less is refused."""
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    data = data_folder(tmp_path / "data", chat_rows(24))
    words = flags(model, data, tmp_path, "--batch-size", "8", "--reply-tokens", "2")
    words[words.index("numpy")] = backend

    def go(*more):
        (tmp_path / "log.jsonl").unlink(missing_ok=True)
        done = run_cli(*words, *more, "--overwrite", cwd=tmp_path, env={"MESP_MLX_CACHE": str(tmp_path / "cache"), "OPENBLAS_NUM_THREADS": "1"})
        return done, (read_log(tmp_path / "log.jsonl") if (tmp_path / "log.jsonl").exists() else [])

    done, (plan,) = go("--memory", "least", "--adapters", "file", "--dry-run")
    assert done.returncode == 0, done.stderr
    budget = plan["predicted_peak_bytes"] + extra
    done, events = go("--memory", f"{budget}B")
    assert done.returncode == 0, done.stderr
    assert events[-1]["event"] == "end" and events[-1]["process_peak_bytes"] <= budget
    done, _ = go("--memory", f"{int(0.8 * budget)}B")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Raise --memory to " in done.stderr
