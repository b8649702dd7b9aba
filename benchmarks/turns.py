"""Times of sides that take turns: only ratios taken in one run, round by round, mean anything. Peaks of memory."""
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TypeVar

from torch.utils.benchmark import timer

Measured = TypeVar("Measured")
CLEAR_PEAK = Path("/proc/self/clear_refs")  # Linux only


def seconds(function: Callable[[], object]) -> float:
    start = timer()  # waits for the device
    function()
    return timer() - start


def take_turns(sides: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1,
               measure: Callable[[Callable], Measured] = seconds) -> dict[str, list[Measured]]:
    """Measure every side in each round. The rounds of the warm-up are left out."""
    taken: dict[str, list] = {name: [] for name in sides}
    for number in range(warm_up + rounds):
        for name, function in sides.items():
            took = measure(function)
            if number >= warm_up:
                taken[name].append(took)
    return taken


def ratio(above: list[float], below: list[float]) -> float:
    return median(a / b for a, b in zip(above, below, strict=True))


def peak_growth(function: Callable[[], object]) -> float:
    """Return the MiB by which this process's resident memory rises at most during a call. Linux."""
    def resident(field: str) -> int:
        return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    CLEAR_PEAK.write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    function()
    return (resident("VmHWM") - before) / 1024
