"""RESULTS.md of tools/reproduce_papers.py, from its results alone."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import papers_plots
import papers_published as published
from papers_plan import DTYPES, PARTS, RATES, SWEPT, Bench, Plan

Rows = Mapping[str, Any]
REPORT = "RESULTS.md"
MISSING = "not measured"
NAMES = {
    "mesp": "MeSP (`mesp`)",
    "mebp": "MeBP as published (`mebp`)",
    "mebp-tiled": "MeBP with our loss (`mebp-tiled`)",
    "mezo": "MeZO (`mezo`)",
    "forward": "a forward pass (`forward`)",
}
PICTURES = {
    "table": papers_plots.PEAKS,
    "tokens": papers_plots.TOKENS,
    "ranks": papers_plots.RANKS,
    "estimates": papers_plots.COSINES,
    "convergence": papers_plots.CURVES,
}


def write(folder: Path, content: Mapping[str, Any], plan: Plan) -> list[str]:
    """Write the report and the pictures that there are rows for; gives the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = papers_plots.draw(folder, content["rows"], plan)
    (folder / REPORT).write_text(report(content, plan, pictures), encoding="utf-8")
    return [REPORT, *pictures]


def report(content: Mapping[str, Any], plan: Plan, pictures: Sequence[str] = ()) -> str:
    """The report as Markdown. A row that wasn't measured says so."""
    quick = plan.name == "quick"
    command = "python tools/reproduce_papers.py" + (" --quick --out DIR" if quick else "")
    lines = ["# The papers' tables, measured again", ""]
    lines += ["What plans predict of such steps, beside what was measured: [recipes/memory](../memory/RESULTS.md).", ""]
    lines += [f"Made by `{command}` from `results.json` beside it, which holds every figure unrounded. MB are 10^6 bytes.", ""]
    if quick:
        lines += [f"**A reduced version, which shows that everything works and nothing else**: models of {plan.layers} layers, short rows, few updates.", ""]
    lines += [*_machines(content["machines"], content["rows"]), "", _in_kind(plan)]
    sections: dict[str, Callable[[Rows, Plan], list[str]]] = {
        "table": _table,
        "tokens": lambda rows, plan: _sweep(rows, plan, "tokens"),
        "ranks": lambda rows, plan: _sweep(rows, plan, "ranks"),
        "ablation": _ablation,
        "estimates": _estimates,
        "convergence": _convergence,
        "inference": _inference,
        "bfloat16": _bfloat16,
    }
    for number, (part, section) in enumerate(sections.items(), 1):
        lines += ["", f"## {number}. {PARTS[part][0].upper()}{PARTS[part][1:]}", "", *section(content["rows"], plan)]
        if PICTURES.get(part) in pictures:
            lines += ["", f"![{PARTS[part]}]({PICTURES[part]})"]
    return "\n".join(lines) + "\n"


def expected_signs(result: Mapping[str, Any], n: int) -> float:
    """Share of components whose sign the mean over n random directions gets right: of component j 1/2 + E[χ_n] |g_j| / (|g| √(2π)), to first order."""
    mean_share = result["gradient_absolute_sum"] / result["parameters"] / result["gradient_norm"]
    return 0.5 + papers_plots.mean_chi(n) * mean_share / math.sqrt(2 * math.pi)


def _machines(machines: Sequence[Mapping[str, Any]], rows: Rows) -> list[str]:
    lines = []
    for place, of in enumerate(machines):
        blas = ", OpenBLAS put before MLX's own BLAS" if of["openblas"] else ""
        versions = ", ".join(f"{name} {of[key]}" for key, name in (("mlx", "MLX"), ("numpy", "NumPy"), ("python", "Python")) if of[key])
        count = sum(row["machine"] == place for row in rows.values())
        which = f" {place + 1}, {count} of {len(rows)} rows (`machine` {place} in results.json)" if len(machines) > 1 else ""
        lines.append(f"Machine{which}: {of['cpu']}, {of['cores']} cores, {of['system']}; {versions}; MLX's CPU device{blas}.")
    return lines or ["Machine: nothing was measured."]


