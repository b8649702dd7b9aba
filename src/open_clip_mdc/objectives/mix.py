"""Mix: one decoder learns to read a caption from left to right and to unmask it, as CapPa's decoder learns two ways.

    loss = share * (the negative of Eq. 7) + (1 - share) * (Eq. 5)

Tschannen et al. (2023) mix parallel prediction with autoregressive captions. Here MDC's masks take its place.

Dimensions: B captions, L positions, V vocabulary.
"""
import torch
from torch import Tensor

from ..text.packing import NoisedCaptions
from .autoregressive import autoregressive
from .config import CaptionCfg
from .masked import masked_diffusion, whole_interval
from .registry import register_objective


@register_objective("mix", corrupt_full_interval=whole_interval,
                    scorers=("heuristic", "monte_carlo", "parallel", "autoregressive"))
def mixed(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
          generator: torch.Generator | None = None) -> NoisedCaptions:
    """Return a row of ARC for captions [B, L] with u up to `autoregressive_share`, and a row of MDC for all others."""
    share = cfg.autoregressive_share
    # u is stratified, so each batch has the share to within one caption: [B].
    causal = u <= share
    # The interval above the share is stretched to (0, 1], so that the times of MDC's rows are stratified, too.
    rest = ((u - share) / (1 - share)).where(~causal, 1)
    masked = masked_diffusion(text, vocab_size, cfg, rest, generator)
    read = autoregressive(text, vocab_size, cfg, u)
    causal = causal.to(text.device)
    # [B, L] each.
    noisy, loss_mask, weight = (torch.where(causal[:, None], *pair) for pair in zip(read[:3], masked[:3], strict=True))
    return NoisedCaptions(noisy, loss_mask, weight, masked.target, causal, torch.where(causal, read.t, masked.t))
