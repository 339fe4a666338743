"""Settings from where they were given: flags over a YAML file over a method's defaults over the demo's recipe; where a wrong one stands."""

import difflib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from mesp_mlx.config import LATER, METHOD_DEFAULTS, NOT_SERVED, Choices, LoraParameters, Settings, demo_folder
from mesp_mlx.errors import UserError

SILENT_IN_FILES = ("test_batches",)  # mlx-lm's own files give it without test, when nothing reads it
LATER_CHOICES = {"fine_tune_type": ("dora", "full"), "optimizer": ("muon", "adafactor")}
ALTERNATIVES = [("iters", "epochs"), ("scale", "alpha")]
LORA_FLAGS = ("rank", "scale", "alpha", "dropout", "keys")
CHOICE_FLAGS = {"adapters" if field == "adapter" else field: field for field in Choices.model_fields}  # flags by name, and what they set
WORDS: dict[str, str] = {  # for pydantic's errors
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text", "string_too_short": "text", "tuple_type": "a list", "model_type": "a mapping, key: value",
}  # fmt: skip


def load(path: str | Path | None, overrides: dict[str, Any]) -> Settings:
    """Settings from a YAML file (or none) and flags (None = not given; rank, scale, alpha, dropout and keys stand beside the rest).

    Raises UserError, one message for everything that is wrong, with each key's file or flag.
    """
    layers = [("", _as_file(overrides))]
    if path is not None:
        layers.insert(0, (str(path), _read_yaml(Path(path))))
    chosen = _merged(layers)
    if isinstance(method := chosen.get("method"), str) and method in METHOD_DEFAULTS:
        layers.insert(0, (f"the defaults of method {method}", METHOD_DEFAULTS[method]))
        chosen = _merged(layers)
    if chosen.get("model") == chosen.get("data") == "demo":
        recipe = demo_folder() / "recipe.yaml"
        layers.insert(0, (str(recipe), _read_yaml(recipe)))
        chosen = _merged(layers)
    try:
        return Settings(**chosen)
    except ValidationError as error:
        problems = [_problem(details, layers) for details in error.errors()]
        raise UserError("\n".join(["these settings can't be used:", *(f"  {problem}" for problem in problems)] if problems[1:] else problems)) from None


