"""Block diffusion (Arriola et al. 2025, BD3-LM), between ARC and MDC: blocks in reading order, masks within a block.

    log p(x) = sum over blocks b of log p(x^b | x^<b, image), and each term has the bound of Eq. 5 within its block.

A row has two streams. The noisy one is the caption with masks. The clean one is its copy at the same positions, which
later blocks read. Blocks of one token are the factorisation of Eq. 7, and one block that holds the caption is MDC.

Dimensions: B captions, L positions, W tokens of both streams.
"""
import torch
from torch import Tensor

from ..text.packing import NoisedCaptions, Sight
from ..text.special_tokens import caption_lengths, eot_id, mask_id
from .config import CaptionCfg
from .masked import loss_weight, sample_t
from .registry import register_objective
from .times import GOLDEN_RATIO


def filled(text: Tensor, size: Tensor | int, vocab_size: int, context_length: int) -> tuple[Tensor, Tensor]:
    """Return captions [B, L] filled with EOT, and their numbers of tokens [B] up to the end of the last block.

    A block is of `size` [B] tokens. SOT belongs to the first one. The last one may be cut by the context.
    """
    lengths = caption_lengths(text, vocab_size)
    position = torch.arange(text.shape[1], device=text.device)
    # Up to the next multiple of the size, so that a decoder learns to end a caption anywhere in a block.
    count = (-(-lengths // size) * size).clamp(max=context_length)
    return text.masked_fill(position >= lengths[:, None], eot_id(vocab_size)), count


def two_streams(text: Tensor, size: Tensor, vocab_size: int, context_length: int
                ) -> tuple[Tensor, Tensor, Tensor, Sight]:
    """Return the rows of captions [B, L] in blocks of `size` [B] tokens, on the CPU. The noisy stream comes first.

    Returns clean ids, long [B, W], their positions in the caption, long [B, W], which of them are valid, bool [B, W],
    and the `Sight`.
    """
    text, count = filled(text, size, vocab_size, context_length)
    # No block reads the last one, so it has no clean copy: [B].
    clean = (count - 1) // size * size
    place = torch.arange(int((count + clean).max()), device=text.device)
    noisy = place < count[:, None]
    position = torch.where(noisy, place, place - count[:, None]).clamp(max=text.shape[1] - 1)
    return (text.gather(1, position), position, place < (count + clean)[:, None],
            Sight(position // size[:, None], noisy))


@register_objective("block-diffusion", order="blocks", scorers=("heuristic", "monte_carlo"))
def block_diffusion(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
                    generator: torch.Generator | None = None) -> NoisedCaptions:
    """Mask the tokens of each block with a probability t of its own, and weight them by 1/t (Eq. 5 within a block)."""
    noise = torch.rand(text.shape, generator=generator)  # as for MDC, one number for each position
    sizes = torch.tensor(cfg.block_sizes)
    # A mixture of sizes: each caption draws its own.
    size = sizes[torch.randint(len(sizes), (len(text),), generator=generator)] if len(sizes) > 1 \
        else sizes.expand(len(text))
    # A tokenizer's L is the context. [B, W] each.
    text, position, valid, sight = two_streams(text, size, vocab_size, text.shape[1])
    # Steps of the golden ratio spread the times of a caption's blocks over (0, 1]. Each alone is as uniform as u.
    u = 1 - ((1 - u[:, None]) + sight.block * GOLDEN_RATIO) % 1
    t = sample_t(u, cfg.t_min, cfg.t_max)  # [B, W]
    target = sight.noisy & valid & (position > 0)  # SOT is given
    masked = target & (noise.gather(1, position) < t)
    weight = torch.where(masked, loss_weight(t, cfg.loss_weight), 0)
    return NoisedCaptions(text.masked_fill(masked, mask_id(vocab_size)), masked, weight, target, False, t[:, 0],
                          text, position, valid, sight)
