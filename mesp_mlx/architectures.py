"""`mesp-mlx architectures`: every model type of the installed mlx-lm, and whether it trains here, found by training a tiny model of each."""

import difflib
import json
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mesp_mlx import __version__, child, report
from mesp_mlx.errors import UserError
from mesp_mlx.interrupt import Interrupts
from mesp_mlx.model.architecture import INSTALL, has_mlx_lm

CHILD = "mesp_mlx.architecture_check"
AT_ONCE = 8  # types that a process tries: mlx-lm takes seconds to import
STATUSES = ("structured", "generic", "refused", "wrong")


def run(names: Sequence[str], json_file: str | None = None, markdown: bool = False) -> int:
    """Try the model types named, or all there are, and print what came of each; 0, or 1 if a gradient was wrong or a process crashed.

    Args:
        json_file: for the figures.
        markdown: print the README's table instead.

    Raises:
        UserError: MLX or mlx-lm is not installed, mlx-lm has no such type, or the file can't be written.
        KeyboardInterrupt: it was interrupted.
    """
    if not has_mlx_lm():
        raise UserError(f"architectures are tried on MLX, through mlx-lm, and they are not both installed here. Install them: {INSTALL}.")
    if json_file and not Path(json_file).absolute().parent.is_dir():
        raise UserError(f"--json {json_file}: its folder does not exist. Make it, or choose another file.")
    console = report.console()
    if not console.is_terminal:
        console.width = 160
    found: list[dict[str, Any]] = []
    with Interrupts(), console.status("looking for mlx-lm's model types") as status:
        types = _chosen(names, child.ask(CHILD, {"types": []}, "looking for mlx-lm's model types")["types"])
        for start in range(0, len(types), AT_ONCE):
            batch = types[start : start + AT_ONCE]
            status.update(f"{start} of {len(types)} model types tried, now {', '.join(batch)}")
            found += tried(batch)
    versions = {"mesp_mlx": __version__, "mlx_lm": metadata.version("mlx-lm"), "mlx": metadata.version("mlx")}
    if markdown:
        console.print(as_markdown(found, versions["mlx_lm"]), soft_wrap=True)
    else:
        _print(console, found, versions)
    if json_file:
        _write(Path(json_file), {"versions": versions, "counts": counts(found), "types": found})
    return int(any(each["status"] == "wrong" for each in found))


def tried(types: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What became of each type. Those of a process that crashed are tried again, each in one of its own."""
    try:
        yield from child.ask(CHILD, {"types": list(types)}, f"training tiny models of {', '.join(types)}")["found"]
    except UserError as crashed:
        if types[1:]:
            for each in types:
                yield from tried([each])
        else:
            yield {"model_type": types[0], "status": "wrong", "numpy": False, "error": None, "reason": str(crashed)}


def counts(found: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many types have each status."""
    return {status: sum(each["status"] == status for each in found) for status in STATUSES}


def as_markdown(found: Sequence[dict[str, Any]], version: str) -> str:
    """The README's table: the types of each status, and why some are refused."""

    def named(status: str, numpy: bool | None = None) -> list[str]:
        return [f"`{each['model_type']}`" for each in found if each["status"] == status and numpy in (None, each["numpy"])]

    rows = {
        "structured, on MLX and NumPy": named("structured", True),
        "structured, on MLX": named("structured", False),
        "generic, on MLX": named("generic"),
        "refused": named("refused"),
        "wrong": named("wrong"),
    }
    lines = ["| here | model types |", "|---|---|"]
    lines += [f"| {name} ({len(types)}) | {', '.join(types)} |" for name, types in rows.items() if types]
    why = [f"- `{each['model_type']}`: {_one_line(each['reason'])}" for each in found if each["reason"]]
    total = f"mlx-lm {version} has {len(found)} model types, of which {sum(each['status'] in STATUSES[:2] for each in found)} train here."
    return "\n".join([total, "", *lines, *([""] + why if why else [])])


def _chosen(names: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(close)}?" if close else " Without an argument, all that there are are tried."
            raise UserError(f"mlx-lm {metadata.version('mlx-lm')} has no model type {name!r}.{hint}")
    return list(dict.fromkeys(names)) or list(known)


def _print(console: Console, found: Sequence[dict[str, Any]], versions: dict[str, str]) -> None:
    table = Table("model type", "here", "NumPy", "worst error", "why", box=box.SIMPLE if console.is_terminal else None)
    for each in found:
        error = "" if each["error"] is None else f"{each['error']:.1e}"
        table.add_row(each["model_type"], each["status"], "yes" if each["numpy"] else "", error, _one_line(each["reason"] or ""))
    console.print(table)
    of_each = ", ".join(f"{count} {status}" for status, count in counts(found).items() if count)
    console.print(
        f"{len(found)} model types of mlx-lm {versions['mlx_lm']}: {of_each}. Errors: of an update's loss and gradients, beside autodiff of the whole model.",
        soft_wrap=True,
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"writing --json {file}: {error.strerror}. Choose another file.") from None
