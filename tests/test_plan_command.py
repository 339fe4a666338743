"""`mesp-mlx plan`: from a config alone, for this machine and others; the same figures each time; what it names and what it refuses."""

import json
import os

import pytest
from conftest import ROOT
from gguf_files import random_weights, write_gguf
from models import tiny_config, tool
from rich.console import Console
from runs import chat_rows, command, data_folder, tiny_model
from test_model_hub import hub  # noqa: F401  (a fixture)

from mesp_mlx import planning, report
from mesp_mlx.memory import choose, devices, machine
from mesp_mlx.memory import plan as plans
from mesp_mlx.memory.machine import Memory
from mesp_mlx.memory.plan import Speeds
from mesp_mlx.model import shapes, source
from mesp_mlx.model.spec import load_spec

MB = 10**6


@pytest.fixture
def plan(monkeypatch, tmp_path, capsys, one_process):
    """`mesp-mlx plan` in this process on a machine that never changes; gives (exit code, figures, what was printed)."""
    fixed = Speeds(100e9, 2e9, 1e9)
    monkeypatch.setattr(machine, "speeds", lambda *_: fixed)
    monkeypatch.setattr(machine, "with_writing", lambda found, *_, **__: found)
    monkeypatch.setattr(machine, "memory", lambda: Memory(8000 * MB, 4000 * MB, 1000 * MB))

    def call(*words):
        file = tmp_path / "plan.json"
        file.unlink(missing_ok=True)
        code = command("plan", *map(str, words), "--json", str(file))
        said = capsys.readouterr()
        assert code != 2, said.err
        return code, json.loads(file.read_text()), said.out

    return call


def fails(capsys, *words) -> str:
    assert command("plan", *map(str, words)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ")
    return said.err


def config_file(folder, **overrides):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny_config("llama", **overrides)))
    return folder / "config.json"


def test_the_same_plan_each_time_and_its_parts_add_up(plan):
    words = ("--model", "qwen2.5-0.5b", "--backend", "numpy", "--memory", "200MB", "--seq", "256", "--batch", "2")
    code, found, said = plan(*words)
    assert (code, found) == plan(*words)[:2] and code == 0 and found["verdict"] in ("fits", "tight")
    assert found["predicted_bytes"] <= 200 * MB and sum(found["by_part"].values()) == found["predicted_bytes"]
    assert found["predicted_arrays_bytes"] == found["by_phase"][found["peak_phase"]] == max(found["by_phase"].values())
    assert found["disk_seconds_per_update"] <= found["read_bytes_per_update"] / 2e9 + found["written_bytes_per_update"] / 1e9 + 1e-6
    assert found["workload"].items() >= {"rows": 2, "width": 256, "layers": 24, "modules": 168, "itemsize": 4, "backend": "numpy"}.items()
    rows = [tensor for tensor in found["tensors"] if found["peak_phase"] in tensor["phases"]]
    assert all(tensor["bytes"] > 0 for tensor in rows) and {tensor["part"] for tensor in rows} >= {"weights", "states", "stage", "base", "slack"}
    for name in ("memory by part and phase", "together", "the largest in the phase", "strategy  ", "TFLOP per update", "does not wear a disk", "verdict"):
        assert name in said
    for phase in found["by_phase"]:
        assert phase in said


def test_a_plan_is_that_of_a_models_shape_whichever_way_it_is_given(plan, tmp_path):
    """A folder, its config.json, a model that was written from it, a GGUF file; unquantised weights are counted as they will be."""
    file = config_file(tmp_path / "alone", intermediate_size=128)
    written = tool("make_random_model").make(tiny_config("llama", intermediate_size=128), tmp_path / "written", 0, 4, 64, "float32")
    given = ("--backend", "numpy", "--memory", "least", "--seq", "32")
    figures = [plan("--model", model, *given)[1] for model in (file, file.parent, written)]
    assert [found.pop("model") for found in figures] == ["alone", "alone", "written"]
    assert figures[0] == figures[1] == figures[2]
    read = [plan("--model", file, "--quantize", bits, "--resident", 0, *given[:2])[1]["read_bytes_per_update"] for bits in ("none", "4")]
    assert read[0] > 4 * read[1]


