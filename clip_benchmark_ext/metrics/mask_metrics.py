"""Compute the metrics of masks from one confusion matrix over a whole split.

Dimensions: C classes, G groups of images.
"""
import math

import torch
from torch import Tensor


def confusion(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix long [C, C], with target classes as rows and predicted ones as columns.

    Void pixels are left out.
    """
    counts = target < classes
    return torch.bincount(target[counts].long() * classes + predicted[counts].long(), minlength=classes ** 2).view(
        classes, classes)


def class_iou(matrix: Tensor) -> Tensor:
    """Return the intersection over union of each class, double [C], NaN for a class that never occurs."""
    hits = matrix.diagonal().double()
    return hits / (matrix.sum(0) + matrix.sum(1) - hits)


def measures(matrix: Tensor) -> dict[str, float]:
    return {"miou": class_iou(matrix).nanmean().item(), "pixel_acc": (matrix.diagonal().sum() / matrix.sum()).item()}


def with_errors(groups: Tensor) -> dict[str, float | str]:
    """Return mIoU and pixel accuracy of all images, with standard errors by a jackknife over groups of images.

    Groups are of images because the pixels of an image are not independent. An error that one group alone decides is
    left out, with its reason.

    Args:
        groups: the confusion matrices of the groups, [G, C, C].
    """
    total = groups.sum(0)
    found, parts = measures(total), [measures(total - group) for group in groups]
    for name in list(found):
        values = torch.tensor([part[name] for part in parts], dtype=torch.float64)
        error = (values - values.mean()).square().sum().item() * (len(parts) - 1) / len(parts)
        if len(parts) > 1 and math.isfinite(error):
            found[f"{name}_se"] = math.sqrt(error)
        else:
            found[f"{name}_se_missing"] = "fewer than two images have pixels of a class"
    return found
