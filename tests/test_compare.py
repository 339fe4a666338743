"""Every method in one harness: they start alike, the exact ones stay alike, and what was measured is all written down."""

import importlib
import json
import math

import numpy as np
import pytest
from engines import worst_error
from runs import BACKENDS, chat_rows, command, data_folder, read_adapter, tiny_model
from test_plots import png_size

from mesp_mlx import adapter as adapters
from mesp_mlx import child, compare, compare_child, config, reference, sources
from mesp_mlx.adapter import ADAPTER_FILE, CONFIG_FILE
from mesp_mlx.compare import PICTURES, RESULT
from mesp_mlx.config import VARIANTS
from mesp_mlx.errors import UserError
from mesp_mlx.model.spec import load_spec, read_config

EXACT = [name for name in VARIANTS if name != "mezo"]
ITERS = 5
WALK = ["forward", "head", "backward", "update"]
PHASES = dict.fromkeys(("mesp", "mebp", "mebp-tiled"), WALK) | {"mezo": ["forward", "head", "update"]}
PHASES |= dict.fromkeys(("backprop", "backprop-checkpointed"), ["build", "forward and backward, one graph", "update"])
FIELDS = {
    "settings", "backend", "base_bytes", "allocator_peak_bytes", "process_peak_bytes", "seconds_per_step", "step_seconds", "iterations", "losses",
    "gradient_cosine", "gradient_failed", "gradient_is_truth", "timeline",
}  # fmt: skip
CONDITIONS = {"model", "data", "backend", "iters", "rows_per_update", "true_gradient", "true_gradient_dtype", "cache_limit_bytes"}
CONDITIONS |= {"versions", "platform", "methods"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"), chat_rows(12), chat_rows(2, first=50))


def serve_here(monkeypatch):
    """The children's work done in this process, which is quicker, and fails where they would."""

    def ask(module, request, doing, **_):
        return json.loads(json.dumps(importlib.import_module(module).serve(json.loads(json.dumps(request)))))

    monkeypatch.setattr(child, "ask", ask)


@pytest.fixture
def here(monkeypatch, one_process):
    serve_here(monkeypatch)


def flags(model, data, **given):
    return {"model": str(model), "data": str(data), "iters": ITERS, "backend": "numpy"} | given


def result_in(folder):
    return json.loads((folder / RESULT).read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=BACKENDS)
def everything(request, model, data, tmp_path_factory):
    """All variants by one backend: the folder, and what it prints."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESP_MLX_CACHE", str(tmp_path_factory.mktemp("cache")))
        serve_here(patch)
        from mesp_mlx.data import tokens
        from mesp_mlx.model import source

        patch.setattr(source, "resolve_apart", source.resolve)
        patch.setattr(tokens, "_ask_child", tokens._serve)
        given = flags(model, data, backend=request.param, learning_rate=1e-3, optimizer="sgd", mezo_perturbations=2)
        assert compare.run(str(out), None, ",".join(VARIANTS), given) == 0
    return out


def test_all_that_was_promised_is_written_down(everything):
    found = result_in(everything)
    assert found.keys() == CONDITIONS and list(found["methods"]) == list(VARIANTS)
    mlx = found["backend"] == "mlx"
    assert found["iters"] == ITERS and found["rows_per_update"] == 4 and found["true_gradient"] == "mebp"
    assert mlx or found["true_gradient_dtype"] == "float32"
    assert {"mesp_mlx", "python", "numpy"} <= found["versions"].keys() and ("mlx" in found["versions"]) == mlx
    assert (found["cache_limit_bytes"] == 4_000_000) == mlx
    for name, result in found["methods"].items():
        assert result.keys() == FIELDS
        assert result["process_peak_bytes"] >= result["base_bytes"] > 20e6  # of one process here, whose peak an earlier method may have set
        assert (result["allocator_peak_bytes"] or 0) > 1e5 if mlx else result["allocator_peak_bytes"] is None
        assert len(result["step_seconds"]) == ITERS and min(result["step_seconds"]) <= result["seconds_per_step"] <= max(result["step_seconds"])
        assert result["iterations"] == list(range(1, ITERS + 1)) and len(result["losses"]) == ITERS
        assert {**result["settings"], **VARIANTS[name]} == result["settings"]
        assert result["gradient_failed"] is None and result["gradient_is_truth"] == (name == "mebp")
    assert all(min(png_size(everything / picture)) > 300 for picture in PICTURES)


def test_exact_methods_lose_alike_and_mezo_does_not(everything):
    losses = {name: result["losses"] for name, result in result_in(everything)["methods"].items()}
    for name in EXACT:
        assert losses[name] == pytest.approx(losses["mesp"], abs=1e-5)
    assert losses["mezo"][0] == pytest.approx(losses["mesp"][0], abs=1e-3), "they start from the same adapter"
    assert abs(losses["mezo"][-1] - losses["mesp"][-1]) > 1e-3
    assert losses["mesp"][-1] < losses["mesp"][0]


def test_exact_methods_have_the_true_gradient_and_mezo_an_estimate(everything):
    cosines = {name: result["gradient_cosine"] for name, result in result_in(everything)["methods"].items()}
    assert all(cosines[name] >= 0.999999 for name in EXACT if name != "mebp") and cosines["mebp"] is None, "it is the truth"
    assert math.isfinite(cosines["mezo"]) and 0 < abs(cosines["mezo"]) < 0.9


def test_phases_come_in_order_and_are_sampled(everything):
    for name, result in result_in(everything)["methods"].items():
        timeline = result["timeline"]
        times, phases = timeline["seconds"], timeline["phases"]
        assert timeline["step"] == ITERS // 2
        wanted = ["forward", "head"] * 2 + ["update"] if name == "mezo" else PHASES[name]  # mezo's two directions
        assert [phase["name"] for phase in phases] == wanted
        assert [phase["start_seconds"] for phase in phases[1:]] == [phase["end_seconds"] for phase in phases[:-1]]
        assert phases[-1]["end_seconds"] == pytest.approx(result["step_seconds"][ITERS // 2])
        assert len(times) == len(timeline["process_bytes"]) >= 2 and times == sorted(times) and times[-1] >= phases[-1]["end_seconds"] * 0.5
        allocator = timeline["allocator_bytes"]
        assert allocator is None or (len(allocator) == len(times) and 0 < max(allocator) <= result["allocator_peak_bytes"])


def test_each_method_leaves_what_finetune_would(everything):
    trained = {}
    for name in VARIANTS:
        written = json.loads((everything / name / CONFIG_FILE).read_text(encoding="utf-8"))
        assert written["method"] == VARIANTS[name]["method"] and written["fine_tune_type"] == "lora"
        trained[name] = read_adapter(everything / name / ADAPTER_FILE)
        events = [json.loads(line)["event"] for line in (everything / name / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        assert events.count("train") == ITERS and "validation" not in events
    for name in EXACT:
        assert all(trained[name][key] == pytest.approx(trained["mesp"][key], abs=1e-5) for key in trained["mesp"])


def test_as_a_user_would_and_one_that_fails(model, data, tmp_path, run_cli):
    """In processes of their own: mezo at a rate at which it leaves all numbers; the other goes on."""
    environment = {"MESP_MLX_CACHE": str(tmp_path / "cache")}
    words = ["--model", str(model), "--data", str(data), "--backend", "numpy", "--iters", "3", "--mezo-learning-rate", "1e30", "--methods", "mezo, mesp"]
    done = run_cli("compare", *words, "--out", "out", cwd=tmp_path, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    mezo, mesp = result_in(tmp_path / "out")["methods"].values()
    assert "loss is" in mezo["failed"] and "a lower --mezo-learning-rate" in mezo["failed"]
    assert math.isfinite(mezo["gradient_cosine"]) and mezo.keys() & {"losses"} == set()
    assert "failed" not in mesp and len(mesp["losses"]) == 3 and mesp["gradient_cosine"] >= 0.999999
    assert all(min(png_size(tmp_path / "out" / picture)) > 300 for picture in PICTURES)
    lines = done.stdout.splitlines()
    (header,) = (line for line in lines if line.startswith("method "))
    rows = [line for line in lines[lines.index(header) :] if line.startswith(("mezo ", "mesp "))]
    assert "loss at 3" in header and "failed" in rows[0] and "not counted" in rows[1] and "1.000000" in rows[1]
    assert any(line.startswith("mezo failed: update") for line in lines)


def test_a_child_that_ends_without_an_answer_does_not_stop_the_others(model, data, tmp_path, monkeypatch, here, capsys):
    (tmp_path / "losses.png").write_bytes(b"an earlier comparison's")
    served = child.ask

    def ask(module, request, doing, **given):
        if doing in ("training by mebp", "the gradient of mesp"):
            raise UserError(f"{doing} failed: out of memory")
        return served(module, request, doing, **given)

    monkeypatch.setattr(child, "ask", ask)
    assert compare.run(str(tmp_path), None, "mebp,mesp", flags(model, data, iters=1)) == 1
    mebp, mesp = result_in(tmp_path)["methods"].values()
    assert mebp["failed"] == "training by mebp failed: out of memory" and mebp["gradient_is_truth"]
    assert mesp["gradient_cosine"] is None and mesp["gradient_failed"] == "the gradient of mesp failed: out of memory" and len(mesp["losses"]) == 1
    said = capsys.readouterr().out
    assert "gradient of mesp failed" in said and "activations in float32" in said
    assert next(line for line in said.splitlines() if line.startswith("mebp  ")).endswith("the truth")

    monkeypatch.setattr(child, "ask", lambda module, request, doing: {"failed": "no memory"})
    assert compare.run(str(tmp_path), None, "mebp,mesp", flags(model, data, iters=1)) == 1
    assert all(result["failed"] == "no memory" for result in result_in(tmp_path)["methods"].values())
    assert not any((tmp_path / picture).exists() for picture in PICTURES), "pictures of an earlier comparison are gone"


@pytest.mark.parametrize("methods, found", [("mesp,mebpp", "no method is called 'mebpp'"), (" , ", "no method was named")])
def test_methods_there_are_not(model, data, tmp_path, capsys, methods, found):
    code = command("compare", "--model", str(model), "--data", str(data), "--out", str(tmp_path / "out"), "--methods", methods)
    said = capsys.readouterr().err
    assert code == 2 and found in said and all(name in said for name in VARIANTS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "methods, words",
    [
        ("mezo", "--optimizer adam is for the exact methods"),
        ("mezo", "--learning-rate 0.1 is for the exact methods"),
        ("mesp,backprop", "--mezo-perturbations 10 is for mezo"),
        ("mesp", "--mezo-learning-rate 1 is for mezo"),
    ],
)
def test_a_flag_for_a_method_not_named(model, data, tmp_path, capsys, methods, words):
    flag, value, *whose = words.split()
    code = command("compare", "--model", str(model), "--data", str(data), "--out", str(tmp_path / "out"), "--methods", methods, flag, value)
    said = capsys.readouterr().err
    assert code == 2 and said.startswith(f"error: {flag} {' '.join(whose)}") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_is_done_is_written_before_the_next_begins(model, data, tmp_path, monkeypatch, here):
    served, doings = child.ask, []

    def ask(module, request, doing, **given):
        doings.append(doing)
        if doing == "training by backprop":
            raise KeyboardInterrupt
        return served(module, request, doing, **given)

    monkeypatch.setattr(child, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        compare.run(str(tmp_path), None, "mebp,backprop", flags(model, data, iters=1))
    assert doings == ["the true gradient", "training by mebp", "the gradient of backprop", "training by backprop"]
    found = result_in(tmp_path)
    assert found.keys() == CONDITIONS and list(found["methods"]) == ["mebp"] and found["methods"]["mebp"].keys() == FIELDS
    assert not any((tmp_path / picture).exists() for picture in PICTURES)


def test_a_files_accumulation_and_schedule(model, data, tmp_path, here, capsys):
    """Iterations are whole updates; a schedule with arguments is the rate of the exact methods, and mezo has its own."""
    file = tmp_path / "settings.yaml"
    file.write_text("batch_size: 2\ngrad_accumulation_steps: 2\nlr_schedule: {name: cosine_decay, arguments: [1.0e-5, 10]}\n")
    assert compare.run(str(tmp_path), str(file), "mezo,mesp", flags(model, data, iters=3, mezo_learning_rate=0.01)) == 0
    said, found = capsys.readouterr().out, result_in(tmp_path)
    assert "--iters 3 is rounded up to whole updates of 2 iterations" in said and "loss at 4" in said and "mezo's is 0.01 by a cosine" in said
    assert found["iters"] == 4 and all(result["iterations"] == [2, 4] for result in found["methods"].values())
    rates = {}
    for name in ("mezo", "mesp"):
        events = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        rates[name] = [event["learning_rate"] for event in events if event["event"] == "train"]
    assert rates["mezo"] == pytest.approx([0.01, 0.001]) and rates["mesp"][0] == 1e-5


def test_what_the_user_can_change_is_said_as_ever(model, data, tmp_path, capsys, here):
    def said(*words):
        assert command("compare", "--backend", "numpy", "--methods", "mesp,mezo", "--out", str(tmp_path / "out"), *words) == 2
        return capsys.readouterr().err

    assert said("--model", str(model), "--data", str(data), "--rank", "0").startswith("error: --rank: found 0")
    assert "method mezo: --mezo-learning-rate: found -1" in said("--model", str(model), "--data", str(data), "--mezo-learning-rate", "-1")
    assert "nowhere" in said("--model", str(model), "--data", str(tmp_path / "nowhere"))
    assert "has 2" in said("--model", str(model), "--data", str(data), "--num-layers", "3"), "which a child finds"
    (tmp_path / "file").touch()
    assert "--out" in said("--model", str(model), "--data", str(data), "--out", str(tmp_path / "file"))


def test_the_gradient_is_taken_where_all_of_it_shows(model, data, tmp_path, here):
    """With B zero, as training starts, A would have none; its B is random, and A as training starts from it."""
    starts, files = [], {}
    original = compare_child.update

    def spy(settings, number, model, store, adapter, *others):
        starts.append({name: np.array(value) for name, value in adapter.items()})
        return original(settings, number, model, store, adapter, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_child, "update", spy)
        for name in ("mesp", "backprop"):
            files[name] = tmp_path / f"{name}.safetensors"
            request = {"config_file": None, "flags": compare.overrides(name, tmp_path, flags(model, data)), "gradient": str(files[name])}
            assert compare_child.serve(request)["loss"] > 0
    gradients = read_adapter(files["mesp"])
    assert all(np.abs(value).max() > 0 for value in gradients.values()) and {name[-1] for name in gradients} == {"a", "b"}
    assert worst_error(gradients, read_adapter(files["backprop"])) <= 1e-4
    spec = load_spec(read_config(model))
    first = adapters.initialise(spec, adapters.choose_modules(spec), 8, 0, reference)
    for name, value in starts[0].items():
        assert (value == starts[1][name]).all()
        if name.endswith("a"):
            assert (value == first[name]).all() and starts[0][f"{name[:-1]}b"].std() == pytest.approx(0.1 * value.std(), rel=0.2)


def test_each_method_gets_its_own_flags(tmp_path):
    """Mezo its own rate and optimizer whatever the others have, from a flag or a file; the others nothing of mezo's."""
    file = tmp_path / "settings.yaml"
    lines = ["model: m", "data: d", "learning_rate: 1e-3", "optimizer: adam", "grad_clip: 0.5", "mezo_epsilon: 0.01", "mezo_perturbations: 3", "iters: 7"]
    file.write_text("\n".join(lines))

    def settings(name, **given):
        return sources.load(file, compare.overrides(name, tmp_path, {"iters": 4, **given}))

    default = config.METHOD_DEFAULTS["mezo"]
    mezo, mebp, plain = settings("mezo", learning_rate=0.5, optimizer="sgd"), settings("mebp-tiled", learning_rate=0.5, seed=3), settings("backprop")
    assert (mezo.learning_rate, mezo.optimizer, mezo.grad_clip) == (default["learning_rate"], default["optimizer"], default["grad_clip"])
    assert (mezo.mezo_epsilon, mezo.mezo_perturbations) == (0.01, 3)
    assert settings("mezo", mezo_learning_rate=0.25, mezo_perturbations=9).model_dump().items() >= {"learning_rate": 0.25, "mezo_perturbations": 9}.items()
    assert (mebp.method, mebp.tiled_head, mebp.learning_rate, mebp.optimizer, mebp.seed) == ("mebp", True, 0.5, "adam", 3)
    assert (plain.method, plain.grad_checkpoint, plain.learning_rate, plain.grad_clip) == ("backprop", False, 1e-3, 0.5)
    assert settings("backprop-checkpointed").grad_checkpoint
    for given in (mezo, mebp, plain):
        assert (given.iters, given.val_batches, given.reply_tokens, given.steps_per_report) == (4, 0, 0, 1)


def test_the_cosine_is_over_all_tensors_together(tmp_path):
    a = {"x": np.array([[3.0, 0.0]], np.float32), "y": np.array([[4.0]], np.float32)}
    b = {"x": np.array([[0.0, 5.0]], np.float32), "y": np.array([[1.0]], np.float32)}
    files = [adapters.save(tmp_path, gradient, reference, name) for gradient, name in ((a, "a"), (b, "b"), ({key: 0 * v for key, v in a.items()}, "zero"))]
    assert compare.cosine_similarity(files[0], files[1]) == pytest.approx(4 / (5 * math.sqrt(26)))
    assert compare.cosine_similarity(files[0], files[0]) == pytest.approx(1) and compare.cosine_similarity(files[0], files[2]) == 0
