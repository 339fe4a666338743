"""Defaults, what overrides what, what is refused and how it is said, and the learning rate at every update."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from mesp_mlx import config, sources
from mesp_mlx.errors import UserError

BASE = {"model": "m", "data": "d"}


def load(file: dict | str | None = None, folder: Path | None = None, /, **flags) -> config.Settings:
    path = None
    if file is not None:
        assert folder is not None
        path = folder / "lora.yaml"
        path.write_text(file if isinstance(file, str) else yaml.safe_dump(file), encoding="utf-8")
    return sources.load(path, BASE | flags)


def refusal(*args, **flags) -> str:
    with pytest.raises(UserError) as caught:
        load(*args, **flags)
    return str(caught.value)


def test_defaults_are_the_ones_promised():
    s = load()
    assert (s.lora_parameters.rank, s.lora_parameters.effective_scale, s.lora_parameters.dropout, s.lora_parameters.keys) == (8, 20.0, 0.0, None)
    assert (s.optimizer, s.learning_rate, s.lr_schedule.name, s.warmup, s.grad_clip) == ("adamw", 2e-5, "cosine", 0.05, 1.0)
    assert s.optimizer_arguments == {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True, "weight_decay": 0.0}
    assert (s.rows_per_update, s.num_layers, s.mask_prompt, s.max_seq_length, s.iters, s.epochs) == (4, -1, True, None, None, None)
    assert (s.backend, s.quantize, s.adapter_path, s.seed, s.overwrite) == ("auto", "4", "adapters", 0, False)
    assert [config.default_epochs(rows) for rows in (1, 999, 1_000, 9_999, 10_000)] == [3, 3, 2, 2, 1]


def test_flags_override_the_file_which_overrides_the_defaults(tmp_path):
    s = load({"batch_size": 2, "seed": 7, "lora_parameters": {"rank": 4, "dropout": 0.5}}, tmp_path, batch_size=3, rank=16)
    assert (s.batch_size, s.seed, s.lora_parameters.rank, s.lora_parameters.dropout, s.lora_parameters.effective_scale) == (3, 7, 16, 0.5, 20.0)


def test_the_demo_has_its_own_recipe_and_only_with_both(tmp_path):
    recipe = yaml.safe_load((config.demo_folder() / "recipe.yaml").read_text(encoding="utf-8"))
    demo = sources.load(None, {"model": "demo", "data": "demo"})
    assert demo.learning_rate == float(recipe["learning_rate"]) != 2e-5
    assert demo.sample_prompt == recipe["sample_prompt"]
    assert sources.load(None, {"model": "demo", "data": "demo", "learning_rate": 3e-4}).learning_rate == 3e-4
    assert load({"learning_rate": 4e-4}, tmp_path, model="demo", data="demo").learning_rate == 4e-4
    assert load(model="demo").learning_rate == load(data="demo").learning_rate == 2e-5


def test_one_of_two_alternatives_replaces_the_other_from_below(tmp_path):
    s = sources.load(None, {"model": "demo", "data": "demo", "iters": 10})  # the recipe says epochs
    assert (s.iters, s.epochs) == (10, None)
    s = load({"lora_parameters": {"alpha": 4}}, tmp_path, scale=2.0)
    assert (s.lora_parameters.alpha, s.lora_parameters.effective_scale) == (None, 2.0)
    s = load({"lora_parameters": {"scale": 4}}, tmp_path, alpha=32, rank=16)
    assert s.lora_parameters.effective_scale == 2.0
    s = load({"lora_parameters": {"keys": ["self_attn.k_proj"]}}, tmp_path, target_modules="self_attn.q_proj, mlp.up_proj")
    assert s.lora_parameters.keys == ("self_attn.q_proj", "mlp.up_proj")
    s = sources.load(None, {"model": "demo", "data": "demo", "lr_schedule": "{name: cosine_decay, arguments: [1e-5, 9]}"})  # the recipe has a rate
    assert config.learning_rate(s, 0, 9) == 1e-5


def test_alpha_is_printed_as_the_scale_it_gives():
    s = load(alpha=16, rank=32)
    assert s.lora_parameters.effective_scale == 0.5
    assert config.remarks(s)[0] == "scale 0.5 = alpha 16 / rank 32"
    assert not any("alpha" in line for line in config.remarks(load(scale=3.0)))


def test_a_null_in_a_file_means_not_given_as_in_mlx_lm(tmp_path):
    s = load({"max_seq_length": None, "seed": None, "lora_parameters": {"keys": None, "rank": 4}, "lr_schedule": None}, tmp_path)
    assert (s.max_seq_length, s.seed, s.lora_parameters.keys, s.lr_schedule.name) == (None, 0, None, "cosine")


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path):
    text = "learning_rate: 1e-5\noptimizer_config: {adamw: {eps: 1e-6, betas: [0.9, 0.98]}}\nlr_schedule: {name: cosine_decay, arguments: [1e-5, 1e3, 1e-7]}\n"
    s = load(text, tmp_path)
    assert s.learning_rate == 1e-5
    assert s.optimizer_arguments == {"betas": (0.9, 0.98), "eps": 1e-6, "bias_correction": True, "weight_decay": 0.0}
    assert s.lr_schedule.arguments == (1e-5, 1000.0, 1e-7)


def test_every_setting_of_mlx_lm_is_understood(tmp_path):
    lora = pytest.importorskip("mlx_lm.lora", reason="mlx-lm isn't installed here", exc_type=ImportError)
    s = load(lora.CONFIG_DEFAULTS | BASE | {"train": True}, tmp_path)
    assert (s.num_layers, s.optimizer, s.learning_rate, s.iters, s.max_seq_length, s.mask_prompt) == (16, "adam", 1e-5, 1000, 2048, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dora", {"fine_tune_type": "dora"}), ("full", {"fine_tune_type": "full"}), ("muon", {"optimizer": "Muon"}), ("adafactor", {"optimizer": "adafactor"})],
)
def test_choices_of_a_later_version_are_refused_by_name(name, value, tmp_path):
    for message in (refusal(**value), refusal(value, tmp_path)):
        assert f"'{name}' comes in a later version" in message and next(iter(value)) in message.replace("-", "_")


@pytest.mark.parametrize("key", sorted(config.NOT_SERVED))
def test_what_is_not_served_is_refused_by_name_when_asked_for(key, tmp_path):
    if key in sources.SILENT_IN_FILES:
        assert load({key: 100}, tmp_path) == load()
        assert f"--{key.replace('_', '-')} isn't served" in refusal(**{key: 100})
        return
    assert f"{key} in {tmp_path / 'lora.yaml'} isn't served: {config.NOT_SERVED[key]}" in refusal({key: "yes"}, tmp_path)
    assert load({key: False}, tmp_path) == load()


def test_optimizer_arguments_are_checked(tmp_path):
    assert load(optimizer="sgd", optimizer_config="{sgd: {momentum: 0.9}}").optimizer_arguments["momentum"] == 0.9
    assert "--optimizer-config (adam.lr)" in refusal(optimizer_config="{adam: {lr: 1}}")
    assert "optimizer_config.adamw.betas" in refusal({"optimizer_config": {"adamw": {"betas": [0.9, 1.0]}}}, tmp_path)
    assert "'muon' comes in a later version" in refusal({"optimizer_config": {"muon": {"momentum": 0.9}}}, tmp_path)
    assert load({"optimizer_config": {"muon": {}, "adafactor": {}, "adam": {}}}, tmp_path).optimizer == "adamw"
    assert "nesterov needs a momentum" in refusal(optimizer_config="{sgd: {nesterov: true}}")


def test_unknown_keys_get_a_suggestion(tmp_path):
    file = tmp_path / "lora.yaml"
    assert refusal({"learning_rat": 1}, tmp_path) == f"unknown key learning_rat in {file}: did you mean learning_rate?"
    assert refusal({"rank": 4}, tmp_path) == f"unknown key rank in {file}: write lora_parameters.rank"
    assert refusal({"lora_parameters": {"ranks": 4}}, tmp_path) == f"unknown key lora_parameters.ranks in {file}: did you mean lora_parameters.rank?"
    assert refusal({"qqqq": 4}, tmp_path) == f"unknown key qqqq in {file}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rank": 0}, "--rank: found 0, expected at least 1"),
        ({"dropout": 1.0}, "--dropout: found 1.0, expected less than 1"),
        ({"batch_size": 0}, "--batch-size: found 0, expected at least 1"),
        ({"learning_rate": 0.0}, "--learning-rate: found 0.0, expected greater than 0"),
        ({"learning_rate": math.nan}, "--learning-rate: found nan, expected a finite number"),
        ({"learning_rate": math.inf}, "--learning-rate: found inf, expected a finite number"),
        ({"num_layers": -2}, "--num-layers: found -2, expected at least -1"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"scale": 1.0, "alpha": 2.0}, "both scale (1) and alpha (2) are given: keep one"),
        ({"iters": 5, "epochs": 1}, "both iters (5) and epochs (1) are given: keep one"),
        ({"keys": "a", "target_modules": "b"}, "both --keys and --target-modules are given"),
        ({"keys": " , "}, "--keys: found ' , ', expected one module or more"),
        ({"warmup": 1.5}, "--warmup: found 1.5, expected a fraction below 1, or a whole number"),
        ({"quantize": "8"}, "--quantize: found '8', expected '4' or 'none'"),
        ({"backend": "cuda"}, "--backend: found 'cuda', expected 'auto', 'mlx' or 'numpy'"),
        ({"optimizer": "sgdd"}, "--optimizer: found 'sgdd', expected 'sgd', 'adam' or 'adamw'"),
        ({"lr_schedule": "cosin"}, "--lr-schedule (name): found 'cosin', expected 'constant'"),
        ({"lr_schedule": "cosine_decay"}, "takes 2 or 3 arguments, found 0; or use 'cosine'"),
        ({"lr_schedule": "{name: step_decay, arguments: [1e-5, 0.5, 0]}"}, "argument 3 of 'step_decay' is a number of updates, at least 1; found 0"),
        ({"lr_schedule": "{name: cosine, warmup: 3}"}, "'cosine' takes no arguments and no warmup of its own"),
        ({"lr_schedule": "{name: cosine_decay, arguments: [1e-5, 9]}", "warmup": 3}, "put it inside lr_schedule"),
        ({"lr_schedule": "{name: cosine_decay, arguments: [1e-5, 9]}", "learning_rate": 3e-5}, "learning_rate is 3e-05, lr_schedule's first argument 1e-05"),
        ({"lr_schedule": "{name: [}"}, "--lr-schedule: expected a YAML mapping"),
        ({"train": False}, "--train: finetune always trains"),
        ({"model": ""}, "--model: found '', expected text"),
        ({"reply_tokens": -1}, "--reply-tokens: found -1, expected at least 0"),
        ({"method": "mezzo"}, "--method: found 'mezzo', expected 'mesp', 'mebp', 'mezo' or 'backprop'"),
        ({"method": "mezo", "mezo_epsilon": 0.0}, "--mezo-epsilon: found 0.0, expected greater than 0"),
        ({"method": "mezo", "mezo_perturbations": 0}, "--mezo-perturbations: found 0, expected at least 1"),
    ],
)
def test_bad_values_are_refused_with_flag_found_and_expected(flags, message):
    assert message in refusal(**flags)


def test_everything_wrong_is_said_at_once_with_its_place(tmp_path):
    message = refusal({"batch_size": "many", "lora_parameters": {"rank": -1}, "model": None}, tmp_path, dropout=2.0)
    file = tmp_path / "lora.yaml"
    assert message.splitlines()[0] == "these settings can't be used:"
    assert sorted(message.splitlines()[1:]) == [
        "  --dropout: found 2.0, expected less than 1",
        f"  batch_size in {file}: found 'many', expected a whole number",
        f"  lora_parameters.rank in {file}: found -1, expected at least 1",
    ]
    with pytest.raises(UserError, match="no model is given: --model takes(.|\n)*no data is given: --data takes"):
        sources.load(None, {})


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        *((key, "a number") for key in ("batch_size", "learning_rate", "warmup", "iters", "seed", "lora_parameters.rank", "lora_parameters.alpha")),
        ("optimizer_config.sgd.momentum", "a number"),
        ("lr_schedule.warmup", "a number"),
        ("model", "text"),
        ("data", "text"),
    ],
)
def test_yes_is_no_number_and_no_text(key, expected, tmp_path):
    file: Any = True
    for part in reversed(key.split(".")):
        file = {part: file}
    with pytest.raises(UserError) as caught:
        path = tmp_path / "lora.yaml"
        path.write_text(yaml.safe_dump((BASE if key not in BASE else {}) | file), encoding="utf-8")
        sources.load(path, {name: value for name, value in BASE.items() if name != key})
    assert f"{key} in {path}: found True, expected {expected}" in str(caught.value)


def test_every_number_refuses_true():
    """Also those inside lists."""

    def fields(section):
        for name, field in section.model_fields.items():
            yield from fields(field.annotation) if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) else [(section, name, field)]

    numbers = 0
    for section, name, field in fields(config.Settings):
        if field.annotation in (bool, bool | None) or any(kind in str(field.annotation) for kind in ("str", "Literal")):
            continue
        value = (True,) * 2 if "tuple" in str(field.annotation) else True
        with pytest.raises(ValidationError) as caught:
            section.model_validate({name: value})
        assert all("expected a number" in error["msg"] for error in caught.value.errors() if error["loc"][0] == name), (name, caught.value)
        numbers += any(error["loc"][0] == name for error in caught.value.errors())
    assert numbers > 25


def test_places_may_begin_at_home(monkeypatch, tmp_path):
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    keys = ("data", "adapter_path", "resume_adapter_file", "json_log")
    s = load(**dict.fromkeys(keys, "~/x"))
    assert [getattr(s, key) for key in keys] == [str(tmp_path) + "/x"] * 4
    assert load(sample_prompt="~ hello").sample_prompt == "~ hello"


def test_no_reply_may_be_asked_for():
    assert load(reply_tokens=0).reply_tokens == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora_parameters: {keys: {a: b}}\n", "expected a list of module names"),
        ("lora_parameters: {keys: 3}\n", "found 3, expected a list of module names"),
        ("optimizer_config: {adam: {betas: 3}}\n", "found 3, expected a list"),
        ("a: 1\nb: c: 2\n", "lora.yaml:2: not YAML"),
        ("- 1\n- 2\n", "expected `key: value` lines, found [1, 2]"),
        ("", "expected `key: value` lines, found nothing"),
        ("lora_parameters: [1]\n", "lora_parameters in"),
        ("optimizer_config: 3\n", "found 3, expected a mapping"),
    ],
)
def test_files_that_are_not_settings(text, message, tmp_path):
    assert message in refusal(text, tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="absent.yaml: No such file"):
        sources.load(tmp_path / "absent.yaml", BASE)


def test_one_line_says_which_defaults_are_not_mlx_lms():
    line = config.where_we_differ(load())
    assert "\n" not in line
    for words in ("all layers", "prompts are masked", "clipped at norm 1", "AdamW", "rate 2e-05", "cosine"):
        assert words in line
    like_mlx_lm = {"num_layers": 16, "mask_prompt": False, "grad_clip": 0.0, "optimizer": "adam", "learning_rate": 1e-5, "lr_schedule": "constant"}
    assert config.where_we_differ(load(**like_mlx_lm)) == ""
    assert "prompts" not in config.where_we_differ(load(mask_prompt=False)) and "all layers" in config.where_we_differ(load(mask_prompt=False))
    assert config.where_we_differ(load(**like_mlx_lm)) not in config.remarks(load(**like_mlx_lm))


def test_a_method_has_defaults_of_its_own(tmp_path):
    """Flag over file over the method's over the demo's recipe over the rest; and only mezo has any."""

    def chosen(s: config.Settings) -> tuple:
        return s.learning_rate, s.optimizer, s.grad_clip

    assert chosen(load(method="mezo")) == (3e-5, "sgd", 0.0) == chosen(load({"method": "mezo"}, tmp_path))
    assert chosen(load({"learning_rate": 3e-4, "optimizer": "adam"}, tmp_path, method="mezo")) == (3e-4, "adam", 0.0)
    assert chosen(load({"method": "mezo", "learning_rate": 3e-4}, tmp_path, learning_rate=5e-4, optimizer="adamw")) == (5e-4, "adamw", 0.0)
    recipe = load(model="demo", data="demo", method="mezo")
    assert chosen(recipe) == (3e-5, "sgd", 0.0) and (recipe.num_layers, recipe.epochs) == (16, 1), "the rest of the recipe stays"
    for method in ("mesp", "mebp", "backprop"):
        assert chosen(load(method=method)) == chosen(load()) == (2e-5, "adamw", 1.0)
        assert load(model="demo", data="demo", method=method).learning_rate == 2e-4
    assert chosen(load({"method": "mezo"}, tmp_path, method="mesp")) == chosen(load()), "the method that is used"
    s = load(method="mezo", lr_schedule="{name: cosine_decay, arguments: [1e-5, 9]}")
    assert config.learning_rate(s, 0, 9) == 1e-5, "a schedule with a rate replaces the method's"
    assert (load(method="mezo").mezo_epsilon, load(method="mezo").mezo_perturbations, load().method, load().tiled_head) == (1e-3, 1, "mesp", False)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"method": "mezo", "grad_clip": 1.0}, "grad_clip is 1.0, and method mezo has none: set it to 0.0"),
        ({"method": "mezo", "dropout": 0.1}, "dropout is 0.1, and method mezo has none: set it to 0.0"),
        ({"method": "mezo", "grad_checkpoint": True}, "grad_checkpoint is True, and method mezo has none: set it to False"),
        *(({"method": method, "tiled_head": True}, f"tiled_head is for method mebp, and method is {method}") for method in ("mesp", "mezo", "backprop")),
        *(({"method": method, "mezo_epsilon": 0.1}, f"mezo_epsilon is for method mezo, and method is {method}") for method in ("mesp", "mebp", "backprop")),
        ({"mezo_perturbations": 2}, "mezo_perturbations is for method mezo, and method is mesp: remove it"),
    ],
)
def test_a_method_refuses_what_it_ignores(flags, named, tmp_path):
    assert named in refusal(**flags)
    lora = {"lora_parameters": {"dropout": flags["dropout"]}} if "dropout" in flags else {}
    assert named in refusal({key: value for key, value in flags.items() if key != "dropout"} | lora, tmp_path)


def test_what_a_method_takes():
    assert load(method="mebp", tiled_head=True, grad_clip=1.0, dropout=0.1, grad_checkpoint=True).tiled_head
    assert load(method="backprop", grad_checkpoint=True, dropout=0.1, grad_clip=2.0).grad_checkpoint
    mezo = load(method="mezo", mezo_epsilon=0.1, mezo_perturbations=5, grad_clip=0.0, dropout=0.0, optimizer="adamw", num_layers=1)
    assert (mezo.mezo_epsilon, mezo.mezo_perturbations, mezo.optimizer) == (0.1, 5, "adamw")


def test_a_method_s_defaults_are_said():
    """One line has them; the line of defaults that aren't mlx-lm's leaves them out."""
    said = config.remarks(load(method="mezo"))
    assert "defaults of method mezo: learning_rate 3e-05, optimizer sgd, grad_clip 0" in said
    differ = config.where_we_differ(load(method="mezo"))
    assert differ in said and all(word not in differ for word in ("rate 2e", "AdamW", "clipped")) and "all layers" in differ
    assert not any("defaults of method" in line for method in ("mesp", "mebp", "backprop") for line in config.remarks(load(method=method)))
    recomputes = {method: " ".join(config.remarks(load(method=method, grad_checkpoint=True))) for method in ("mesp", "mebp", "backprop")}
    assert ["always recomputes" in said for said in recomputes.values()] == [True, True, False]


def test_our_schedules_rise_then_fall_to_a_tenth():
    rates = {}
    for name in ("constant", "linear", "cosine"):
        s = load(lr_schedule=name, learning_rate=1.0, warmup=4)
        rates[name] = [config.learning_rate(s, update, 20) for update in range(20)]
    for name, rate in rates.items():
        assert rate[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], rel=1e-12), name
    assert rates["constant"][5:] == [1.0] * 15
    assert rates["linear"][-1] == pytest.approx(0.1) == rates["cosine"][-1]
    assert [a - b for a, b in zip(rates["linear"][4:], rates["linear"][5:], strict=False)] == pytest.approx([0.9 / 15] * 15)
    assert rates["cosine"][4 + 5] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2)


def test_warmup_below_one_is_a_fraction_of_the_updates():
    def peak_at(warmup, updates):
        rates = [config.learning_rate(load(warmup=warmup), update, updates) for update in range(updates)]
        return rates.index(max(rates))

    assert (peak_at(0.05, 100), peak_at(0.05, 10), peak_at(0, 10), peak_at(3, 10)) == (5, 0, 0, 3)


@given(
    name=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.one_of(st.floats(0, 0.99), st.integers(1, 50).map(float)),
    updates=st.integers(1, 60),
)
def test_no_update_is_without_a_rate(name, warmup, updates):
    s = load(lr_schedule=name, warmup=warmup, learning_rate=1.0)
    rates = [config.learning_rate(s, update, updates) for update in range(updates)]
    assert all(0 < rate <= 1 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cosine_decay", [1e-3, 20]),
        ("cosine_decay", [1e-3, 20, 1e-5]),
        ("linear_schedule", [1e-3, 1e-5, 15]),
        ("exponential_decay", [1e-3, 0.9]),
        ("step_decay", [1e-3, 0.5, 4]),
    ],
)
def test_mlx_lms_schedules_give_mlx_lms_numbers(name, arguments, warmup):
    mx = pytest.importorskip("mlx.core", reason="MLX isn't installed here", exc_type=ImportError)
    utils = pytest.importorskip("mlx_lm.tuner.utils", reason="mlx-lm isn't installed here", exc_type=ImportError)
    schedule = {"name": name, "arguments": arguments, "warmup": warmup, "warmup_init": 1e-6}
    theirs = utils.build_schedule(schedule)
    ours = load(lr_schedule=yaml.safe_dump(schedule, default_flow_style=True))
    for update in range(40):
        want = theirs(mx.array(update, mx.uint64))
        want = want.item() if isinstance(want, mx.array) else want
        assert config.learning_rate(ours, update, 40) == pytest.approx(want, rel=2e-6, abs=2**-23 * arguments[0]), update  # float32 there


def test_cache_folder_is_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("MESP_MLX_CACHE", str(tmp_path))
    assert config.cache_folder() == tmp_path
    monkeypatch.delenv("MESP_MLX_CACHE")
    assert "mesp-mlx" in str(config.cache_folder()) and config.cache_folder().is_absolute()


def test_settings_do_not_change_after_loading():
    with pytest.raises(Exception, match="frozen"):
        load().seed = 3  # type: ignore[misc]