def test_the_shapes_are_models_and_the_demo_is_one(demo_model):
    for name, config in shapes.SHAPES.items():
        assert load_spec(config, name).num_layers > 0
    with source.shape("demo", demo_model.folder.parent) as alone, source.shape(str(demo_model.folder), demo_model.folder.parent) as whole:
        assert alone.spec == whole.spec and alone.folder is None


def test_a_gguf_header_is_enough(plan, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_weights())
    _, found, _ = plan("--model", path, "--seq", "16", "--backend", "numpy")
    assert found["model"] == "tiny" and found["predicted_bytes"] > 0


def test_a_hub_id_costs_its_config_and_nothing_else(run_cli, hub, tmp_path):  # noqa: F811
    names = ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "MESP_MLX_CACHE": str(tmp_path / "c")}
    done = run_cli("plan", "--model", "org/Tiny", "--backend", "numpy", "--json", "-", cwd=tmp_path, env=own | dict.fromkeys(set(names) & set(os.environ), ""))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "Tiny" and hub.fetched() == {"config.json"} and not (tmp_path / "c").exists()
    done = run_cli("plan", "--model", "org/Tiny", "--data", str(data_folder(tmp_path / "d", chat_rows(3))), "--backend", "numpy", cwd=tmp_path, env=own)
    assert done.returncode == 2 and "the tokenizer in" in done.stderr, "this model's is none"
    assert hub.fetched() == set(hub.dense) - {"model.safetensors"} | {"config.json"}
    done = run_cli("plan", "--model", "org/Nothing", cwd=tmp_path, env=own)
    assert done.returncode == 2 and "no such model on the Hub" in done.stderr


