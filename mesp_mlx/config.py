"""The one home of defaults. Flags override a YAML file, which overrides the method's own, the demo's recipe and what stands here (see sources.py).

Keys and flags are mlx-lm's where it has one for the same thing (LORA.md of mlx-lm 0.32). What is not served is refused by name.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mesp_mlx.errors import UserError
from mesp_mlx.memory import choose
from mesp_mlx.memory.strategy import ALL, Keep, Sink
from mesp_mlx.memory.strategy import Place as Where
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
    "clear_cache_threshold": "the memory cache has a fixed limit here",
}


# Methods as they are compared: settings by name.
VARIANTS: dict[str, dict[str, Any]] = {
    "mesp": {"method": "mesp"},
    "mebp": {"method": "mebp"},
    "mebp-tiled": {"method": "mebp", "tiled_head": True},
    "mezo": {"method": "mezo"},
    "backprop": {"method": "backprop"},
    "backprop-checkpointed": {"method": "backprop", "grad_checkpoint": True},
}
# Of methods whose defaults aren't the ones below. MeZO moves along a few random directions: Adam's moments and a clipped norm mean little there.
# Its paper takes 1e-4 for adapters; with mlx-lm's scale of 20 that diverges on the demo after 50 updates, and 3e-5 learns (recipes/papers/RESULTS.md).
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {"mezo": {"learning_rate": 3e-5, "optimizer": "sgd", "grad_clip": 0.0}}


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


def _in_steps(value: int | None) -> int | None:
    if value and value % 128:
        raise ValueError("expected a multiple of 128, or 0")
    return value


def _budget(value: Any) -> Any:
    try:
        choose.parse_budget(str(value), 1 << 40)
    except UserError:
        raise ValueError("expected auto, least, fastest, a size as 2GB, 512MB or 1.5GiB, or a part of this machine's memory as 50%") from None
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


class Choices(Section):
    """A plan's choices by hand, as memory.strategy has them; what is None is chosen by the plan."""

    resident: Annotated[Int | None, BeforeValidator(lambda v: ALL if v == "all" else v)] = Field(
        default=None, ge=ALL, description="stages whose weights stay in memory, counted from the output down, or all"
    )
    prefetch: Int | None = Field(default=None, ge=0, description="stages read ahead of the one that computes")
    hold: bool | None = Field(default=None, description="keep attention's weights in memory while its layer's MLP is reversed, or read them a third time")
    keep: Keep | None = Field(
        default=None, description="what backward finds instead of computing it again: nothing, replay, inputs, attention, or all (no product twice)"
    )
    checkpoints: Where | None = Field(default=None, description="where checkpoints are: memory or file, the run's temporary one")
    states: Where | None = Field(default=None, description="where the arrays between two stages are, but those of the rows at work: memory or file")
    gradients: Sink | None = Field(
        default=None, description="applied as they come (needs grad_clip 0), held until the update ends, or spilled to the run's file"
    )
    adapter: Where | None = Field(default=None, description="where the adapter and the optimizer's moments are: memory or file")
    group_tokens: Int | None = Field(default=None, ge=1, description="positions, padding included, of the rows that pass a stage together")
    query_tile: Int | None = Field(default=None, ge=0, description="query rows of a block of attention, 0 = by size, as for the tiles below")
    width_tile: Annotated[Int | None, AfterValidator(_in_steps)] = Field(default=None, ge=0, description="columns of the MLP's width, a multiple of 128")
    vocabulary_tile: Int | None = Field(default=None, ge=0, description="rows of the output table at once")
    weight_tile: Int | None = Field(default=None, ge=0, description="bytes of dequantised weights in a product, on a CPU")

    @property
    def fixed(self) -> dict[str, Any]:
        """The fields of memory.strategy.Strategy that were chosen."""
        return self.model_dump(exclude_none=True)


