"""A model of mlx-lm's as one stage: all its weights open, one graph from tokens to loss, differentiated at once. What --method backprop means for it."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mesp_mlx.data.group import Group
from mesp_mlx.errors import UserError
from mesp_mlx.memory.strategy import DEFAULT, Strategy
from mesp_mlx.model import generic, generic_build
from mesp_mlx.model.generic_ends import Done, WholeEnd
from mesp_mlx.model.generic_stages import Engine, Nothing
from mesp_mlx.model.generic_walk import modules_of, parameters
from mesp_mlx.model.generic_wiring import PROBE_TOKENS, Call, Wiring
from mesp_mlx.model.model import Evaluate, Model
from mesp_mlx.model.stages import Batch
from mesp_mlx.stream.safetensors import Entry


class Unwalked:
    """Stands for a walk: the model's own forward, which nobody watches."""

    def __init__(self, model: Any):
        self._model = model

    def run(self, ids: mx.array, visit: Any) -> Any:
        """The logits."""
        return self._model(ids)


def build(
    spec: generic.GenericSpec, entries: Mapping[str, Entry], backend: Any, lora_scale: float, modules: Sequence[str], rank: int, strategy: Strategy, dtype: Any
) -> Model:
    """As `generic.build`, which says what the arguments are, and what it raises."""
    model = spec.made()
    generic_build._quantize(model, spec, entries)
    slots = parameters(model)
    generic_build._check(spec, slots, entries)
    adapters, engine_of = generic_build._adapt(model, modules, rank, lora_scale)
    generic.train_mode(model)
    engine = Engine(backend, Unwalked(model), Wiring([], Call("", False, None, 0), None), slots, adapters, dtype or mx.float32, set())  # type: ignore[arg-type]
    engine_of.append(engine)
    stage = WholeEnd(engine, modules_of(slots), tuple(modules), "model")
    return Model(Nothing(backend), ((stage,),), Done(), Evaluate(backend, None), strategy)  # type: ignore[arg-type]


def offered(refused: UserError, spec: generic.GenericSpec, entries: Mapping[str, Entry], backend: Any, modules: Sequence[str], rank: int) -> UserError:
    """A refusal to walk a model, with what would work instead."""
    try:
        whole = works(build(spec, entries, backend, 1.0, modules, rank, DEFAULT, None))
    except UserError:
        return refused
    return UserError(f"{refused} As a whole it can: --method backprop, with all of it in memory.") if whole else refused


def works(model: Model) -> bool:
    """Whether the whole has a gradient: MLX tells when it is asked for its graph, of which nothing is computed."""
    ((stage,),) = model.segments
    assert isinstance(stage, WholeEnd)
    engine = stage.engine
    ids = np.arange(1, 1 + PROBE_TOKENS, dtype=np.int32)[None]
    batch = Batch(Group(ids, ids, np.ones(ids.shape, bool), (0,), (PROBE_TOKENS,)))
    frozen, adapter = ({name: mx.zeros_like(container[key]) for name, (container, key) in held.items()} for held in (engine.slots, engine.adapters))
    try:
        stage.backward(generic_build._Lazy(frozen), adapter, {}, None, {"loss": mx.ones(())}, batch, False)
    except Exception:  # whatever a model's own code does not stand
        return False
    return True
