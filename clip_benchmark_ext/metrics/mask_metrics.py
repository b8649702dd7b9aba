"""Measures of masks from one confusion matrix over a whole split. Dimensions: C classes, G groups of images."""
import math

import torch
from torch import Tensor


def confusion(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """Return how many pixels of a class (row) are taken for another (column), long [C, C], void pixels left out."""
    counts = target < classes
    return torch.bincount(target[counts].long() * classes + predicted[counts].long(), minlength=classes ** 2).view(
        classes, classes)


def class_iou(matrix: Tensor) -> Tensor:
    """Return the intersection over union of each class, double [C], NaN of one that neither side has."""
    hits = matrix.diagonal().double()
    return hits / (matrix.sum(0) + matrix.sum(1) - hits)


def measures(matrix: Tensor) -> dict[str, float]:
    return {"miou": class_iou(matrix).nanmean().item(),
            "pixel_acc": (matrix.diagonal().sum() / matrix.sum()).item()}


def with_errors(groups: Tensor) -> dict[str, float]:
    """Return mIoU and pixel accuracy of all images, with standard errors by a jackknife over groups of images.

    Args:
        groups: the confusion matrices of the groups, [G, C, C]. Pixels of an image are no independent draws.
    """
    total = groups.sum(0)
    found, parts = measures(total), [measures(total - group) for group in groups]
    for name in list(found):
        values = torch.tensor([part[name] for part in parts], dtype=torch.float64)
        error = (values - values.mean()).square().sum().item() * (len(parts) - 1) / len(parts)
        found[f"{name}_se"] = math.sqrt(error)
    return found
