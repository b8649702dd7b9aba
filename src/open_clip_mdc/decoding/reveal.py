"""The order in which masked tokens are revealed: the most confident first (Eq. 6).

Decoding writes a token that it chooses (`confidence.py`), and the heuristic score the true one (`likelihood/exact.py`).

Dimensions: R rows, L positions, M masked tokens of all rows, n revealed tokens of all rows, V vocabulary. There are
three index spaces: a row and a position [R, L], a place into R*L, and a number into the M places that are masked.
"""
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..text.packing import partition_indices, scatter_flat


class Revealed(NamedTuple):
    """The tokens that one step reveals, and what was predicted before it."""

    hidden: Tensor  # long [M] into R*L, the places that were masked before the step
    predicted: Tensor  # [M, ...], what was predicted at them
    which: Tensor  # long [n] into M, those that the step reveals
    places: Tensor  # long [n] into R*L, the same


def reveal(predict: Callable[[Tensor], tuple[Tensor, Tensor]], hidden: Tensor, left: np.ndarray,
           shape: tuple[int, int], tokens_per_step: int | float = 1) -> Iterator[Revealed]:
    """Yield what each step reveals, until nothing is masked. The caller writes these tokens before the next step.

    Args:
        predict: takes `hidden`. Returns the confidence of each place, [M], and predictions, [M, ...].
        hidden: the masked places, long [M] into R*L, ascending.
        left: number of masked tokens of each row, long [R].
        shape: R, L.
        tokens_per_step: k reveals the k most confident places of a row, the leftmost of equal ones. A float p reveals
            the most confident one, and all others with confidence p or more. The host waits for the device only then.
    """
    by_probability = isinstance(tokens_per_step, float)
    count = 1 if by_probability else tokens_per_step
    unknown = torch.full(shape, -torch.inf, device=hidden.device)
    nowhere = torch.zeros(shape, dtype=torch.bool, device=hidden.device)
    while len(hidden):
        log_confidence, predicted = predict(hidden)
        confidence = scatter_flat(unknown, hidden, log_confidence)  # [R, L], -inf where nothing is masked
        best = confidence.argsort(dim=1, descending=True, stable=True)[:, :count]  # [R, k]
        chosen = nowhere.scatter(1, best, True)
        if by_probability:
            chosen = chosen | (confidence.exp() >= tokens_per_step)
        # A row with fewer than k masks also chose places that are not masked. They are in no [M], so they drop out.
        chosen = chosen.take(hidden)  # bool [M]
        if by_probability:
            number = int(chosen.sum())
        else:
            # The host knows n without asking the device.
            number = int(np.minimum(left, count).sum())
            left = np.maximum(left - count, 0)
        which, rest = partition_indices(chosen, number)
        yield Revealed(hidden, predicted, which, hidden.index_select(0, which))
        hidden = hidden.index_select(0, rest)