class Settings(Section):
    """Everything a run is told. `model` and `data` have no default."""

    model: str = Field(min_length=1, description="an MLX or Hugging Face folder, a Hub id, a GGUF file, or demo")
    data: Place = Field(min_length=1, description="a folder with train.jsonl (and valid.jsonl), one .jsonl file, or demo")
    train: Literal[True] = Field(default=True, description="accepted for mlx-lm's sake: finetune always trains")
    fine_tune_type: Literal["lora"] = Field(default="lora", description="what is trained; dora and full come in a later version")
    method: Literal["mesp", "mebp", "mezo", "backprop"] = Field(
        default="mesp",
        description="how gradients are obtained: mesp (structured backward), mebp (autodiff by layer), backprop (autodiff of the whole), or mezo (losses "
        "alone; then by default sgd at a learning rate of 3e-5, not clipped)",
    )
    tiled_head: bool = Field(default=False, description="mebp: the loss in tiles of the vocabulary, as mesp's")
    mezo_epsilon: Float = Field(default=1e-3, gt=0, description="mezo: how far the adapter is moved to either side")
    mezo_perturbations: Int = Field(default=1, ge=1, description="mezo: random directions of an update, whose estimates are averaged")
    backend: Literal["auto", "mlx", "numpy"] = Field(default="auto", description="auto, mlx or numpy; auto is mlx where there is a GPU")
    quantize: Annotated[Literal["4", "none"], BeforeValidator(lambda v: str(v) if type(v) is int else v)] = Field(
        "4", description="an unquantised model is quantised to 4 bits into the cache, or trained on as it is (none)"
    )
    trust_remote_code: bool = Field(default=False, description="run Python code that comes with the model or its tokenizer")
    memory: Annotated[str, AfterValidator(_budget)] = Field(
        default="auto",
        description="what the whole process may take, for the fastest plan within it: auto (twice the least, as far as this machine can spare it), a size as "
        "2GB, or a part of its memory as 50%; or least or fastest, whatever that takes",
    )
    strategy: Choices = Choices()
    dry_run: bool = Field(default=False, description="print the plan and stop")
    try_step: bool = Field(default=False, description="run one update, on the longest rows, print what it took beside the plan, and stop")
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
    seed: Int = Field(default=0, ge=0, lt=2**64, description="seed of the adapter, the order of rows, dropout and mezo's directions")

    val_batches: Int | None = Field(default=None, ge=-1, description="validation batches, -1 = all, 0 = none (default: what a tenth of the run's time allows)")
    steps_per_eval: Int = Field(default=200, ge=1, description="iterations between validations")
    steps_per_report: Int = Field(default=10, ge=1, description="iterations between reports")
    save_every: Int = Field(default=100, ge=1, description="iterations between checkpoints")
    adapter_path: Place = Field(default="adapters", min_length=1, description="folder the adapter is written to")
    overwrite: bool = Field(default=False, description="write into a folder that already holds a run")
    resume_adapter_file: Place | None = Field(default=None, min_length=1, description="adapter to start from")
    grad_checkpoint: bool = Field(default=False, description="backprop: recompute each layer's activations; mesp and mebp always do")
    json_log: Place | None = Field(default=None, min_length=1, description="file for one JSON object per event")
    sample_prompt: str | None = Field(default=None, min_length=1, description="what to ask before and after training")
    reply_tokens: Int = Field(default=40, ge=0, description="longest reply to it, in tokens, 0 = none")

    @model_validator(mode="after")
    def _make_sense_together(self):
        if self.iters is not None and self.epochs is not None:
            raise ValueError(f"both iters ({self.iters}) and epochs ({self.epochs}) are given: keep one")
        if self.num_layers == 0:
            raise ValueError("num_layers is 0, which trains nothing: give the number of last layers to train, or -1 for all")
        for name, method in {"tiled_head": "mebp", "mezo_epsilon": "mezo", "mezo_perturbations": "mezo"}.items():
            if self.method != method and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for method {method}, and method is {self.method}: remove it")
        if self.method == "mezo":
            ignored = {"lora_parameters.dropout": self.lora_parameters.dropout, "grad_clip": self.grad_clip, "grad_checkpoint": self.grad_checkpoint}
            for name, value in ignored.items():
                if value:
                    raise ValueError(f"{name} is {value}, and method mezo has none: set it to {type(value)()}, or remove it")
        if self.strategy.gradients == "applied" and self.grad_clip > 0 and self.method != "mezo":
            raise ValueError(
                f"gradients applied as they come can't be clipped, and grad_clip is {self.grad_clip:g}: set grad_clip to 0, or gradients to held or spilled"
            )
        for key, value in self.strategy.fixed.items():
            if key in without_effect(self.method, self.tiled_head):
                raise ValueError(f"strategy.{key} is {value}, which method {self.method} makes no use of: remove it, or take method mesp")
        if self.dry_run and self.try_step:
            raise ValueError("both dry_run and try_step are given: keep one")
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


def without_effect(method: str, tiled_head: bool) -> set[str]:
    """The choices by hand that a method has nothing for."""
    if method == "backprop":  # one graph of the whole model, whose arrays lie where autodiff puts them
        return set(Choices.model_fields)
    if method == "mebp":
        return {"keep", "hold", "query_tile", "width_tile", "weight_tile"} | (set() if tiled_head else {"vocabulary_tile"})
    return {"keep", "hold", "checkpoints", "gradients"} if method == "mezo" else set()


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
    own = METHOD_DEFAULTS.get(settings.method, {})
    ours = [note for key, note in notes.items() if key not in own and getattr(settings, key) == Settings.model_fields[key].default]
    return "where our defaults aren't mlx-lm's: " + "; ".join(ours) if ours else ""


def remarks(settings: Settings) -> list[str]:
    """Lines to print before a run about how the settings were understood."""
    lora = settings.lora_parameters
    lines = [f"scale {lora.effective_scale:g} = alpha {lora.alpha:g} / rank {lora.rank}"] if lora.alpha is not None else []
    if settings.grad_checkpoint and settings.method != "backprop":
        lines.append(f"grad_checkpoint: method {settings.method} always recomputes, nothing changes")
    if own := {key: value for key, value in METHOD_DEFAULTS.get(settings.method, {}).items() if getattr(settings, key) == value}:
        shown = (f"{key} {f'{value:g}' if type(value) is float else value}" for key, value in own.items())
        lines.append(f"defaults of method {settings.method}: {', '.join(shown)}")
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