def test_mlx_is_planned_for_where_it_is_not_installed(run_cli, tmp_path):
    absent = tmp_path / "absent" / "mlx"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('no MLX here')\n")
    env = {"PYTHONPATH": os.pathsep.join([str(absent.parent), str(ROOT)])}
    for words in (("--backend", "mlx"), ("--device", "mac-8gb")):
        done = run_cli("plan", "--model", "llama-3-70b", *words, "--memory", "3GB", "--json", "-", cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["workload"]["backend"] == "mlx" and not found["workload"]["on_cpu"] and found["workload"]["itemsize"] == 2
        assert found["predicted_bytes"] <= 3_000_000_000 and not found["speeds_measured"]


def test_a_device_s_memory_counts_instead_of_this_machines(plan):
    phone = devices.find("iphone-15")
    _, found, said = plan("--model", "llama-3-8b", "--device", "iphone-15")
    assert (
        found["limit_bytes"] == phone.limit_bytes >= found["budget_bytes"] >= found["predicted_bytes"] and found["verdict"] == "fits" and phone.source in said
    )
    code, found, said = plan("--model", "llama-3-8b", "--device", "iphone-15", "--memory", "fastest")
    assert (code, found["verdict"]) == (1, "does not fit") and "--memory auto takes the fastest plan that fits" in said
    percent = plan("--model", "llama-3-8b", "--device", "iphone-15", "--memory", "25%")[1]
    assert percent["budget_bytes"] == phone.memory_bytes // 4


def test_what_does_not_fit_says_what_would(plan):
    code, found, said = plan("--model", "qwen2.5-3b", "--backend", "numpy", "--memory", "90MB", "--seq", "2048")
    assert (
        (code, found["verdict"]) == (1, "does not fit")
        and found["predicted_bytes"] > 90 * MB
        and "a smaller --seq" in found["reason"]
        and "--max-seq-length" not in said
    )
    assert found["reason"] in said.replace("\n", " ") or "even with the least memory" in said
    words = ("--model", "qwen2.5-3b", "--backend", "numpy", "--seq", "2048")
    least = min(plan(*words, "--memory", "least", "--adapters", where)[1]["predicted_bytes"] for where in ("file", "memory"))
    assert plan(*words, "--memory", f"{least}B")[0] == 0


@pytest.mark.parametrize("what", ["seq", "batch", "rank"])
def test_the_largest_that_fits_fits_and_one_more_does_not(plan, what):
    words = ("--model", "smollm2-135m", "--backend", "numpy", "--memory", "150MB", "--adapters", "memory")
    given = {"seq": 64, "batch": 4, "rank": 8}
    base = [word for name, value in given.items() if name != what for word in (f"--{name}", value)]
    _, found, said = plan(*words, *base, "--find", what)
    largest = found["find"][what]
    assert largest > given[what] // 2 and f"{largest:,}" in said
    assert plan(*words, *base, f"--{what}", largest)[0] == 0
    limit = 8192 if what == "seq" else None
    if largest != limit:
        spec = load_spec(shapes.SHAPES["smollm2-135m"])
        more = plan(*words, *base, f"--{what}", largest + 1, "--memory", "least")[1]
        assert more["predicted_bytes"] > 150 * MB, spec.model_type


def test_rows_are_named_by_file_and_line(plan, tmp_path):
    model = tiny_model(tmp_path / "model")
    rows = chat_rows(8)
    rows[5]["messages"][1]["content"] = " ".join(["It is noon."] * 9)
    data = data_folder(tmp_path / "data", rows, chat_rows(2, first=50))
    _, found, said = plan("--model", model, "--data", data, "--backend", "numpy", "--epochs", "2", "--batch", "2")
    assert found["longest_rows"][0] == {"file": str(data / "train.jsonl"), "line": 6, "tokens": found["longest_rows"][0]["tokens"]}
    assert [row["tokens"] for row in found["longest_rows"]] == sorted((row["tokens"] for row in found["longest_rows"]), reverse=True)
    assert f"{data / 'train.jsonl'}:6 (" in said and "minutes" in said
    assert found["updates"] == 8 and found["seconds"] > 0 and found["workload"]["rows"] <= 2
    cut = plan("--model", model, "--data", data, "--backend", "numpy", "--seq", "24")[1]
    assert cut["workload"]["width"] <= 24 < found["workload"]["width"]


def test_models_by_devices(plan):
    code, found, said = plan("--devices", "--seq", "128", "--batch", "1")
    assert code == 0 and [row["model"] for row in found["models"]] == list(shapes.SHAPES)
    for row in found["models"]:
        spec = load_spec({"torch_dtype": "bfloat16", **shapes.SHAPES[row["model"]]})
        assert row["least_bytes"] < row["fastest_bytes"] and row["width"] == min(128, spec.max_positions)
        assert row["verdicts"] == {device.name: devices.verdict(device, row["least_bytes"]) for device in devices.DEVICES}
        assert row["model"] in said
    one = plan("--devices", "--model", "qwen2.5-3b", "--keep", "all", "--resident", "all", "--checkpoints", "memory", "--seq", "4096", "--batch", "8")[1]
    assert len(one["models"]) == 1 and "does not fit" in one["models"][0]["verdicts"].values()


def test_a_strategy_by_hand_is_planned_for(plan):
    _, found, said = plan("--model", "smollm2-135m", "--backend", "numpy", "--checkpoints", "file", "--keep", "inputs", "--resident", "5", "--memory", "1GB")
    assert found["strategy"].items() >= {"checkpoints": "file", "keep": "inputs", "resident": 5}.items()
    assert "weights of 5 of 61 stages stay in memory" in said and "checkpoints in the run's file" in said


def test_auto_prints_what_it_may_take_and_what_more_would_buy(plan):
    """Auto stays flat: what it may take is not what the machine has."""
    _, found, said = plan("--model", "smollm2-135m", "--backend", "numpy")
    assert found["predicted_bytes"] <= found["budget_bytes"] < found["limit_bytes"] == 4000 * MB
    assert f"--memory auto: {found['budget_bytes'] / 1e6:,.1f} MB may be taken" in said and "less time" in said
    assert "more" not in plan("--model", "smollm2-135m", "--backend", "numpy", "--memory", "1GB")[2].split("memory  ")[1]


def test_a_size_that_is_not_there_is_cut(plan):
    said = plan("--model", "smollm2-135m", "--backend", "numpy", "--memory", "5000GB")[2]
    assert "--memory 5000GB, cut to the 5,000.0 MB that this machine can give" in said and "fits within the 5,000.0 MB that this machine can give" in said
    phone = devices.find("Iphone-15")
    said = plan("--model", "SmolLM2-135m", "--device", "IPHONE-15", "--memory", "100GB")[2]
    assert f"cut to the {phone.limit_bytes / 1e6:,.1f} MB that {phone.title} leaves one app" in said


def test_a_run_s_time_takes_its_updates(plan):
    words = ("--model", "smollm2-135m", "--backend", "numpy")
    _, found, said = plan(*words, "--iters", "100")
    assert found["updates"] == 100 and found["seconds"] == pytest.approx(100 * found["seconds_per_update"]) and "100 updates in" in said
    _, found, said = plan(*words, "--epochs", "2")
    assert found["updates"] is found["seconds"] is None and "give --data, or --iters instead" in said


def test_any_json_is_a_config(plan, capsys, tmp_path):
    file = config_file(tmp_path / "m").rename(tmp_path / "unk.json")
    assert plan("--model", file, "--backend", "numpy")[1]["model"] == "unk"
    for text, message in (("", "it is empty"), ("{", "it is not JSON"), ("[]", "it holds list")):
        file.write_text(text)
        assert message in fails(capsys, "--model", file)
    other = file.rename(tmp_path / "notes.txt")
    assert "not in GGUF format" in fails(capsys, "--model", other)


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("words", [("--devices",), ("--model", "qwen2.5-0.5b", "--backend", "numpy", "--keep", "nothing")])
def test_tables_are_whole_however_narrow_the_terminal(plan, monkeypatch, width, words):
    console = Console(width=width, force_terminal=True, no_color=True, color_system=None, markup=False, highlight=False)
    monkeypatch.setattr(report, "console", lambda _: console)
    with console.capture() as captured:
        found = plan(*words)[1]
    said = captured.get()
    assert "…" not in said and max(map(len, said.splitlines())) <= width
    if "models" in found:
        cells = [f"{row[key] / 1e6:,.1f}" for row in found["models"] for key in ("least_bytes", "fastest_bytes")] + list(found["models"][0]["verdicts"])
    else:
        cells = [f"{size / 1e6:,.1f}" for size in found["by_part"].values()] + [word for phase in found["by_phase"] for word in phase.split()]
    assert set(cells) <= set(said.split()), "no number or name is broken"


def test_mistakes_are_said_at_once(capsys, tmp_path, monkeypatch, one_process):
    monkeypatch.setattr(machine, "speeds", None)
    known = ("--model", "smollm2-135m")
    assert "no device is called mac; there are mac-8gb" in fails(capsys, *known, "--device", "mac")
    assert "--find: found 'width', expected seq, batch or rank" in fails(capsys, *known, "--find", "width")
    assert "--dtype: found 'int8', expected float32, bfloat16, float16" in fails(capsys, *known, "--dtype", "int8")
    assert "--dtype bfloat16: NumPy computes in float32" in fails(capsys, *known, "--backend", "numpy", "--dtype", "bfloat16")
    assert "--seq is 9000, but the model was made for 8192 positions" in fails(capsys, *known, "--seq", "9000")
    assert "no model is given" in fails(capsys)
    assert "--batch: found 0, expected at least 1" in fails(capsys, *known, "--batch", "0")
    assert "--rank is 577, above the model's width of 576" in fails(capsys, *known, "--rank", "577")
    assert "--devices plans for all devices: remove --device" in fails(capsys, "--devices", "--device", "mac-8gb")
    assert "--devices plans for all devices: remove --find" in fails(capsys, "--devices", "--find", "seq")
    assert "no such folder or file" in fails(capsys, "--model", "nowhere") and "qwen2.5-3b" in fails(capsys, "--model", "nowhere")
    assert "Give --model a folder or a Hub id" in fails(capsys, *known, "--data", data_folder(tmp_path / "data", chat_rows(3)))
    assert "has 30" in fails(capsys, *known, "--num-layers", "31")
    broken = config_file(tmp_path / "broken", model_type="no_model")
    assert "'no_model' is not served" in fails(capsys, "--model", broken, "--backend", "numpy")


def test_the_least_of_the_verb_is_the_least_of_the_choice():
    spec = load_spec({"torch_dtype": "bfloat16", **shapes.SHAPES["qwen2.5-0.5b"]})
    load = plans.Workload(spec, tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in range(24)))
    places = ("memory", "file")
    assert planning.least_bytes(load, {}, MB) == min(plans.make(load, choose.least(load, place), MB).total_bytes for place in places)
