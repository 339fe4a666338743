"""Whether the tensors on disk are those that the spec needs, before anything is computed with them."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mesp_mlx.errors import UserError
from mesp_mlx.model.families import FAMILIES, Family
from mesp_mlx.model.spec import ModelSpec, Spec
from mesp_mlx.stream.safetensors import Entry

FLOATS = ("F32", "F16", "BF16")
SHOWN = 8  # lines of a list in one message


def settled(spec: ModelSpec, config: Mapping[str, Any], names: Container[str]) -> ModelSpec:
    """The spec with a head of its own if the tensors of these names have one, where config.json is silent about it, or the family does not heed it."""
    tied = FAMILIES[spec.model_type].tied
    if isinstance(tied, bool) or (tied is None and config.get("tie_word_embeddings") is not None):
        return spec
    return replace(spec, tied=f"{spec.names.head}.weight" not in names)


def check(spec: Spec, entries: Mapping[str, Entry], dtypes: Sequence[str] = FLOATS, others: bool = False) -> None:
    """Raise UserError when a tensor is missing, unknown, or of the wrong shape or type; the message names tensors and files.

    dtypes are those that a tensor without scales may have. Unknown tensors are those that mlx-lm refuses too: it drops old files'
    rotary frequencies, lm_head.weight where the embedding is the head, and what the family's row names. With `others` they are let through.
    """
    wanted = spec.tensors()
    where = ", ".join(sorted({str(entry.file.parent) for entry in entries.values()}))
    if missing := [name for name in wanted if name not in entries]:
        raise UserError(f"reading weights in {where}: {len(missing)} tensors that a {spec.model_type} model needs are missing:{listed(missing)}")
    known = set(wanted)
    for module in (name.removesuffix(".weight") for name, shape in wanted.items() if len(shape) > 1):
        known |= {f"{module}.{part}" for part in ("scales", "biases", "global_scale")} if f"{module}.scales" in entries else set()
    dropped = [r"rotary_emb\.inv_freq$", *([r"\blm_head\.weight$"] if spec.tied else []), *FAMILIES.get(spec.model_type, Family()).dropped]
    strange = [name for name in entries if name not in known and not any(re.search(pattern, name) for pattern in dropped)]
    unknown = [f"{name} in {entries[name].file.name}" for name in strange]
    if unknown and not others:
        what = f"{len(unknown)} tensors are no part of the {spec.model_type} model that config.json describes"
        raise UserError(f"reading weights in {where}: {what}:{listed(unknown)}\nDownload or convert the model again.")
    given = {name: entry for name, entry in entries.items() if not (name.endswith(".scales") and name in wanted)}  # some models are packed by themselves
    if wrong := [problem for name, shape in wanted.items() if (problem := _problem(spec, given if name in given else entries, name, shape, dtypes))]:
        raise UserError(f"reading weights: {len(wrong)} tensors do not fit config.json:{listed(wrong)}\nDownload or convert the model again.")


def _problem(spec: Spec, entries: Mapping[str, Entry], name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> str | None:
    entry, module = entries[name], name.removesuffix(".weight")
    scales, biases = entries.get(f"{module}.scales"), entries.get(f"{module}.biases")
    if not name.endswith(".weight") or scales is None:
        if entry.shape != shape or entry.dtype not in dtypes:
            hint = " (packed without scales?)" if entry.dtype == "U32" else ""
            return f"{name} in {entry.file.name}: {entry.dtype} {list(entry.shape)}, expected {'/'.join(dtypes)} {list(shape)}{hint}"
        return None
    quantized = spec.quantized_as(module)
    if quantized is None:
        return f"{name} in {entry.file.name}: has scales, but config.json's quantization does not say how it is quantised"
    bits, group, mode = quantized
    width = shape[-1]
    if width % group:
        return f"{name} in {entry.file.name}: rows of {width} do not divide into groups of {group}"
    expected, grouped = (*shape[:-1], width * bits // 32), (*shape[:-1], width // group)
    described = f"for {bits} bits in groups of {group}" + (f" ({mode})" if mode != "affine" else "")
    if entry.dtype != "U32" or entry.shape != expected:
        return f"{name} in {entry.file.name}: {entry.dtype} {list(entry.shape)}, expected U32 {list(expected)} {described}"
    if mode != "affine" and biases is not None:
        return f"{module}.biases in {biases.file.name}: {biases.dtype} {list(biases.shape)}, expected none {described}"
    overall = entries.get(f"{module}.global_scale")  # one to a matrix
    if overall is not None and (mode != "nvfp4" or overall.dtype != "F32" or overall.shape != shape[:-2]):
        expected = f"F32 {list(shape[:-2])}" if mode == "nvfp4" else "none"
        return f"{module}.global_scale in {overall.file.name}: {overall.dtype} {list(overall.shape)}, expected {expected} {described}"
    kinds = FLOATS if mode == "affine" else ("U8",)
    for kind, part in (("scales", scales), ("biases", biases))[: 2 if mode == "affine" else 1]:
        if part is None or part.shape != grouped or part.dtype not in kinds:
            found = "missing" if part is None else f"{part.dtype} {list(part.shape)}"
            return f"{module}.{kind} in {entry.file.name}: {found}, expected {'/'.join(kinds)} {list(grouped)} {described}"
    return None


def listed(lines: list[str]) -> str:
    """A list for an error, each on a line of its own, cut where it would be long."""
    shown = "".join(f"\n  {line}" for line in lines[:SHOWN])
    return shown + (f"\n  … and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
