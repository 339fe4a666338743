"""Whether the tensors on disk are those that the spec needs, before anything is computed with them."""

from collections.abc import Mapping, Sequence

from mesp_mlx.errors import UserError
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.stream.safetensors import Entry

FLOATS = ("F32", "F16", "BF16")
SHOWN = 8  # lines of a list in one message


def check(spec: ModelSpec, entries: Mapping[str, Entry], dtypes: Sequence[str] = FLOATS) -> None:
    """Raise UserError when a tensor is missing, unknown, or of the wrong shape or type; the message names tensors and files.

    dtypes are those that a tensor without scales may have. Unknown tensors are those that mlx-lm refuses too: it drops old files'
    rotary frequencies, and lm_head.weight where the embedding is the head.
    """
    wanted = spec.tensors()
    where = ", ".join(sorted({str(entry.file.parent) for entry in entries.values()}))
    if missing := [name for name in wanted if name not in entries]:
        raise UserError(f"reading weights in {where}: {len(missing)} tensors that a {spec.model_type} model needs are missing:{_list(missing)}")
    known = {*wanted, *(["lm_head.weight"] if spec.tied else [])}
    for module in (name.removesuffix(".weight") for name, shape in wanted.items() if len(shape) == 2):
        known |= {f"{module}.scales", f"{module}.biases"} if f"{module}.scales" in entries else set()
    if unknown := [f"{name} in {entry.file.name}" for name, entry in entries.items() if name not in known and not name.endswith("rotary_emb.inv_freq")]:
        what = f"{len(unknown)} tensors are no part of the {spec.model_type} model that config.json describes"
        raise UserError(f"reading weights in {where}: {what}:{_list(unknown)}\nDownload or convert the model again.")
    if wrong := [problem for name, shape in wanted.items() if (problem := _problem(spec, entries, name, shape, dtypes))]:
        raise UserError(f"reading weights: {len(wrong)} tensors do not fit config.json:{_list(wrong)}\nDownload or convert the model again.")


def _problem(spec: ModelSpec, entries: Mapping[str, Entry], name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> str | None:
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
    bits, group = quantized
    if shape[1] % group:
        return f"{name} in {entry.file.name}: rows of {shape[1]} do not divide into groups of {group}"
    expected = (shape[0], shape[1] * bits // 32)
    grouped = (shape[0], shape[1] // group)
    if entry.dtype != "U32" or entry.shape != expected:
        return f"{name} in {entry.file.name}: {entry.dtype} {list(entry.shape)}, expected U32 {list(expected)} for {bits} bits in groups of {group}"
    for kind, part in (("scales", scales), ("biases", biases)):
        if part is None or part.shape != grouped or part.dtype not in FLOATS:
            found = "missing" if part is None else f"{part.dtype} {list(part.shape)}"
            return f"{module}.{kind} in {entry.file.name}: {found}, expected {'/'.join(FLOATS)} {list(grouped)}"
    return None


def _list(lines: list[str]) -> str:
    shown = "".join(f"\n  {line}" for line in lines[:SHOWN])
    return shown + (f"\n  … and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