def _in_kind(plan: Plan) -> str:
    return (
        f"**Where our measurement differs in kind.** Published: {published.CONDITIONS} ({published.MESP}). Here the peak is that of MLX's allocator: "
        "every array, at every moment. A sample each half second misses what lives shorter, and a sample of a process counts what no allocator does. Beside "
        "it stands the process's own high-water mark, by the operating system, which adds the interpreter, the libraries, and freed buffers kept for reuse. "
        "Activations are float32 here, because this CPU device multiplies half precision in scalar code, and bfloat16 there: what grows with the tokens "
        "takes twice the bytes here (section 8 measures bfloat16, on truncated models). Frozen weights are streamed here, by every method, two or three "
        "sublayers in memory at a time; how many the published figures hold isn't stated in what is at hand of the paper. Models are random ones of the same "
        "shapes, which changes no size; the optimizer is SGD. Seconds on a phone and on two CPU cores can't be compared with each other, only their ratios. "
        "Our MeBP is `mebp`: the same loop, each layer differentiated by autodiff, logits whole; `mebp-tiled` has MeSP's loss, so that the two gains can be "
        "told apart. All have the same limit on MLX's cache, and a limit on how far MLX runs ahead that is as low as costs no time: under that of a structured "
        "stage a plain layer would take twice the time for a fifth less memory. Steps at the base "
        f"({plan.shapes[0]}, {plan.tokens} tokens, rank {plan.rank}) have the median time of {_count(plan.rounds, 'process', 'processes')}; others are "
        "one step each."
    )


def _table(rows: Rows, plan: Plan) -> list[str]:
    lead = f"{plan.tokens} tokens, rank {plan.rank} on seven projections, batch 1, 4-bit groups of 64. “Below MeBP”: than `mebp` in the same setting, "
    lines = [lead + "ours than ours, published than published.", "", *_peaks(rows, plan.benches("table"), "model", lambda bench: bench.shape), ""]
    for shape in plan.shapes:
        mesp, mebp, tiled = (_result(rows, plan.bench(method, shape=shape)).get("step_seconds") for method in SWEPT)
        theirs = [published.seconds(shape, plan.tokens, plan.rank, method) if plan.layers is None else None for method in ("mesp", "mebp")]
        if mesp and mebp and tiled:
            text = f"- {shape}: a step of MeSP takes {mesp / mebp:.2f} × the time of MeBP's, {mesp / tiled:.2f} × if that has our loss"
            lines.append(text + (f" (published: {theirs[0] / theirs[1]:.2f} × MeBP's)." if theirs[0] and theirs[1] else "."))
    return lines


def _sweep(rows: Rows, plan: Plan, part: str) -> list[str]:
    benches = plan.benches(part)
    if part == "tokens":
        return [f"{plan.shapes[0]}, rank {plan.rank}, batch 1.", "", *_peaks(rows, benches, "tokens", lambda bench: f"{bench.tokens:,}")]
    held = [(bench.rank, _result(rows, bench)) for bench in benches if bench.method == "mesp"]
    sizes = ", ".join(f"{(of['adapter_bytes'] + of['gradient_bytes']) / 1e6:.1f} MB at rank {rank}" for rank, of in held if of)
    lead = f"{plan.shapes[0]}, {plan.tokens} tokens, batch 1. Of ours, adapters and gradients, float32 and held until the update ends: {sizes or MISSING}."
    return [lead, "", *_peaks(rows, benches, "rank", lambda bench: str(bench.rank))]


