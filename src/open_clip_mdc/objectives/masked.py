"""Masked diffusion: a token is masked with probability t, and its loss is weighted by 1/t (Eqs. 4, 5, Algorithm 1).

Dimensions: B captions of one process, L positions, V vocabulary.
"""
import torch
from torch import Tensor

from ..text.packing import NoisedCaptions
from ..text.special_tokens import mask_id, target_tokens
from .config import CaptionCfg
from .registry import register_objective


def alpha(t: Tensor) -> Tensor:
    """Return the probability that a token is still visible at time t, by the linear schedule (Sec. 3.2)."""
    return 1 - t


def loss_weight(t: Tensor, kind: str = "inverse_t") -> Tensor:
    """Return a masked token's weight: -alpha'_t / (1 - alpha_t) = 1/t (Eqs. 4, 5), or 1 for "none" (Table 4)."""
    return 1 / (1 - alpha(t)) if kind == "inverse_t" else torch.ones_like(t)


def sample_t(u: Tensor, t_min: float, t_max: float) -> Tensor:
    """Return times, float32 [B] in (t_min, t_max]. t = 0 is left out, as it has an infinite weight and no mask."""
    return (t_min + (t_max - t_min) * u).float()


def forward_process(text: Tensor, maskable: Tensor, t: Tensor, vocab_size: int,
                    generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Mask each maskable token with probability 1 - alpha_t: q(x_t | x_0) (Eq. 2 with r = 0, Algorithm 1).

    Returns the noisy text, long [B, L], and a bool [B, L] that is True where a token is masked.
    """
    u = torch.rand(text.shape, device=text.device, generator=generator)
    # [B, L] against [B, 1]: one time for all tokens of a caption.
    masked = maskable & (u < (1 - alpha(t))[:, None])
    return text.masked_fill(masked, mask_id(vocab_size)), masked


def whole_interval(text: Tensor, vocab_size: int, u: Tensor,
                   generator: torch.Generator | None = None) -> NoisedCaptions:
    """Noise with t in (0, 1] and weight 1/t (Eq. 5). The loss is then an unbiased estimate of the NELBO."""
    return masked_diffusion(text, vocab_size, CaptionCfg(t_min=0.0, t_max=1.0), u, generator)


@register_objective("mdc", corrupt_full_interval=whole_interval)
def masked_diffusion(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
                     generator: torch.Generator | None = None, target: Tensor | None = None) -> NoisedCaptions:
    """Mask tokens with probability t, and weight the masked ones by 1/t (Algorithm 1). `target` [B, L] may be."""
    # SOT is given and padding is nothing, so neither is masked.
    target = target_tokens(text, vocab_size) if target is None else target
    t = sample_t(u, cfg.t_min, cfg.t_max).to(text.device)
    noisy, masked = forward_process(text, target, t, vocab_size, generator)
    # torch.where, not a product: for tiny t the weight is infinite in float32, and 0 * inf is NaN.
    weight = torch.where(masked, loss_weight(t, cfg.loss_weight)[:, None], 0)
    return NoisedCaptions(noisy, masked, weight, target, False, t)
