"""Other orders of reading, by one rule of who sees whom (`packing.sees`).

    bicap   VirTex (Desai & Johnson 2021): each caption once from left to right and once from right to left.
    prefix  SimVLM (Wang et al. 2022): a drawn prefix is seen whole, and the rest is read from left to right.

Both caption from left to right, as ARC does. VirTex has a decoder for each direction, here one serves both: a row that
holds SOT first is read to the right, one that holds EOT first to the left.

Dimensions: B captions, L positions.
"""
import torch
from torch import Tensor

from ..text.packing import NoisedCaptions, Sight
from ..text.special_tokens import caption_lengths, target_tokens
from .autoregressive import autoregressive_targets
from .config import CaptionCfg
from .registry import register_objective


@register_objective("bicap", corrupt_full_interval=autoregressive_targets, order="causal", scorers=("autoregressive",))
def both_directions(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
                    generator: torch.Generator | None = None) -> NoisedCaptions:
    """Return two rows a caption: each token asked for the next one, then each asked for the one before it."""
    target = target_tokens(text, vocab_size)
    position = torch.arange(text.shape[1], device=text.device).expand_as(text)
    from_end = (caption_lengths(text, vocab_size)[:, None] - 1 - position).clamp(min=0)
    # All but the last token are asked for the next one. All but the first are asked for the one before.
    rightwards = target.roll(-1, 1)
    rows = [torch.stack(pair, 1).flatten(0, 1) for pair in (
        (text, text), (rightwards, target), (text.roll(-1, 1), text.roll(1, 1)), (position, from_end))]
    text, asked, tokens, block = rows  # [2B, L] each
    # Clean blocks of one token: those of a smaller number are seen.
    return NoisedCaptions(text, asked, asked.float(), asked, False, torch.zeros(len(text), device=text.device), tokens,
                          sight=Sight(block, torch.zeros_like(asked)))


@register_objective("prefix", corrupt_full_interval=autoregressive_targets, order="causal", scorers=("autoregressive",))
def prefix(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
           generator: torch.Generator | None = None) -> NoisedCaptions:
    """Return targets for predicting what follows a prefix of 0 to N - 1 of N tokens, drawn by u."""
    target = target_tokens(text, vocab_size)
    position = torch.arange(text.shape[1], device=text.device)
    last = ((1 - u.to(text.device)) * target.sum(1)).floor().long()[:, None]  # [B, 1], the prefix's last place
    asked = target.roll(-1, 1) & (position >= last)
    # The prefix is one block, and each token after it another.
    return NoisedCaptions(text, asked, asked.float(), asked, False, torch.zeros(len(text), device=text.device),
                          text.roll(-1, 1), sight=Sight((position - last).clamp(min=0), torch.zeros_like(asked)))
