"""Two views of each caption, as in LaViDa (arXiv 2505.16839), as objectives. Not in the paper.

    complementary  One view masks what the other shows, so every token is learnt.
    two-views      The control: the same two rates, but independent masks.

Dimensions: B captions of one process, L positions.
"""
from functools import partial

import torch
from torch import Tensor

from ..objectives.config import CaptionCfg
from ..objectives.masked import forward_process, loss_weight, sample_t, whole_interval
from ..objectives.registry import register_objective
from ..text.packing import NoisedCaptions
from ..text.special_tokens import mask_id, target_tokens


def two_views(complementary: bool, text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
              generator: torch.Generator | None = None) -> NoisedCaptions:
    """Mask a caption at rates t and 1 - t. Rows 2b and 2b + 1 are of image b, weighted as in Algorithm 1.

    The second view masks exactly what the first shows if `complementary`, otherwise its mask is independent. Each view
    is unbiased for its own t.
    """
    target = target_tokens(text, vocab_size)
    t = sample_t(u, cfg.t_min, cfg.t_max).to(text.device)
    first = forward_process(text, target, t, vocab_size, generator)[1]
    second = target & ~first if complementary else forward_process(text, target, 1 - t, vocab_size, generator)[1]
    t, masked = torch.stack((t, 1 - t), 1).flatten(), torch.stack((first, second), 1).flatten(0, 1)  # [2B], [2B, L]
    text, target = text.repeat_interleave(2, 0), target.repeat_interleave(2, 0)
    weight = torch.where(masked, loss_weight(t, cfg.loss_weight)[:, None], 0)
    return NoisedCaptions(text.masked_fill(masked, mask_id(vocab_size)), masked, weight, target, False, t)


register_objective("complementary", corrupt_full_interval=whole_interval)(partial(two_views, True))
register_objective("two-views", corrupt_full_interval=whole_interval)(partial(two_views, False))