def _peaks(rows: Rows, benches: Sequence[Bench], first: str, label: Callable[[Bench], str]) -> list[str]:
    """Peaks and times of steps beside the published ones; a setting's `mebp` is what its others are held against."""
    header = [first, "method", "arrays, MB", "below MeBP", "published, MB", "published, below MeBP", "process, MB", "s per step", "published, s", "command"]
    bases = {bench.key.rpartition("/")[0]: _result(rows, bench).get("allocator_peak_bytes") for bench in benches if bench.method == "mebp"}
    lines = []
    for bench in benches:
        result, setting = _result(rows, bench), (bench.shape, bench.tokens, bench.rank)
        peak, base = result.get("allocator_peak_bytes"), bases[bench.key.rpartition("/")[0]]
        whole = bench.layers is None  # the papers have no truncated models
        paper, paper_base = (published.peak(*setting, method) if whole else None for method in (bench.method, "mebp"))
        paper_seconds = published.seconds(*setting, bench.method) if whole else None
        cells = [label(bench), NAMES[bench.method], _mb(peak), _below(peak, base, bench.method), _number(paper, 1), _below(paper, paper_base, bench.method)]
        cells += [_mb(result.get("process_peak_bytes")), _number(result.get("step_seconds"), 2), _number(paper_seconds, 2)]
        lines.append([*cells, _command(rows, bench.key)])
    return _markdown(header, lines)


def _ablation(rows: Rows, plan: Plan) -> list[str]:
    lines = []
    for bench in plan.benches("ablation"):
        result = _result(rows, bench)
        cells = [str(bench.rank), "the attention's kept" if bench.keep_h else "recomputed", _mb(result.get("allocator_peak_bytes"), 2)]
        all_h = result["layers"] * 7 * bench.tokens * bench.rank * 4 if result else None
        lines.append([*cells, _number(result.get("step_seconds"), 2), _mb(all_h, 2), _command(rows, bench.key)])
    return [
        f"{plan.shapes[0]}, {plan.tokens} tokens; h = x A, [tokens, rank], of each module. Ours can keep it from the replay of a layer to that layer's "
        "backward, where it "
        "would be computed again: of one layer at a time, and of the attention's modules only, because an MLP's h never leaves its backward. Stored for "
        "all modules "
        "from forward to backward, h would take layers · 7 · tokens · rank · 4 bytes, counted in the table. The paper's table of this ablation is not at hand.",
        "",
        *_markdown(["rank", "h", "arrays, MB", "s per step", "all h stored, MB by count", "command"], lines),
    ]


def _estimates(rows: Rows, plan: Plan) -> list[str]:
    key, _ = plan.estimates()
    header = ["directions n", "estimates", "cosine, mean", "spread", "expected", "published", "signs that agree", "expected"]
    if key not in rows:
        return _markdown(header, [[str(n), *[MISSING] * 7] for n in plan.directions])
    result = rows[key]["result"]
    d, counts, last = result["parameters"], list(result["estimates"]), list(result["estimates"])[-1]
    lines, by_layer = [], []
    for n, of in result["estimates"].items():
        cells = [n, str(len(of["cosine"])), f"{statistics.mean(of['cosine']):.5f}", _spread(of["cosine"], 5), f"{papers_plots.expected_cosine(int(n), d):.5f}"]
        cells += [f"about {published.MEZO_COSINE}" if n == "1" else "–", f"{statistics.mean(of['signs']):.3%}", f"{expected_signs(result, int(n)):.3%}"]
        lines.append(cells)
    for place, layer in enumerate(result["layers"]):
        share = result["layer_norms"][place] / result["gradient_norm"]
        expected = share * papers_plots.expected_cosine(int(last), result["layer_parameters"][place])
        cosines = [f"{result['estimates'][n]['layer_cosine'][place]:+.5f}" for n in counts]
        by_layer.append([str(layer), f"{share:.3f}", *cosines, f"{expected:+.5f}", *(f"{result['estimates'][n]['layer_signs'][place]:.3%}" for n in counts)])
    right = statistics.correlation(result["slopes"], result["true_slopes"])
    return [
        f"The demo model, SmolLM2-135M-Instruct, with {d:,} adapter parameters at rank 8 and scale 20; one update of {result['rows']} rows of the "
        "demo's chats, "
        f"{result['supervised']} supervised tokens; NumPy, epsilon {result['epsilon']:g}. B holds random numbers a tenth of A's size: zero, as training "
        "starts, it would leave A "
        f"without a gradient. The true gradient is `mesp`'s. The {last} directions are {last} estimates of n = 1, and for a larger n disjoint groups. "
        "Spread: standard deviation over estimates.",
        "",
        f"Command: {_command(rows, key)}",
        "",
        *_markdown(header, lines),
        "",
        "Expected cosine: E[χ_n] / √d, about √(n/d): what random directions in d dimensions give, whatever the model. Expected signs: likewise, for components "
        f"of this gradient's sizes. MeZO's slopes, from differences of losses, correlate with z · gradient at {right:.6f}: the nearer to 1, the more it is "
        "the random direction alone, and not the slope, that makes the estimate poor.",
        "",
        "By layer, means over estimates. Expected of a layer: its share of the gradient's norm, times E[χ_n] / √(its parameters).",
        "",
        *_markdown(["layer", "norm, share", *(f"cosine, n = {n}" for n in counts), f"expected, n = {last}", *(f"signs, n = {n}" for n in counts)], by_layer),
    ]


