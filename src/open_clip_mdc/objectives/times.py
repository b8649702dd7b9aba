"""Random numbers of the forward process: times t, and which image features are masked.

Dimensions: B captions or images of one process, P patches.
"""
import torch
import torch.distributed as dist
from torch import Tensor
from torch.types import Device

GOLDEN_RATIO = (5 ** 0.5 - 1) / 2


def ranks() -> tuple[int, int]:
    """Return this process's rank and the number of processes that train together."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def stratified_uniform(batch_size: int, u0: float, rank: int = 0, world_size: int = 1) -> Tensor:
    """Return stratified uniform numbers, float64 [B] in (0, 1]: one in each of the global batch's equal strata.

    The strata of each rank alone cover the interval, too. Give all ranks the same random number `u0` in [0, 1).
    """
    # Ranks take strata in turn: rank r has r, r + world_size, ...
    stratum = torch.arange(batch_size, dtype=torch.float64) * world_size + rank
    return (stratum + (1 - u0)) / (batch_size * world_size)


def golden_ratio_points(first: int, batch_size: int) -> Tensor:
    """Return fixed numbers, float64 [B], that cover (0, 1] evenly, for samples `first`, `first` + 1, ..."""
    # Consecutive multiples of the golden ratio modulo 1 are evenly spread, however the data set is batched.
    index = torch.arange(first, first + batch_size, dtype=torch.float64)
    return 1 - (0.5 + index * GOLDEN_RATIO) % 1


def mask_condition(shape: tuple[int, int], drop: float, rate: float, generator: torch.Generator | None = None,
                   device: Device = "cpu") -> Tensor:
    """Draw which image features are masked, bool [B, P], True where masked (MC-Diffusion, Algorithm 1).

    Each image is chosen with probability `drop`, and each feature of a chosen image is masked with probability `rate`.
    """
    # [B, 1] and [B, P]: a feature is masked if its image was chosen and it was drawn itself.
    chosen, drawn = (torch.rand(size, generator=generator, device=device) for size in ((shape[0], 1), shape))
    return (chosen < drop) & (drawn < rate)
