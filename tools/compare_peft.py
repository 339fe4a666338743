"""Tokens per second and resident memory of LoRA training on a CPU: PEFT on PyTorch, plain and with its gradient checkpointing, and ours on NumPy.

    pip install 'mesp-mlx[bench]'
    python tools/compare_peft.py --rounds 3 --json compared.json

On Linux pip's torch is its CUDA build, of several GB, which runs on a CPU too. The CPU build is a fifth of the size: PyTorch's site says how to install it;
do so first where that matters.

A random model of SmolLM2-135M's shape, adapters of one rank on all seven projections, AdamW, the same random tokens, all supervised. PEFT's base model is in
float32 with weights of standard deviation 0.02; ours is in 4 bits on disk and computed with in float32. Each measurement is a process of its own, all of
them in turn, as often as --rounds says. Speed is by the median step of a process, and the median of the rounds; memory is the kernel's high-water mark of
a process, and the largest of the rounds. On busy cores compare the processor's seconds, with --threads 1. The last line is one JSON object.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_step
import make_random_model
import numpy as np
from step_plan import positive

from mesp_mlx.errors import UserError

SHAPE = "smollm2-135m"
CHECKPOINTED = "PEFT, checkpointed"
# What is measured: a name, and flags for it, of this file's child or of bench_step.
PEFT: dict[str, list[str]] = {"PEFT": [], CHECKPOINTED: ["--grad-checkpoint"]}
OURS: dict[str, list[str]] = {
    "mesp-mlx": ["--memory", "auto"],
    "mesp-mlx, inputs kept": ["--keep", "inputs"],
    "mesp-mlx, fastest": ["--memory", "fastest"],
    "mesp-mlx, least": ["--memory", "least"],
}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = ("batch", "seq", "rank", "iters")
KEPT = ("step_seconds", "cpu_seconds", "process_peak_bytes", "loss")  # of a measurement


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=positive, default=4, help="rows of an update")
    parser.add_argument("--seq", type=positive, default=64, help="tokens of a row")
    parser.add_argument("--rank", type=positive, default=8)
    parser.add_argument("--layers", type=positive, default=make_random_model.SHAPES[SHAPE]["num_hidden_layers"], help="instead of the shape's own depth")
    parser.add_argument("--iters", type=positive, default=5, help="steps of a process")
    parser.add_argument("--rounds", type=positive, default=3, help="times each is measured, in turn")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="of each process (default: one a core)")
    parser.add_argument("--variants", type=_variants, default=[*PEFT, *OURS], metavar="NAME;…", help=f"some of: {'; '.join([*PEFT, *OURS])}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--grad-checkpoint", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.child:
            print(json.dumps(measure_peft(options)))
            return 0
        _check_installed(options.variants)
        compared = compare(options)
    except (UserError, OSError) as error:
        print(f"compare_peft: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(compared)))
    print(line := json.dumps(compared))
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """The settings, and each variant's result: measured in turn, in processes of their own.

    Raises:
        UserError: a process failed.
    """
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))  # for the processes to come
    flags = [word for key in (*SETTINGS, "layers") for word in (f"--{key}", str(getattr(options, key)))]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.variants}
    for _ in range(options.rounds):
        for name, results in rounds.items():
            results.append(in_child(name, flags, options.threads))
    settings = {key: getattr(options, key) for key in (*SETTINGS, "layers", "rounds", "threads")}
    tokens = options.batch * options.seq
    return {"shape": SHAPE, **settings, "versions": _versions(), "results": {name: summary(tokens, results) for name, results in rounds.items()}}


def in_child(name: str, flags: list[str], threads: int) -> dict[str, Any]:
    """One measurement of a variant.

    Raises:
        UserError: its process failed.
    """
    if name in OURS:
        return bench_step.step(["--shape", SHAPE, "--backend", "numpy", "--optimizer", "adamw", *flags, *OURS[name]])
    command = [sys.executable, "-W", "ignore::FutureWarning", __file__, "--child", *flags, "--threads", str(threads), *PEFT[name]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise UserError(f"measuring {name}: its process ended with status {done.returncode} and no result; what it said stands above.") from None


def summary(tokens: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """A variant's rounds, of updates of so many tokens, as one result: medians of the times, the largest high-water mark."""
    steps = [result["step_seconds"] for result in rounds]
    return {
        "tokens_per_second": tokens / statistics.median(steps),
        "step_seconds": statistics.median(steps),
        "cpu_seconds": statistics.median(result["cpu_seconds"] for result in rounds),
        "process_peak_bytes": max(result["process_peak_bytes"] for result in rounds),
        "rounds": [{key: result[key] for key in KEPT} for result in rounds],
    }