def _convergence(rows: Rows, plan: Plan) -> list[str]:
    lines, all_runs, curves = [], [], {}
    for method, rates in RATES.items():
        runs = papers_plots.best_runs(method, rows, plan)
        for run in {run.key: run for run in [*plan.grid(method), *(plan.best(method, rows) or [])]}.values():
            result = rows[run.key]["result"] if run.key in rows else {"failed": MISSING}
            cells = [result["failed"], "–"] if "failed" in result else [f"{result['val_loss'][-1]:.4f}", f"{result['seconds'][-1]:.0f}"]
            all_runs.append([NAMES[method], f"{run.rate:g}", str(run.seed), *cells, _command(rows, run.key)])
        tried, updates = ", ".join(f"{rate:g}" for rate in rates), plan.updates[method]
        if not runs:
            lines.append([NAMES[method], f"of {tried}", str(updates), *[MISSING] * 4])
            continue
        results = [rows[run.key]["result"] for run in runs]
        curves[method] = papers_plots.mean_curve(results)
        final, seconds = [result["val_loss"][-1] for result in results], [result["seconds"][-1] for result in results]
        cells = [f"{runs[0].rate:g} of {tried}", str(updates), f"{statistics.mean(result['val_loss'][0] for result in results):.4f}"]
        cells += [f"{statistics.mean(final):.4f} ± {_spread(final, 4)}", f"{statistics.mean(seconds):.0f} ± {_spread(seconds, 0)}"]
        lines.append([NAMES[method], *cells, f"{curves[method]['passes'][-1]:.0f}"])
    first = plan.grid("mesp")[0]
    text = [
        f"The demo's model and data, rows cut to {first.tokens} tokens, {first.rows} rows per update, rank 8, scale 20, NumPy, each run on one core and "
        "two at a time. AdamW for "
        "the exact methods; SGD for MeZO with one direction per update, as its paper has it; constant rates, no warm-up, no clipping. The loss is that "
        "of the demo's "
        "validation rows, the same for all, and its time isn't counted. The rate is that of three with the lowest final loss at the first seed; the "
        "other seeds run at that "
        f"rate. A seed sets the first adapter, the order of rows, and the directions. Mean ± standard deviation of {len(plan.seeds)} seeds. Forward "
        "passes: floating-point "
        "operations over those of a forward pass of the update's rows.",
        "",
        *_markdown(["method", "learning rate", "updates", "loss before", "loss after", "seconds", "forward passes"], lines),
    ]
    for method in ("mesp", "mebp") if "mezo" in curves else ():
        curve, end = curves.get(method, {"val_loss": []}), curves["mezo"]["val_loss"][-1]
        place = next((i for i, loss in enumerate(curve["val_loss"]) if loss <= end), None)
        if place is not None:
            when = f"{curve['updates'][place]} updates, {curve['seconds'][place]:.0f} s, {curve['passes'][place]:.0f} forward passes"
            text += ["", f"{NAMES[method]} is first seen at or below MeZO's final loss after {when}."]
    return [*text, "", "Every run:", "", *_markdown(["method", "learning rate", "seed", "loss after", "seconds", "command"], all_runs)]


