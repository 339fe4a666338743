"""Learning rates by optimizer update, in plain Python: our three names, and the forms mlx-lm's YAML takes."""

import math
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

FINAL_FRACTION = 0.1  # of the highest rate: where linear and cosine end
ARGUMENTS = {"cosine_decay": (2, 3), "linear_schedule": (3, 3), "exponential_decay": (2, 2), "step_decay": (3, 3)}  # fewest and most
STEPS = {"cosine_decay": 1, "linear_schedule": 2, "step_decay": 2}  # which argument is a number of updates
OURS = {"cosine_decay": "cosine", "linear_schedule": "linear"}


def _not_a_bool(value: Any) -> Any:
    """YAML reads yes and true as True, which Python takes for 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Int = Annotated[int, BeforeValidator(_not_a_bool)]
Float = Annotated[float, AllowInfNan(False), BeforeValidator(_not_a_bool)]


class Schedule(BaseModel):
    """One of our names alone, or mlx-lm's form: a function of mlx.optimizers.schedulers, its arguments and a warm-up in updates."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["constant", "linear", "cosine", "cosine_decay", "linear_schedule", "exponential_decay", "step_decay"] = "cosine"
    arguments: tuple[Annotated[Float, Field(ge=0)], ...] = ()
    warmup: Int = Field(default=0, ge=0)
    warmup_init: Float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _arguments_fit_the_name(self):
        if self.name not in ARGUMENTS:
            if self.model_fields_set - {"name"}:
                raise ValueError(f"'{self.name}' takes no arguments and no warmup of its own: set learning_rate and warmup beside lr_schedule")
            return self
        low, high = ARGUMENTS[self.name]
        if not low <= len(self.arguments) <= high:
            hint = f"; or use '{OURS[self.name]}', which needs none" if self.name in OURS else ""
            raise ValueError(f"'{self.name}' takes {' or '.join(str(n) for n in sorted({low, high}))} arguments, found {len(self.arguments)}{hint}")
        if self.name in STEPS and self.arguments[STEPS[self.name]] < 1:
            raise ValueError(f"argument {STEPS[self.name] + 1} of '{self.name}' is a number of updates, at least 1; found {self.arguments[STEPS[self.name]]:g}")
        return self


def rate(schedule: Schedule, peak: float, warmup: float, update: int, updates: int) -> float:
    """The rate of an update, counted from 0, of `updates` in all; warmup is a number of updates, or a fraction of them if below 1.

    Our names rise over the warm-up from above zero, so that no update is wasted, and reach FINAL_FRACTION of the peak with the last
    update. mlx-lm's form has its own peak and warm-up, and gives the numbers of mlx_lm.tuner.utils.build_schedule.
    """
    if schedule.arguments:
        return _mlx_rate(schedule, update)
    rising = round(warmup * updates) if warmup < 1 else min(int(warmup), updates)
    if update < rising:
        return peak * (update + 1) / (rising + 1)
    if schedule.name == "constant":
        return peak
    done = min(1.0, (update - rising) / max(1, updates - 1 - rising))
    left = 1 - done if schedule.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * left)


def _mlx_rate(schedule: Schedule, step: int) -> float:
    first, second, *rest = schedule.arguments
    if schedule.warmup:
        if step <= schedule.warmup:
            return schedule.warmup_init + step * (first - schedule.warmup_init) / schedule.warmup
        step -= schedule.warmup + 1  # mlx-lm counts afresh one update after the warm-up's end
    if schedule.name == "exponential_decay":
        return first * second**step
    if schedule.name == "step_decay":
        return first * second ** (step // rest[0])
    if schedule.name == "linear_schedule":
        return first + min(step, rest[0]) * (second - first) / rest[0]
    end = rest[0] if rest else 0.0
    return end + (first - end) * (1 + math.cos(math.pi * min(step, second) / second)) / 2
