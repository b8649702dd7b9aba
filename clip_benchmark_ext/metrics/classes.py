"""Metrics of single classes: the share of their images that is right, or with several per image average precision.

Dimensions: N images, K classes.
"""
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

UNSURE = -1  # target of a class that does not count for an image
POINTS = 10  # recalls 0, 0.1, ..., 1
Names = Sequence[str] | None  # of the classes, if they are known


def named(number: int, names: Names) -> str:
    return names[number] if names and number < len(names) else str(number)


def by_class(targets: Tensor, predicted: Mapping[str, Tensor], names: Names) -> list[dict]:
    """Return for each class its name, number of images, and the share that is right by each way to predict.

    `targets` and what was `predicted` are class ids, [N].
    """
    rows = []
    for number in targets.unique().tolist():
        own = targets == number
        rows.append({"class": named(number, names), "images": int(own.sum()), **{
            way: found[own].eq(number).double().mean().item() for way, found in predicted.items()}})
    return rows


def at_11_points(scores: Tensor, targets: Tensor) -> float:
    """Return the average precision of VOC2007: the mean over 11 recalls of the best precision from there on.

    The Pascal Visual Object Classes Challenge, IJCV 2010, Sec. 4.2. `scores` are [N], and `targets` bool [N] with at
    least one that is True.
    """
    hits = targets[scores.argsort(descending=True, stable=True)].long().cumsum(0)
    precision = hits / torch.arange(1, len(hits) + 1)
    # Whole numbers, as the recall 3 / 10 is less than the float 0.1 * 3.
    return fmean(precision[POINTS * hits >= point * hits[-1]].max().item() for point in range(POINTS + 1))


def average_precisions(scores: Tensor, targets: Tensor, names: Names = None) -> list[dict]:
    """Return for each class that has images its name, their number, and `ap_11_points`.

    `scores` are [N, K], and `targets` [N, K] of 1, 0 or UNSURE.
    """
    rows = []
    for number, target in enumerate(targets.T):
        counts = target != UNSURE
        if (there := target[counts] == 1).any():
            rows.append({"class": named(number, names), "images": int(there.sum()),
                         "ap_11_points": at_11_points(scores[counts, number], there)})
    return rows


def map_11_points(scores: Tensor, targets: Tensor) -> float:
    """Return the mean over classes of `average_precisions`. Raises ValueError if no image has a class."""
    rows = average_precisions(scores, targets)
    if not rows:
        raise ValueError("no image has a class, so that there is no average precision")
    return fmean(row["ap_11_points"] for row in rows)
