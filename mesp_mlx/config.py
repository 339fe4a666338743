"""The one home of defaults. Flags override a YAML file, which overrides the demo's recipe, which overrides what stands here.

Keys and flags are mlx-lm's where it has one for the same thing (LORA.md of mlx-lm 0.32). What is not served is refused by name.
"""

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import platformdirs
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mesp_mlx.errors import UserError
from mesp_mlx.schedule import Float, Int, Schedule, rate

MAX_SEQ_LENGTH_CAP = 2048  # tokens; the longest row counts up to here unless max_seq_length is given

LATER = "comes in a later version"
NOT_SERVED = {
    "test": f"a test set {LATER}; validation rows are measured before, during and after",
    "test_batches": f"a test set {LATER}",
    "hf_dataset": f"reading a data set from the Hub {LATER}; give a folder or file as data",
    "prompt_feature": f"other column names {LATER}; name the column 'prompt'",
    "completion_feature": f"other column names {LATER}; name the column 'completion'",
    "chat_feature": f"other column names {LATER}; name the column 'messages'",
    "text_feature": f"other column names {LATER}; name the column 'text'",
    "report_to": f"reporting to a service {LATER}; json_log writes every event to a file",
    "project_name": f"reporting to a service {LATER}",
    "trust_remote_code": "code that comes with a model is never run",
    "clear_cache_threshold": "the memory cache has a fixed limit here",
}
SILENT_IN_FILES = ("test_batches",)  # mlx-lm's own files give it without test, when nothing reads it
LATER_CHOICES = {"fine_tune_type": ("dora", "full"), "optimizer": ("muon", "adafactor")}
ALTERNATIVES = [("iters", "epochs"), ("scale", "alpha")]
LORA_FLAGS = ("rank", "scale", "alpha", "dropout", "keys")
WORDS: dict[str, str] = {  # for pydantic's errors
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text", "string_too_short": "text", "tuple_type": "a list", "model_type": "a mapping, key: value",
}  # fmt: skip


