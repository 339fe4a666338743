"""How a run spends its memory: every choice that a plan makes. Pure Python. Whatever is chosen, losses and adapters are the same to rounding."""

from dataclasses import dataclass
from typing import Literal, get_args

Keep = Literal["nothing", "replay", "inputs", "attention", "all"]
Place = Literal["memory", "file"]
Sink = Literal["applied", "held", "spilled"]

KEEPS: tuple[Keep, ...] = get_args(Keep)
ALL = -1


@dataclass(frozen=True)
class Strategy:
    """One value for each choice.

    Attributes:
        resident: stages whose frozen weights stay in memory, counted from the output down: the head's table, the last layer's MLP, its attention, the
            MLP of the layer below, and so on (or layer by layer, where a layer is one stage); ALL is every one.
        prefetch: stages that are read ahead of the one that computes.
        hold: the attention's weights stay open while its layer's MLP is reversed; otherwise they are read a third time.
        keep: what backward finds instead of computing it again.
            "nothing": the input of each layer. (From attention's replay to its backward, a moment later, its output is kept too.)
            "replay": the same; and q, k and v from the replay to the backward.
            "inputs": the input of each stage, so that nothing is replayed.
            "attention": also q, k, v and the attention's output.
            "all": also what gate and up give, so that no product with a frozen weight is computed twice.
        checkpoints: where that is.
        states: where the arrays between two stages are, of all groups of an update but the one that computes.
        gradients: "applied" stage by stage as they come, which clipping by a global norm forbids; "held" until the update ends; or "spilled" to the file.
        adapter: where adapters and the optimizer's moments are; in the file they are opened stage by stage.
        group_tokens: positions, padding included, of the rows that pass a stage together; a row that is longer passes alone.
        query_tile: query rows of a block of attention.
        width_tile: columns of the MLP's width F that are computed at once, a multiple of 128.
        vocabulary_tile: rows of the head's table that are multiplied at once.
        weight_tile: bytes of dequantised weights in a product, on a CPU.

    A tile of 0 is chosen by the rules of memory.tiles.
    """

    resident: int = 0
    prefetch: int = 1
    hold: bool = True
    keep: Keep = "nothing"
    checkpoints: Place = "memory"
    states: Place = "memory"
    gradients: Sink = "held"
    adapter: Place = "memory"
    group_tokens: int = 1024
    query_tile: int = 0
    width_tile: int = 0
    vocabulary_tile: int = 0
    weight_tile: int = 0

    @property
    def needs_file(self) -> bool:
        """Whether the run needs a file of its own."""
        return "file" in (self.checkpoints, self.states, self.adapter) or self.gradients == "spilled"


DEFAULT = Strategy()
