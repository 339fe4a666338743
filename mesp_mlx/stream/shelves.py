"""Where arrays wait that nobody computes with: in memory, or in the run's file."""

from dataclasses import dataclass
from typing import Any, Protocol

from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.stream.run_file import InMemory, Parked, RunFile


class Shelf(Protocol):
    """Takes a tree of arrays, and gives what `fetch` turns into it again."""

    def put(self, tree: Any) -> Any: ...


@dataclass(frozen=True)
class Shelves:
    """One shelf for each kind of array. Several may be the run's file: what lies there already is not written twice.

    states: between two stages; checkpoints: from forward to backward; gradients: until an update ends; adapter: it, and the optimizer's moments.
    """

    states: Shelf = InMemory()
    checkpoints: Shelf = InMemory()
    gradients: Shelf = InMemory()
    adapter: Shelf = InMemory()


IN_MEMORY = Shelves()


def shelves(strategy: Strategy, file: RunFile | None) -> Shelves:
    """Each kind where the plan puts it; `file` is the run's, where it needs one."""
    memory = InMemory()

    def place(in_file: bool) -> Shelf:
        if in_file and file is None:
            raise ValueError("the plan needs a run file")
        return file if in_file and file is not None else memory

    chosen = (strategy.states == "file", strategy.checkpoints == "file", strategy.gradients == "spilled", strategy.adapter == "file")
    return Shelves(*map(place, chosen))


def replace(held: dict[str, Any], name: str, tree: Any) -> None:
    """Put a newer tree of the same shapes where an older one waits."""
    if isinstance(held[name], Parked):
        held[name].set(tree)
    else:
        held[name] = tree
