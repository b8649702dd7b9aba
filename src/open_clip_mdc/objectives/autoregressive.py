"""Left to right: ARC (the negative of Eq. 7) and CapPa's mix with parallel prediction.

Dimensions: B captions, L positions, V vocabulary.
"""
import torch
from torch import Tensor

from ..text.packing import NoisedCaptions
from ..text.special_tokens import mask_id, target_tokens
from .config import CaptionCfg
from .registry import register_objective

CAPPA_AUTOREGRESSIVE_FRACTION = 0.25


def autoregressive(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
                   generator: torch.Generator | None = None) -> NoisedCaptions:
    """Return targets for predicting every token from those before it: the negative of Eq. 7."""
    # Every token but SOT is predicted, from clean tokens before it. No token is masked, so t is 0.
    target = target_tokens(text, vocab_size)
    return NoisedCaptions(text, target, target.float(), target, True, torch.zeros(len(text), device=text.device))


def autoregressive_targets(text: Tensor, vocab_size: int, u: Tensor,
                           generator: torch.Generator | None = None) -> NoisedCaptions:
    """Return the same targets for the NELBO. A causal model has no noise, so its NELBO is its NLL (Eq. 7)."""
    return autoregressive(text, vocab_size, CaptionCfg(), u)


def captioning_with_parallel(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
                             generator: torch.Generator | None = None) -> NoisedCaptions:
    """Mix as CapPa does: captions with a small u are read from left to right, and all others are fully masked."""
    target = target_tokens(text, vocab_size)
    # u is stratified, so each batch has the share to within one caption.
    causal = u.to(text.device, torch.float32) <= CAPPA_AUTOREGRESSIVE_FRACTION
    noisy = text.masked_fill(target & ~causal[:, None], mask_id(vocab_size))
    return NoisedCaptions(noisy, target, target.float(), target, causal, (~causal).float())


for name, corrupt in {"arc": autoregressive, "cappa": captioning_with_parallel}.items():
    register_objective(name, corrupt_full_interval=autoregressive_targets, order="causal",
                       scorers=("autoregressive",))(corrupt)
