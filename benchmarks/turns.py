"""Measure the times of sides that take turns, and peaks of memory.

Other work on a machine slows all sides of a round alike. So only ratios within a round are comparable, not times of
different runs."""
import re
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TypeVar

from torch.utils.benchmark import timer

Measured = TypeVar("Measured")
Work = Callable[[], object]
CLEAR_PEAK = Path("/proc/self/clear_refs")  # Linux only


def seconds(function: Work) -> float:
    start = timer()  # waits for the device
    function()
    return timer() - start


def take_turns(sides: Mapping[str, Work], rounds: int, warm_up: int = 1,
               measure: Callable[[Callable], Measured] = seconds) -> dict[str, list[Measured]]:
    """Return the times of every side in each round, without the rounds of the warm-up."""
    taken: dict[str, list] = {name: [] for name in sides}
    for number in range(warm_up + rounds):
        for name, function in sides.items():
            took = measure(function)
            if number >= warm_up:
                taken[name].append(took)
    return taken


def ratio(above: list[float], below: list[float]) -> float:
    return median(a / b for a, b in zip(above, below, strict=True))


def peak_growth(function: Work) -> float:
    """Return the peak of this process's resident memory during a call, in MiB above its start. Linux only."""
    def resident(field: str) -> int:
        return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    CLEAR_PEAK.write_text("5")  # resets the peak
    before = resident("VmRSS")
    function()
    return (resident("VmHWM") - before) / 1024


def alone(function: Callable[..., Measured], *args) -> Measured:
    """Return what a function returns in a process of its own, which inherits no heap."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)
