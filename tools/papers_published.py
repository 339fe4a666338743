"""What the papers report, each figure once. Peaks are in MB as printed; the papers do not say whether theirs are 10^6 bytes, so they are taken as such."""

from typing import NamedTuple

MESP = "MeSP, arXiv 2602.13069"
MEBP = "MeBP, arXiv 2510.03425"
MEZO = "MeZO, arXiv 2305.17333"
POCKETLLM = "PocketLLM, arXiv 2407.01031"

CONDITIONS = "bfloat16 on an iPhone, memory sampled every half second; batch 1, 4-bit groups of 64, adapters on seven projections"


class Figures(NamedTuple):
    """Of one model, row length and rank, both methods by MeSP's authors: peak memory in MB and seconds per step."""

    mebp: float
    mesp: float
    mebp_seconds: float | None = None
    mesp_seconds: float | None = None


# By shape, tokens of a row, rank. Source: MESP, its Table 1 and its sweeps of the sequence and of the rank.
FIGURES = {
    ("qwen2.5-0.5b", 256, 8): Figures(360.8, 136.2, 0.68, 0.86),
    ("qwen2.5-1.5b", 256, 8): Figures(516.2, 262.6, 1.66, 2.17),
    ("qwen2.5-3b", 256, 8): Figures(637.6, 368.4, 3.21, 4.09),
    ("qwen2.5-0.5b", 128, 8): Figures(252.7, 110.7),
    ("qwen2.5-0.5b", 512, 8): Figures(582.4, 245.8),
    ("qwen2.5-0.5b", 1024, 8): Figures(1050.3, 513.6),
    ("qwen2.5-0.5b", 256, 4): Figures(355.2, 132.8),
    ("qwen2.5-0.5b", 256, 16): Figures(372.4, 143.5),
    ("qwen2.5-0.5b", 256, 32): Figures(395.8, 158.2),
}
MEZO_COSINE = 0.001  # about; source: MESP's abstract. Its layers, batch and number of perturbations are not stated there
POCKETLLM_GB = {"RoBERTa-large": 4.0, "OPT-1.3B": 6.5}  # about, derivative-free, on an OPPO Reno 6; source: POCKETLLM's abstract


def peak(shape: str, tokens: int, rank: int, method: str) -> float | None:
    """MB of mesp or mebp in that setting; None where nothing is published."""
    found = FIGURES.get((shape, tokens, rank))
    return getattr(found, method) if found and method in ("mesp", "mebp") else None


def seconds(shape: str, tokens: int, rank: int, method: str) -> float | None:
    """Seconds of a step, as `peak`."""
    found = FIGURES.get((shape, tokens, rank))
    return getattr(found, f"{method}_seconds") if found and method in ("mesp", "mebp") else None
