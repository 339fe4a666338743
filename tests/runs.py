"""What tests of the whole command share: a tiny model with a tokenizer, rows for it, and a run whose events and files come back."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import make_model, tiny_config
from tiny_tokenizers import TEMPLATES, assistant, make_tokenizer, user, write

from mesp_mlx import cli, finetune, sources
from mesp_mlx.adapter import ADAPTER_FILE
from mesp_mlx.stream.safetensors import read_array, read_header

needs_mlx = pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="MLX is not installed")
BACKENDS = ["numpy", pytest.param("mlx", marks=needs_mlx)]
VOCABULARY = 352  # the tokenizer has a few tokens less


def tiny_model(folder: Path, family: str = "llama", bits: int | None = 4, **overrides: Any) -> Path:
    """Write a random model of a family, two layers of width 64, with a ChatML tokenizer; gives the folder."""
    make_tokenizer(TEMPLATES["chatml"]).save_pretrained(make_model(folder, tiny_config(family, vocab_size=VOCABULARY, **overrides), bits=bits))
    return folder


def chat_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Chat rows, all different, of four lengths; their replies are easily learnt."""
    return [{"messages": [user(f"What is the time at {i}?"), assistant(" ".join(["It is noon."] * (1 + i % 4)))]} for i in range(first, first + count)]


def data_folder(folder: Path, train: Sequence[Any], valid: Sequence[Any] = ()) -> Path:
    """A folder of train.jsonl and, if there are such rows, valid.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", train)
    if valid:
        write(folder / "valid.jsonl", valid)
    return folder


@dataclass(frozen=True)
class Done:
    """A finished run: the adapter's folder, and the events of its log."""

    folder: Path
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def values(self, kind: str, field: str) -> list[Any]:
        return [event[field] for event in self.of(kind)]

    @property
    def adapter(self) -> dict[str, np.ndarray]:
        return read_adapter(self.folder / ADAPTER_FILE)


def read_adapter(file: Path) -> dict[str, np.ndarray]:
    return {name: read_array(entry) for name, entry in read_header(file)[0].items()}


def read_log(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def run(model: Path, data: Path, folder: Path, **given: Any) -> Done:
    """`finetune.run` in this process, on NumPy unless told otherwise, with a report after every iteration and a short reply."""
    log = folder.with_name(f"{folder.name}.jsonl")
    quick = {"backend": "numpy", "steps_per_report": 1, "reply_tokens": 2, "json_log": str(log)}
    finetune.run(sources.load(None, quick | {"model": str(model), "data": str(data), "adapter_path": str(folder)} | given))
    return Done(folder, read_log(log))


def command(*arguments: str) -> int:
    """`mesp-mlx` in this process; gives its exit code."""
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    return left.value.code or 0  # type: ignore[return-value]
