"""A budget is kept by the operating system's own count: random shapes, rows and budgets, each run in a process of its own."""

import random
from pathlib import Path
from typing import Any

import pytest
from runs import BACKENDS, data_folder, read_log, tiny_model
from tiny_tokenizers import assistant, user


def rows(rng: random.Random, words: int) -> list[dict[str, Any]]:
    """Twelve chats of up to so many words, most much shorter."""

    def text(word: str, most: int) -> str:
        return " ".join([word] * rng.randint(1, max(1, most)))

    return [{"messages": [user(f"q{k} {text('time', words // 4)}"), assistant(text("It is noon.", words // 3))]} for k in range(12)]


SAMPLED = 2  # of the seeds


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed < SAMPLED else pytest.mark.exhaustive) for seed in range(15)])
def test_a_random_budget_is_kept(tmp_path, run_cli, backend, seed):
    rng = random.Random(seed)
    width, layers, words = rng.choice([128, 256, 384, 512]), rng.choice([2, 4, 6]), rng.choice([10, 60, 200, 500])
    shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": rng.choice([2, 4]) * width, "num_hidden_layers": layers, "num_attention_heads": 8}
    model = tiny_model(tmp_path / "model", **shape, num_key_value_heads=4, max_position_embeddings=4096)
    data = data_folder(tmp_path / "data", rows(rng, words))
    update = ["--batch-size", str(rng.choice([1, 2, 4, 8])), "--optimizer", rng.choice(["sgd", "adamw"]), "--rank", str(rng.choice([4, 8, 16]))]
    log = tmp_path / "log.jsonl"

    def go(*more: str) -> tuple[int, list[dict[str, Any]], str]:
        log.unlink(missing_ok=True)
        words = ["finetune", "--model", str(model), "--data", str(data), "--backend", backend, "--iters", "3", "--reply-tokens", "2", "--json-log", str(log)]
        env = {"MESP_MLX_CACHE": str(tmp_path / "cache"), "OPENBLAS_NUM_THREADS": "1"}
        done = run_cli(*words, *update, "--overwrite", *more, cwd=Path(tmp_path), env=env)
        return done.returncode, read_log(log) if log.exists() else [], done.stderr

    def planned(*more: str) -> int:
        code, events, said = go("--dry-run", *more)
        assert code == 0, said
        return events[0]["predicted_peak_bytes"]

    leasts, fastest = [planned("--memory", "least", "--adapters", where) for where in ("memory", "file")], planned("--memory", "fastest")
    # What a process takes before its first array differs by a little from one to the next.
    budget = min(leasts) + 500_000 + int(rng.choice([0, 0, 0.1, rng.random(), 1.1]) * max(0, fastest - min(leasts)))
    code, events, said = go("--memory", f"{budget}B")
    assert code == 0, said
    assert events[-1]["event"] == "end" and events[-1]["process_peak_bytes"] <= budget
    code, _, said = go("--memory", f"{int(0.85 * min(leasts))}B")
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
