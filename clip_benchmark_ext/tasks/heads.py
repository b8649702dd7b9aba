"""Small networks on frozen patch tokens, their training and the choice of their learning rate.

Dimensions: B images, P patches, D width, H heads, C classes.
"""
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from open_clip_mdc.progress import progress_bar

from .splits import Splits

HEAD_WIDTH = 64
Loss = Callable[[nn.Module, Tensor], Tensor]  # the mean loss of a head on images, given by their row numbers


class AttentiveProbe(nn.Module):
    """Attentive probe: one learned query attends to the patch tokens, and a linear layer classifies the result.

    Multi-head attention of a single query, like the attentive probe of AIM (arXiv 2401.08541) and AIMv2 (2411.14402),
    and CapPa's MAP head (2306.07915) without its MLP. Tokens are standardised over the training set, where AIM has a
    BatchNorm without parameters. Keys and values of tokens are never computed. With one query it is equivalent, and P
    times cheaper, to apply the key weights to the query and the value weights to the means.
    """

    def __init__(self, mean: Tensor, std: Tensor, classes: int):
        """Create a probe from mean and standard deviation of the tokens, [D] each."""
        super().__init__()
        width = len(mean)
        self.heads = next(n for n in range(max(width // HEAD_WIDTH, 1), 0, -1) if width % n == 0)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.query = nn.Parameter(0.02 * torch.randn(width))
        self.key, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.classifier = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, C] of tokens [B, P, D]."""
        query, key, value = (x.unflatten(0, (self.heads, -1)) for x in (self.query, self.key.weight, self.value.weight))
        # The mean would add the same constant to all logits of a head, which its softmax ignores.
        direction = torch.einsum("hd,hdw->hw", query, key) / (query.shape[1] ** 0.5 * self.std)
        attention = (tokens @ direction.T).softmax(1)  # [B, P, H]
        seen = (attention.mT @ tokens - self.mean) / self.std  # [B, H, D]
        return self.classifier(torch.einsum("bhw,hdw->bhd", seen, value).flatten(1))


class LinearMask(nn.Module):
    """Linear layer on standardised patch tokens, which lie in a grid."""

    def __init__(self, mean: Tensor, std: Tensor, classes: int, grid: tuple[int, int]):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.linear, self.grid = nn.Linear(len(mean), classes), grid

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, C, rows, columns] of tokens [B, P, D]."""
        return self.linear((tokens - self.mean) / self.std).mT.unflatten(2, self.grid)


def moments(batches: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation, [D] each, of tokens in batches [B, P, D]."""
    count, total, squares = 0, 0, 0
    for tokens in batches:
        tokens = tokens.flatten(0, 1).double()
        count, total, squares = count + len(tokens), total + tokens.sum(0), squares + tokens.square().sum(0)
    mean = total / count
    return mean.float(), (squares / count - mean.square()).clamp_min(1e-6).sqrt().float()


def fit(make: Callable[[], nn.Module], splits: Splits, loss_of: Loss,
        quality: Callable[[nn.Module], float], rates: Sequence[float], seed: int, **options) -> tuple[float, nn.Module]:
    """Return the best learning rate on held-out images, and a head trained with it on all training images.

    Args:
        make: creates a head.
        quality: measures a head on `splits.val`.
        options: arguments of `train`.
    """
    def fitted(lr: float, rows: Tensor) -> nn.Module:
        torch.manual_seed(seed)
        return train(make(), rows, loss_of, lr, seed=seed, **options)

    lr = max(rates, key=lambda lr: quality(fitted(lr, splits.train)))
    return lr, fitted(lr, torch.cat((splits.train, splits.val)))


def train(head: nn.Module, rows: Tensor, loss_of: Loss, lr: float,
          weight_decay: float, epochs: int, batch_size: int, seed: int, desc: str) -> nn.Module:
    """Train a head on the images `rows` by AdamW, with a warm-up over a twentieth of the steps and a cosine to 0."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=weight_decay)
    steps = epochs * -(-len(rows) // batch_size)
    batches = (batch for _ in range(epochs)
               for batch in rows[torch.randperm(len(rows), generator=generator)].split(batch_size))
    for step, batch in enumerate(progress_bar(batches, f"{desc}, learning rate {lr:g}", "step", total=steps,
                                              leave=False)):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / (steps / 20), 1) * (
            1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad()
        loss_of(head, batch).backward()
        optimizer.step()
    return head