def _words(value: Any) -> Any:
    """'a, b' as a flag gives it, or a list as YAML does."""
    words = [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        raise ValueError("expected a list of module names")
    if not words:
        raise ValueError("expected one module or more, as self_attn.q_proj")
    return words


def _fraction_or_count(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError("expected a fraction below 1, or a whole number of updates")
    return value


Fraction = Annotated[Float, Field(ge=0, lt=1)]
Place = Annotated[str, AfterValidator(os.path.expanduser)]  # on this disk; a shell leaves ~ alone in a file and after =


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraParameters(Section):
    rank: Int = Field(default=8, ge=1, description="rank of every adapter")
    scale: Float = Field(default=20.0, gt=0, description="factor on an adapter's output, mlx-lm's scale, used as it is")
    alpha: Float | None = Field(default=None, gt=0, description="the same factor as other programs write it: scale = alpha / rank")
    dropout: Float = Field(default=0.0, ge=0, lt=1, description="dropout on the adapter's input")
    keys: Annotated[tuple[str, ...] | None, BeforeValidator(_words)] = Field(
        default=None, description="modules to adapt, comma-separated, as self_attn.q_proj,mlp.down_proj (default: every projection)"
    )

    @model_validator(mode="after")
    def _one_factor(self):
        if self.alpha is not None and "scale" in self.model_fields_set:
            raise ValueError(f"both scale ({self.scale:g}) and alpha ({self.alpha:g}) are given: keep one (scale = alpha / rank)")
        return self

    @property
    def effective_scale(self) -> float:
        """The factor on every adapter's output, whichever way it was given."""
        return self.scale if self.alpha is None else self.alpha / self.rank


class Sgd(Section):
    momentum: Float = Field(default=0.0, ge=0, lt=1)
    weight_decay: Float = Field(default=0.0, ge=0)
    dampening: Float = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self):
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum above 0 and a dampening of 0")
        return self


class Adam(Section):
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Float = Field(default=1e-8, gt=0)
    bias_correction: bool = True


class AdamW(Adam):
    weight_decay: Float = Field(default=0.0, ge=0)


class OptimizerConfig(Section):
    """Arguments of mlx.optimizers' SGD, Adam and AdamW, by optimizer, as in mlx-lm's YAML."""

    sgd: Sgd = Sgd()
    adam: Adam = Adam()
    adamw: AdamW = AdamW()


class Settings(Section):
    """Everything a run is told. `model` and `data` have no default."""

    model: str = Field(min_length=1, description="an MLX or Hugging Face folder, a Hub id, a GGUF file, or demo")
    data: Place = Field(min_length=1, description="a folder with train.jsonl (and valid.jsonl), one .jsonl file, or demo")
    train: Literal[True] = Field(default=True, description="accepted for mlx-lm's sake: finetune always trains")
    fine_tune_type: Literal["lora"] = Field(default="lora", description="what is trained; dora and full come in a later version")
    backend: Literal["auto", "mlx", "numpy"] = Field(default="auto", description="auto, mlx or numpy; auto is mlx where there is a GPU")
    quantize: Annotated[Literal["4", "none"], BeforeValidator(lambda v: str(v) if type(v) is int else v)] = Field(
        "4", description="an unquantised model is quantised to 4 bits into the cache, or trained on as it is (none)"
    )
    lora_parameters: LoraParameters = LoraParameters()
    num_layers: Int = Field(default=-1, ge=-1, description="train the last N layers, -1 = all")

    optimizer: Annotated[Literal["sgd", "adam", "adamw"], BeforeValidator(lambda v: v.lower() if isinstance(v, str) else v)] = Field(
        default="adamw", description="sgd, adam or adamw"
    )
    optimizer_config: OptimizerConfig = Field(default=OptimizerConfig(), description="the optimizer's arguments as YAML, as '{adamw: {weight_decay: 0.01}}'")
    learning_rate: Float = Field(default=2e-5, gt=0, description="highest learning rate")
    lr_schedule: Schedule = Field(default=Schedule(), description="constant, linear or cosine (default), both ending at a tenth; or mlx-lm's as YAML")
    warmup: Annotated[Float, AfterValidator(_fraction_or_count)] = Field(
        default=0.05, ge=0, description="updates over which the rate rises, or a fraction of all if below 1"
    )
    grad_clip: Float = Field(default=1.0, ge=0, description="largest global norm of an update's gradient, 0 = off")

    batch_size: Int = Field(default=4, ge=1, description="rows of an iteration")
    grad_accumulation_steps: Int = Field(default=1, ge=1, description="iterations of an update, whose rows are batch size times this")
    iters: Int | None = Field(default=None, ge=1, description="iterations to train for, instead of epochs")
    epochs: Int | None = Field(default=None, ge=1, description="passes over the rows (default: 3 under 1,000 rows, 2 under 10,000, else 1)")
    mask_prompt: bool = Field(default=True, description="learn only from the assistant's turns or the completion (default)")
    max_seq_length: Int | None = Field(default=None, ge=2, description=f"tokens of a row (default: the longest, up to the model's and {MAX_SEQ_LENGTH_CAP:,})")
    seed: Int = Field(default=0, ge=0, lt=2**64, description="seed of the adapter, the order of rows and dropout")

    val_batches: Int | None = Field(default=None, ge=-1, description="validation batches, -1 = all, 0 = none (default: what a tenth of the run's time allows)")
    steps_per_eval: Int = Field(default=200, ge=1, description="iterations between validations")
    steps_per_report: Int = Field(default=10, ge=1, description="iterations between reports")
    save_every: Int = Field(default=100, ge=1, description="iterations between checkpoints")
    adapter_path: Place = Field(default="adapters", min_length=1, description="folder the adapter is written to")
    overwrite: bool = Field(default=False, description="write into a folder that already holds a run")
    resume_adapter_file: Place | None = Field(default=None, min_length=1, description="adapter to start from")
    grad_checkpoint: bool = Field(default=False, description="accepted for mlx-lm's sake: activations are always recomputed")
    json_log: Place | None = Field(default=None, min_length=1, description="file for one JSON object per event")
    sample_prompt: str | None = Field(default=None, min_length=1, description="what to ask before and after training")
    reply_tokens: Int = Field(default=40, ge=0, description="longest reply to it, in tokens, 0 = none")

    @model_validator(mode="after")
    def _make_sense_together(self):
        if self.iters is not None and self.epochs is not None:
            raise ValueError(f"both iters ({self.iters}) and epochs ({self.epochs}) are given: keep one")
        if self.num_layers == 0:
            raise ValueError("num_layers is 0, which trains nothing: give the number of last layers to train, or -1 for all")
        given = self.model_fields_set
        if self.lr_schedule.arguments:
            start = self.lr_schedule.arguments[0]
            if "learning_rate" in given and self.learning_rate != start:
                raise ValueError(f"learning_rate is {self.learning_rate:g}, lr_schedule's first argument {start:g}: make them equal, or remove learning_rate")
            if "warmup" in given:
                raise ValueError("warmup is given beside an lr_schedule with arguments: put it inside lr_schedule, in updates")
        return self

    @property
    def rows_per_update(self) -> int:
        return self.batch_size * self.grad_accumulation_steps

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """Keyword arguments for the optimizer of mlx.optimizers, learning rate apart."""
        return getattr(self.optimizer_config, self.optimizer).model_dump()


def load(path: str | Path | None, overrides: dict[str, Any]) -> Settings:
    """Settings from a YAML file (or none) and flags (None = not given; rank, scale, alpha, dropout and keys stand beside the rest).

    Raises UserError, one message for everything that is wrong, with each key's file or flag.
    """
    layers = [("", _as_file(overrides))]
    if path is not None:
        layers.insert(0, (str(path), _read_yaml(Path(path))))
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
    """Flags in the shape of a file: the adapter's under lora_parameters."""
    flags = {key: value for key, value in overrides.items() if value is not None}
    lora = {key: flags.pop(key) for key in LORA_FLAGS if key in flags}
    return flags | ({"lora_parameters": lora} if lora else {})


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
    flag, _, inside = path.removeprefix("lora_parameters.").partition(".")
    return f"--{flag.replace('_', '-')}" + (f" ({inside})" if inside else "")


def _problem(details: Any, layers: list[tuple[str, dict[str, Any]]]) -> str:
    """One of pydantic's errors as one line."""
    path = [str(part) for part in details["loc"] if not isinstance(part, int)]
    if details["type"] == "missing":
        return f"no {path[-1]} is given: --{path[-1]} takes {Settings.model_fields[path[-1]].description}"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if path in ([], ["lora_parameters"]) and details["type"] == "value_error":
        return message
    name = _named(".".join(path), _source(path, layers))
    if details["type"] == "extra_forbidden":
        return f"unknown key {name}" + _did_you_mean(path)
    if details["type"] == "value_error" and isinstance(details["input"], dict):
        return f"{name}: {message}"
    message = WORDS.get(details["type"]) or message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f"{name}: found {details['input']!r}, expected {message.removeprefix('expected ')}"


def _source(path: list[str], layers: list[tuple[str, dict[str, Any]]]) -> str:
    """Where the value that was used came from: the last layer that has the key."""
    for source, layer in reversed(layers):
        if path[-1] == "keys" and "target_modules" in layer:
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
    if path[-1] in homes and len(path) == 1:
        return f": write {homes[path[-1]]}"
    close = difflib.get_close_matches(path[-1], homes, n=1)
    return f": did you mean {homes[close[0]]}?" if close else ""


def default_epochs(rows: int) -> int:
    """Passes over the training rows when neither iters nor epochs is given."""
    return 3 if rows < 1_000 else 2 if rows < 10_000 else 1


def where_we_differ(settings: Settings) -> str:
    """The one line that says which defaults still in force aren't mlx-lm's; empty if none is."""
    notes = {
        "num_layers": "all layers are trained (mlx-lm: the last 16)",
        "mask_prompt": "prompts are masked (not masked)",
        "grad_clip": f"gradients are clipped at norm {settings.grad_clip:g} (never)",
        "optimizer": "AdamW, bias-corrected, no weight decay (Adam, uncorrected)",
        "learning_rate": f"rate {settings.learning_rate:g} (1e-05)",
        "lr_schedule": "warm-up, then cosine (constant)",
    }
    if settings.lr_schedule.arguments:
        del notes["learning_rate"]
    if settings.optimizer_config.adamw != AdamW():
        notes["optimizer"] = "AdamW (Adam)"
    ours = [note for key, note in notes.items() if getattr(settings, key) == Settings.model_fields[key].default]
    return "where our defaults aren't mlx-lm's: " + "; ".join(ours) if ours else ""


def remarks(settings: Settings) -> list[str]:
    """Lines to print before a run about how the settings were understood."""
    lora = settings.lora_parameters
    lines = [f"scale {lora.effective_scale:g} = alpha {lora.alpha:g} / rank {lora.rank}"] if lora.alpha is not None else []
    if settings.grad_checkpoint:
        lines.append("grad_checkpoint: always so here, nothing changes")
    return lines + [line for line in [where_we_differ(settings)] if line]


def learning_rate(settings: Settings, update: int, updates: int) -> float:
    """The rate of an optimizer update, counted from 0, of `updates` in all."""
    return rate(settings.lr_schedule, settings.learning_rate, settings.warmup, update, updates)


def demo_folder() -> Path:
    """recipes/demo: inside the package once installed from a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "recipes" / "demo"
    return inside if inside.is_dir() else package.parent / "recipes" / "demo"


def cache_folder() -> Path:
    """Where downloaded and converted models are kept: MESP_MLX_CACHE, else the platform's cache folder. Not created here."""
    return Path(os.environ.get("MESP_MLX_CACHE") or platformdirs.user_cache_dir("mesp-mlx", appauthor=False)).expanduser()
