"""Holds a run to its memory budget: speed is given up first, then the run, before the system would page.

Nothing is watched beside the computation: the store calls the watchdog whenever it opens a stage. A reading takes about 20 microseconds.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from mesp_mlx.errors import RunStopped
from mesp_mlx.memory import choose, measure
from mesp_mlx.memory.plan import Plan
from mesp_mlx.units import megabytes

MARGIN = 0.01  # of the budget: so much below it the watchdog acts; it stops a run only above the budget itself


class Watchdog:
    """What it does when the footprint comes to the budget, one thing after the other, each said once:

    1. at once it gives back what can be had back within an update (`relieve`): resident weights, freed buffers, room;
    2. when the update is over, `after_update` answers with a plan of the smallest tiles and the least kept, by which the run goes on;
    3. if the footprint is over the budget after that, the adapter is saved and the run stops.

    Args:
        plan: the run's.
        budget_bytes: what the operating system may count.
        relieve: called at once.
        save: writes the adapter and gives its file.
        note: prints a line.
        footprint: the most that the process took since it was last asked, in bytes.
    """

    def __init__(
        self,
        plan: Plan,
        budget_bytes: int,
        relieve: Callable[[], None],
        save: Callable[[], Path],
        note: Callable[[str], None],
        footprint: Callable[[], int] | None = None,
    ):
        self._plan, self._budget_bytes = plan, budget_bytes
        self._relieve, self._save, self._note = relieve, save, note
        self._footprint = measure.footprints() if footprint is None else footprint
        self._updates = 0
        self._relieved = self._shrunk = False
        self._above_bytes = 0  # the footprint that ends the run at the end of an update
        self._whole_at_stages = plan.strategy.gradients != "applied"  # an adapter that changes as gradients come is whole only between two updates

    def __call__(self, stage: str) -> None:
        """A stage is opened.

        Raises:
            RunStopped: the budget can't be kept.
        """
        found = self._footprint()
        if self._shrunk:
            if found > self._budget_bytes:
                self._above_bytes = max(self._above_bytes, found)
                if self._whole_at_stages:
                    self._stop()
        elif not self._relieved and found >= (1 - MARGIN) * self._budget_bytes:
            self._relieved = True
            self._relieve()
            self._note(
                f"memory: {megabytes(found)} at {stage}, the budget is {megabytes(self._budget_bytes)}: no weights stay resident or are read ahead from now on"
            )

    def after_update(self) -> Plan | None:
        """An update is over, and the adapter whole. The plan to go on by, where it changes.

        Raises:
            RunStopped: the budget can't be kept.
        """
        self._updates += 1
        if self._above_bytes:
            self._stop()
        if not self._relieved or self._shrunk:
            return None
        self._shrunk = True
        self._relieve()  # what has been allocated since
        self._footprint()  # what it was until now says nothing of the new plan
        smaller = leaner(self._plan)
        if smaller.strategy == self._plan.strategy:
            return None
        self._note(f"memory: from update {self._updates + 1} on rows pass one by one, in the smallest tiles, and less is kept: slower, with the same results")
        self._plan = smaller
        return smaller

    def _stop(self) -> None:
        saved = self._save()
        parts = sorted(((size, part) for part, size in self._plan.by_part().items()), reverse=True)
        table = "\n".join(f"  {part:<11} {megabytes(size):>12}" for size, part in parts)
        after = f"{self._updates} update{'' if self._updates == 1 else 's'}"
        raise RunStopped(
            f"the process takes {megabytes(self._above_bytes)} of memory, the budget is {megabytes(self._budget_bytes)}, and nothing is left to give up. "
            f"The adapter after {after} is in {saved}. Raise --memory, or lower --max-seq-length or --rank. By the plan an update takes\n{table}"
        )


def leaner(plan: Plan) -> Plan:
    """The least of plans that a run can change to between two updates: what waits in memory, or in the file, goes on waiting there."""
    now = plan.strategy
    places = {"checkpoints": now.checkpoints, "states": now.states, "gradients": now.gradients, "adapter": now.adapter}
    return dataclasses.replace(plan, strategy=dataclasses.replace(choose.least(plan.workload), **places))
