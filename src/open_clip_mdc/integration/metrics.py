"""Hits among the k largest, with which OpenCLIP's zero-shot accuracy is replaced.
"""
import torch


def count_hits(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """For each k, at most C, the number of rows of output [N, C] whose target [N] is among the k largest."""
    hits = output.topk(max(topk), dim=1).indices == target[:, None]  # [N, max k]
    return [float(hits[:, :k].sum().item()) for k in topk]


def accuracy(upstream):
    """`open_clip_train.zero_shot.accuracy`."""
    return count_hits