def table(compared: dict[str, Any]) -> list[str]:
    """What to print: a line for each variant, and how it stands to PEFT's checkpointed mode where that was measured."""
    results = compared["results"]
    base, width = results.get(CHECKPOINTED), max(map(len, results))
    lines = [f"{'':{width}}{'tokens/s':>10}{'step, s':>10}{'processor, s':>14}{'resident MB':>13}" + (f"  against {CHECKPOINTED}" if base else "")]
    for name, result in results.items():
        peak = result["process_peak_bytes"]
        line = f"{name:{width}}{result['tokens_per_second']:>10.0f}{result['step_seconds']:>10.2f}{result['cpu_seconds']:>14.2f}{peak / 1e6:>13.0f}"
        if base:
            faster, smaller = result["tokens_per_second"] / base["tokens_per_second"], base["process_peak_bytes"] / peak
            line += f"  {faster:.2f} x the speed, 1/{smaller:.1f} of the memory"
        lines.append(line)
    threads, versions = f"{compared['threads']} thread{'s' if compared['threads'] > 1 else ''}", compared["versions"]
    made = f"{compared['batch']} x {compared['seq']} tokens, rank {compared['rank']}, {threads}, rounds: {compared['rounds']}"
    return [*lines, f"{made}; {', '.join(f'{name} {version}' for name, version in versions.items())}"]


def measure_peft(options: argparse.Namespace) -> dict[str, Any]:
    """Run PEFT's steps here, and measure this process."""
    import peft
    import torch
    import transformers

    from mesp_mlx.memory import measure

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = make_random_model.SHAPES[SHAPE] | {"num_hidden_layers": options.layers}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps")
    settings = {name: shape[name] for name in (*names, "tie_word_embeddings", "max_position_embeddings")}
    settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": shape["rope_theta"]}, "initializer_range": 0.02, "use_cache": False}
    frozen = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).float()
    alpha = int(bench_step.SCALE * options.rank)  # PEFT's scale is alpha over rank
    model = peft.get_peft_model(frozen, peft.LoraConfig(r=options.rank, lora_alpha=alpha, target_modules=MODULES, lora_dropout=0.0, task_type="CAUSAL_LM"))
    if options.grad_checkpoint:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], lr=bench_step.LEARNING_RATE, weight_decay=0.0)
    tokens = np.random.default_rng(0).integers(0, shape["vocab_size"], (options.batch, options.seq + 1), dtype=np.int32).astype(np.int64)
    ids, targets = torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].reshape(-1))
    losses, seconds, cpu_seconds = [], [], []
    for _ in range(options.iters):
        started, cpu_started = time.perf_counter(), time.process_time()
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets)
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    times = {"step_seconds": statistics.median(seconds), "cpu_seconds": statistics.median(cpu_seconds)}
    return {"loss": losses[0], **times, "process_peak_bytes": measure.process_peak_bytes()}


def _versions() -> dict[str, str]:
    """Of what is compared, where it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "peft", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _check_installed(variants: list[str]) -> None:
    missing = [name for name in ("torch", "peft", "transformers") if importlib.util.find_spec(name) is None]
    if missing and any(name in PEFT for name in variants):
        ours = ";".join(name for name in variants if name in OURS) or ";".join(OURS)
        raise UserError(f"measuring PEFT: not installed: {', '.join(missing)}. Run pip install 'mesp-mlx[bench]', or measure ours alone: --variants '{ours}'.")


def _variants(text: str) -> list[str]:
    names = [name.strip() for name in text.split(";")]
    for name in names:
        if name not in PEFT and name not in OURS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of: {'; '.join([*PEFT, *OURS])}")
    return names


if __name__ == "__main__":
    sys.exit(main())
