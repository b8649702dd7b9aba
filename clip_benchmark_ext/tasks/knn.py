"""k-nearest-neighbour classification by the protocol of DINOv2 (arXiv 2304.07193, from Wu et al., arXiv 1805.01978).

Each of the k nearest training images by cosine votes for its class with weight exp(cosine / temperature). Nothing is
trained or tuned.

Dimensions: N images, D width, C classes.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

KS = (10, 20, 100, 200)  # numbers of neighbours. Those above the number of training images are left out
TEMPERATURE = 0.07
COSINES = 2 ** 27  # at once, 512 MB, which bounds the test images of a chunk


def knn_votes(train: Tensor, labels: Tensor, test: Tensor, classes: int) -> dict[str, Tensor]:
    """Return the votes of the test images, float [N, C], by name ("knn10", ...).

    Args:
        train: training features, [number of training images, D].
        labels: their class ids.
        test: test features, [N, D].
    """
    ks = tuple(k for k in KS if k <= len(train))
    if not ks:
        return {}
    chunk = max(1, min(1024, COSINES // len(train)))
    train, parts = F.normalize(train.float(), dim=-1), {k: [] for k in ks}
    for features in F.normalize(test.float(), dim=-1).split(chunk):
        cosine, nearest = (features @ train.T).topk(max(ks), dim=1)
        weights = (cosine / TEMPERATURE).exp()
        for k in ks:
            votes = torch.zeros(len(features), classes, device=features.device)
            parts[k].append(votes.scatter_add_(1, labels[nearest[:, :k]], weights[:, :k]).cpu())
    return {f"knn{k}": torch.cat(votes) for k, votes in parts.items()}
