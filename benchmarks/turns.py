"""Times of sides that take turns: only ratios taken in one run, round by round, mean anything."""
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch


def seconds(function: Callable[[], object]) -> float:
    """Of one call, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def take_turns(sides: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of every side in each round, those of the warm-up left out."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warm_up + rounds):
        for name, function in sides.items():
            took = seconds(function)
            if number >= warm_up:
                taken[name].append(took)
    return taken


def ratio(above: list[float], below: list[float]) -> float:
    """The median over the rounds of above / below."""
    return median(a / b for a, b in zip(above, below, strict=True))