def _inference(rows: Rows, plan: Plan) -> list[str]:
    lines = []
    for shape in plan.shapes:
        benches = [plan.bench(method, shape=shape) for method in ("forward", "mezo")]
        forward, mezo = (_result(rows, bench) for bench in benches)
        peaks, whole = ([of.get(f"{what}_peak_bytes") for of in (forward, mezo)] for what in ("allocator", "process"))
        carried = peaks[0] + forward["state_bytes"] if peaks[0] else None
        cells = [shape, *map(_mb, peaks), _ratio(peaks[1], peaks[0]), _ratio(peaks[1], carried), _ratio(whole[1], whole[0])]
        lines.append([*cells, ", ".join(_command(rows, bench.key) for bench in benches)])
    theirs = ", ".join(f"{name} about {size:g} GB" for name, size in published.POCKETLLM_GB.items())
    header = ["model", "forward, MB", "MeZO, MB", "MeZO ÷ forward", "MeZO ÷ (forward + one array)", "processes: MeZO ÷ forward", "commands"]
    return [
        f"The claim: derivative-free training takes hardly more memory than inference. Published ({published.POCKETLLM}): {theirs}, on an OPPO Reno 6; "
        f"its memory of inference is not at hand. Here: {plan.tokens} tokens, rank {plan.rank}, weights streamed in both. The one array is the other "
        "side's state, "
        "[batch, tokens, width] in float32.",
        "",
        *_markdown(header, lines),
    ]


def _bfloat16(rows: Rows, plan: Plan) -> list[str]:
    (low, high), lines = plan.half_depths, []
    layers = next((of["layers"] for method in SWEPT if (of := _result(rows, plan.whole(method)))), None)
    for method in SWEPT:
        for dtype in DTYPES:
            benches = [plan.bench(method, tokens=plan.half_tokens, layers=depth, dtype=dtype) for depth in (low, high)]
            peaks = [_result(rows, bench).get("allocator_peak_bytes") for bench in benches]
            beyond = _beyond((low, high), peaks, layers) if layers else None
            whole = _mb(_result(rows, plan.whole(method)).get("allocator_peak_bytes")) if dtype == "float32" else "–"
            paper = published.peak(plan.shapes[0], plan.half_tokens, plan.rank, method) if dtype == "bfloat16" else None
            lines.append(
                [NAMES[method], dtype, *map(_mb, peaks), _mb(beyond), whole, _number(paper, 1), ", ".join(_command(rows, bench.key) for bench in benches)]
            )
    depth = f"{layers or 'all'} layers"
    header = [
        "method",
        "activations",
        f"{low} layers, MB",
        f"{high} layers, MB",
        f"{depth}, **extrapolated**",
        f"{depth}, measured",
        "published, MB",
        "commands",
    ]
    return [
        f"{plan.shapes[0]}, {plan.half_tokens} tokens, rank {plan.rank}. This CPU device multiplies bfloat16 in scalar code, many times slower than "
        "float32, so the model is cut "
        f"to {low} and {high} layers and the whole model's peak is **extrapolated**, linearly in depth. The same done in float32, whose whole model can "
        "be measured, "
        "shows what that is worth. Adapters and their gradients are float32 in both.",
        "",
        *_markdown(header, lines),
    ]


def _beyond(depths: tuple[int, int], peaks: Sequence[float | None], layers: int) -> float | None:
    """The peak at a depth, by the line through two others."""
    low, high = peaks
    return low + (high - low) / (depths[1] - depths[0]) * (layers - depths[0]) if low and high else None


def _result(rows: Rows, bench: Bench) -> Mapping[str, Any]:
    """What was measured of a step; empty if nothing was."""
    return rows[bench.key]["result"] if bench.key in rows else {}


def _command(rows: Rows, key: str) -> str:
    return f"`{rows[key]['command']}`" if key in rows else MISSING


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines)]


def _mb(size: float | None, digits: int = 1) -> str:
    return MISSING if size is None else f"{size / 1e6:,.{digits}f}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _below(size: float | None, base: float | None, method: str) -> str:
    return "–" if size is None or base is None or method == "mebp" else f"{1 - size / base:.1%}"


def _ratio(size: float | None, base: float | None) -> str:
    return f"{size / base:.3f}" if size and base else MISSING


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.stdev(values):.{digits}f}" if len(values) > 1 else "–"


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"