def _as_file(overrides: dict[str, Any]) -> dict[str, Any]:
    """Flags in the shape of a file: the adapter's under lora_parameters, a plan's choices under strategy."""
    flags = {key: value for key, value in overrides.items() if value is not None}
    lora = {key: flags.pop(key) for key in LORA_FLAGS if key in flags}
    choices = {field: flags.pop(key) for key, field in CHOICE_FLAGS.items() if key in flags}
    return flags | ({"lora_parameters": lora} if lora else {}) | ({"strategy": choices} if choices else {})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"reading the settings in {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"reading the settings in {path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"reading the settings in {where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(content, dict):
        raise UserError(f"reading the settings in {path}: expected `key: value` lines, found {'nothing' if content is None else repr(content)}")
    return {str(key): value for key, value in content.items()}


def _merged(layers: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for source, layer in layers:
        chosen = _over(chosen, _served(layer, source))
    return chosen


def _served(layer: dict[str, Any], source: str) -> dict[str, Any]:
    """A layer without mlx-lm's keys that ask for nothing. Raises UserError for one that asks for what isn't served."""
    layer = _given(layer)
    if layer.get("train") is False:
        raise UserError(f"{_named('train', source)}: finetune always trains; remove it")
    for key, reason in NOT_SERVED.items():
        if layer.pop(key, None) and not (source and key in SILENT_IN_FILES):
            raise UserError(f"{_named(key, source)} isn't served: {reason}")
    if source:
        layer.pop("config", None)  # the file's own name, in mlx-lm's
    for key, choices in LATER_CHOICES.items():
        if (choice := str(layer.get(key)).lower()) in choices:
            served = ", ".join(get_args(Settings.model_fields[key].annotation))
            raise UserError(f"{_named(key, source)}: '{choice}' {LATER}; served: {served}")
    for key in ("optimizer_config", "lr_schedule"):
        layer[key] = _inline(key, layer.get(key), source)
    if isinstance(config := layer["optimizer_config"], dict):
        for name in LATER_CHOICES["optimizer"]:
            if config.get(name):
                raise UserError(f"{_named('optimizer_config', source)}: '{name}' {LATER}")
        layer["optimizer_config"] = {name: value for name, value in config.items() if name not in LATER_CHOICES["optimizer"]}
    if isinstance(layer["lr_schedule"], str):
        layer["lr_schedule"] = {"name": layer["lr_schedule"]}
    choices = layer.get("strategy")
    if isinstance(choices, dict) and "adapters" in choices:  # as the flag is called
        if "adapter" in choices:
            raise UserError(f"both {_named('strategy.adapter', source)} and strategy.adapters are given, and mean the same: keep one")
        layer["strategy"] = {"adapter" if key == "adapters" else key: value for key, value in choices.items()}
    if "target_modules" in layer:
        lora = layer.get("lora_parameters", {})
        if isinstance(lora, dict):
            if lora.get("keys") is not None:
                raise UserError(f"both {_named('keys', source)} and {_named('target_modules', source)} are given, and mean the same: keep one")
            layer["lora_parameters"] = lora | {"keys": layer.pop("target_modules")}
    return _given(layer)


def _given(layer: dict[str, Any]) -> dict[str, Any]:
    """Without nulls, which mlx-lm reads as not given."""
    return {key: _given(value) if isinstance(value, dict) else value for key, value in layer.items() if value is not None}


def _inline(key: str, value: Any, source: str) -> Any:
    """A mapping written in a flag."""
    if not (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"{_named(key, source)}: expected a YAML mapping, found {value!r}") from None


def _over(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """high over low, mappings merged. A choice in high also drops what it replaces in low."""
    for one, other in ALTERNATIVES:
        if one in high or other in high:
            low = _without(low, one, other)
    schedule = high.get("lr_schedule")
    if isinstance(schedule, dict) and schedule.get("arguments"):
        low = _without(low, "learning_rate", "warmup")
    both = [key for key in high if key != "lr_schedule" and isinstance(high[key], dict) and isinstance(low.get(key), dict)]
    return low | high | {key: _over(low[key], high[key]) for key in both}


def _without(layer: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in layer.items() if key not in keys}


def _named(path: str, source: str) -> str:
    """How the user wrote a key: in a file, or as a flag (source is empty)."""
    if source:
        return f"{path} in {source}"
    if path.startswith("strategy."):
        path = next(flag for flag, field in CHOICE_FLAGS.items() if field == path.removeprefix("strategy."))
    flag, _, inside = path.removeprefix("lora_parameters.").partition(".")
    return f"--{flag.replace('_', '-')}" + (f" ({inside})" if inside else "")


def _problem(details: Any, layers: list[tuple[str, dict[str, Any]]]) -> str:
    """One of pydantic's errors as one line."""
    path = [str(part) for part in details["loc"] if not isinstance(part, int)]
    if details["type"] == "missing":
        return f"no {path[-1]} is given: --{path[-1]} takes {Settings.model_fields[path[-1]].description}"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if path in ([], ["lora_parameters"], ["strategy"]) and details["type"] == "value_error":
        return message
    name = _named(".".join(path), _source(path, layers))
    if details["type"] == "extra_forbidden":
        return f"unknown key {name}" + _did_you_mean(path)
    if details["type"] == "value_error" and isinstance(details["input"], dict):
        return f"{name}: {message}"
    if path == ["memory"] and details["type"] == "string_type":
        return f"{name}: found {details['input']!r}, expected a size as 2GB or 512MB, a part as 50%, or auto, least or fastest"
    return f"{name}: {found(details)}"


def found(details: Any) -> str:
    """What one of pydantic's errors found, and what was expected."""
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    message = WORDS.get(details["type"]) or message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f"found {details['input']!r}, expected {message.removeprefix('expected ')}"


def _source(path: list[str], layers: list[tuple[str, dict[str, Any]]]) -> str:
    """Where the value that was used came from: the last layer that has the key."""
    for source, layer in reversed(layers):
        if path[-1] == "keys" and "target_modules" in layer:
            return source
        if path == ["strategy", "adapter"] and isinstance(layer.get("strategy"), dict) and "adapters" in layer["strategy"]:
            return source
        inner: Any = layer
        for part in path:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if inner is not None:
            return source
    return layers[-1][0]


def _did_you_mean(path: list[str]) -> str:
    homes = {key: key for key in (*Settings.model_fields, *NOT_SERVED, "target_modules")}
    homes |= {key: f"lora_parameters.{key}" for key in LoraParameters.model_fields}
    homes |= {key: f"strategy.{key}" for key in Choices.model_fields}
    if path[-1] in homes and len(path) == 1:
        return f": write {homes[path[-1]]}"
    close = difflib.get_close_matches(path[-1], homes, n=1)
    return f": did you mean {homes[close[0]]}?" if close else ""
