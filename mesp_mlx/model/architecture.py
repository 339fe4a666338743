"""Which of the two ways a model goes: its family's own stages, or, where none is written down, mlx-lm's module of its model type, layer by layer."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from mesp_mlx.errors import Unserved, UserError
from mesp_mlx.memory.strategy import DEFAULT, Strategy
from mesp_mlx.model import weights
from mesp_mlx.model.families import FAMILIES
from mesp_mlx.model.model import Model
from mesp_mlx.model.model import build as build_structured
from mesp_mlx.model.spec import ModelSpec, Spec, load_spec, read_config
from mesp_mlx.stream.safetensors import NUMPY_TYPES, Entry, read_folder

ANY = tuple(NUMPY_TYPES)  # a model may have tables of whole numbers
INSTALL = "pip install 'mlx-lm>=0.32.2,<0.33'"


def open_spec(
    config: Mapping[str, Any],
    source: str = "config.json",
    backend: str = "mlx",
    trust_remote_code: bool = False,
    entries: Mapping[str, Entry] | None = None,
) -> Spec:
    """The spec that a config describes: a structured family's or, on MLX, that of any other architecture of mlx-lm.

    Args:
        config: a config.json's contents.
        source: names it in errors.
        backend: "mlx" or "numpy", on which the model is to run.
        trust_remote_code: whether the code that the config names as its `model_file` may be run.
        entries: the model's tensors in MLX's layout, where they are known.

    Raises:
        UserError: what the config says can't be, or it is served nowhere, or not on this backend, or not without mlx-lm, or not without trust.
    """
    try:
        if file := config.get("model_file"):  # whatever its model_type: so does mlx-lm
            raise Unserved(f"reading {source}: the model is described by code of its own, {file}.")
        return load_spec(config, source)
    except Unserved as reason:
        if backend == "numpy":
            families = ", ".join(sorted(FAMILIES))
            what = str(reason).removesuffix(f" Served: {families}.")
            raise UserError(f"{what} NumPy runs these families: {families}. With --backend mlx any other architecture of mlx-lm's is trained too.") from None
        if not has_mlx_lm():
            raise UserError(f"{reason} Other architectures are trained through mlx-lm, which is not installed: {INSTALL}.") from None
        own = reason if str(config.get("model_type")) in FAMILIES and not file else None
    if file and not trust_remote_code:
        raise UserError(f"reading {source}: the model comes with code of its own, {file}, which would be run. If you trust it, give --trust-remote-code.")
    from mesp_mlx.model import generic  # only here: it imports MLX and mlx-lm

    try:
        return generic.load_spec(config, source, {name: entry.shape for name, entry in (entries or {}).items()})
    except UserError as error:
        raise (UserError(f"{own} Nor is it trained as mlx-lm's other architectures are: {error}") if own else error) from None


def has_mlx_lm() -> bool:
    """Whether mlx-lm, and MLX with it, is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("mlx", "mlx_lm"))


def open_folder(folder: Path, backend: str = "mlx", trust_remote_code: bool = False) -> tuple[Spec, dict[str, Entry]]:
    """The spec of a model folder in MLX's layout, and its tensors, checked against each other.

    Raises:
        UserError: as `open_spec`; or a tensor is missing, unknown, or of the wrong shape or type.
    """
    config, entries = read_config(folder), read_folder(folder)
    spec = open_spec(config, str(folder / "config.json"), backend, trust_remote_code, entries)
    if structured := isinstance(spec, ModelSpec):
        spec = weights.settled(spec, config, entries)
    tensors = spec.tensors()
    modules = {name: name.removesuffix(".weight") for name, shape in tensors.items() if name.endswith(".weight") and len(shape) > 1}
    if spec.quantization:  # it leaves out what is not quantised: that is seen in the tensors
        unpacked = {module: False for module in modules.values() if f"{module}.scales" not in entries}
        spec = replace(spec, quantization={**unpacked, **spec.quantization})
    if structured:
        weights.check(spec, entries)
        return spec, entries
    weights.check(spec, entries, ANY, others=True)
    return spec, {name: entry for name, entry in entries.items() if name in tensors or f"{name.rpartition('.')[0]}.weight" in modules}


def build(
    spec: Spec,
    entries: Mapping[str, Entry],
    backend: ModuleType,
    lora_scale: float,
    modules: Sequence[str],
    rank: int,
    strategy: Strategy = DEFAULT,
    dtype: Any = None,
    method: str = "mesp",
    tiled_head: bool = False,
    limit_bytes: int | None = None,
) -> Model:
    """The stages of a model, as `model.build` gives them; a generic one has to know its tensors and its adapter too.

    Raises:
        UserError: a generic model that can't be walked, or not by this method.
    """
    if isinstance(spec, ModelSpec):
        return build_structured(spec, backend, lora_scale, strategy, dtype, method, tiled_head, limit_bytes)
    from mesp_mlx.model import generic, generic_whole

    given = spec, entries, backend, lora_scale, modules, rank, strategy, dtype
    if method == "backprop":
        return generic_whole.build(*given)
    try:
        return generic.build(*given, limit_bytes, tiled_head or method != "mebp")
    except UserError as refused:
        raise generic_whole.offered(refused, spec, entries, backend, modules, rank) from None
