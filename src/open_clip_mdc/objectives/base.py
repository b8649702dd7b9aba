"""`CaptionCfg`, the part of a model config that chooses an objective, and the random numbers of times and masks.

Dimensions: B captions or images of one process, P patches.
"""
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .registry import OBJECTIVES

GOLDEN_RATIO = (5 ** 0.5 - 1) / 2


def stratified_uniform(batch_size: int, u0: float, rank: int = 0, world_size: int = 1) -> Tensor:
    """Return stratified uniform numbers, float64 [B] in (0, 1]: one in each of the global batch's equal strata.

    The strata of each rank alone cover the interval, too. Give all ranks the same random number `u0` in [0, 1).
    """
    stratum = torch.arange(batch_size, dtype=torch.float64) * world_size + rank
    return (stratum + (1 - u0)) / (batch_size * world_size)


def golden_ratio_points(first: int, batch_size: int) -> Tensor:
    """Return fixed numbers, float64 [B], that cover (0, 1] evenly, for samples `first`, `first` + 1, ..."""
    # Consecutive multiples of the golden ratio modulo 1 are evenly spread, however the data set is batched.
    index = torch.arange(first, first + batch_size, dtype=torch.float64)
    return 1 - (0.5 + index * GOLDEN_RATIO) % 1


def mask_condition(shape: tuple[int, int], drop: float, rate: float, generator: torch.Generator | None = None,
                   device: torch.device | str = "cpu") -> Tensor:
    """Draw which image features are masked, bool [B, P], True where masked (MC-Diffusion, Algorithm 1).

    Each image is chosen with probability `drop`, and each feature of a chosen image is masked with probability `rate`.
    """
    def draw(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    return (draw(shape[0], 1) < drop) & (draw(*shape) < rate)


@dataclass
class CaptionCfg:
    """A model config's `caption_cfg`. BERT has t_min == t_max, parallel decoding has 1 for both."""

    objective: str = "mdc"  # a key of OBJECTIVES
    t_min: float = 0.5
    t_max: float = 1.0
    loss_weight: str = "inverse_t"  # "inverse_t" | "none"
    regions: int = 1  # g > 1 encodes g x g tiles, too (regions.py)
    length_head: bool = True  # also learn p(N | image). A causal model has none, as it predicts EOT
    time_embedding: bool = False  # condition the decoder on the step (diffusion in steps only)
    aux_weight: float = 0.0  # weight of the auxiliary loss -log p(x_0 | x_t) (diffusion in steps only)
    condition_drop: float = 0.0  # share of training images with masked features (MC-Diffusion's P_cond)
    condition_mask: float = 0.0  # share of their features that are masked (P_mask). 1 trains classifier-free guidance
    condition_zeros: bool = False  # replace masked features by zeros, not by a learnt vector
    contrastive_weight: float = 0.0  # weight of CLIP's contrastive loss (contrastive.py). 0 builds no text tower

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise ValueError(f"caption_cfg.objective is {self.objective!r}: it must be one of {', '.join(OBJECTIVES)}")
        if self.loss_weight not in ("inverse_t", "none"):
            raise ValueError(f"caption_cfg.loss_weight is {self.loss_weight!r}: it must be 'inverse_t' or 'none'")
        if not (0 <= self.t_min <= self.t_max <= 1 and self.t_max > 0):
            raise ValueError(f"caption_cfg needs 0 <= t_min <= t_max <= 1, t_max > 0; not {self.t_min}, {self.t_max}")
        if self.aux_weight < 0:
            raise ValueError(f"caption_cfg.aux_weight is {self.aux_weight}: it must be 0 or more")
        if (self.time_embedding or self.aux_weight) and OBJECTIVES[self.objective].schedule is None:
            raise ValueError("caption_cfg.time_embedding and aux_weight are for diffusion in steps, not for "
                             f"{self.objective!r}")
        rates = (self.condition_drop, self.condition_mask)
        if not all(0 <= rate <= 1 for rate in rates) or any(rates) != all(rates) \
                or self.condition_zeros and not any(rates):
            raise ValueError("caption_cfg needs condition_drop and condition_mask of 0 to 1, both or neither of them "
                             f"0, and condition_zeros only with them; not {rates}, {self.condition_zeros}")

        if not 0 <= self.contrastive_weight < math.inf or self.contrastive_weight and self.condition_drop:
            raise ValueError("caption_cfg.contrastive_weight should be 0 or more and finite, and 0 with "
                             f"condition_drop, which hides the image; not {self.contrastive_weight}")

    @property
    def default_uncond(self) -> str:
        """Return the default unconditional branch of guidance, the one that the model was trained with."""
        return "masked" if self.condition_drop else "blind"
