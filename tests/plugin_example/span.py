"""An objective from outside the package: it hides one run of consecutive tokens, where MDC hides single ones."""
import torch

from open_clip_mdc.objectives import register_objective
from open_clip_mdc.objectives.masked import sample_t, whole_interval
from open_clip_mdc.text.packing import NoisedCaptions
from open_clip_mdc.text.special_tokens import mask_id, target_tokens


@register_objective("span", corrupt_full_interval=whole_interval)
def span(text, vocab_size, cfg, u, generator=None):
    """Hide ceil(t * N) of a caption's N tokens, from a random place on. Each hidden token weighs N / hidden.

    The run wraps around at the caption's end, so that every token is hidden equally often.
    """
    target = target_tokens(text, vocab_size)
    number = target.sum(1)
    hidden = (sample_t(u, cfg.t_min, cfg.t_max).to(text.device) * number).ceil().clamp(min=1)
    first = 1 + (torch.rand(len(text), generator=generator) * number).floor()
    after = torch.arange(text.shape[1]) - first[:, None]  # [B, L], places behind the first hidden one
    masked = target & (after % number[:, None] < hidden[:, None])
    weight = masked * (number / hidden)[:, None]
    return NoisedCaptions(text.masked_fill(masked, mask_id(vocab_size)), masked, weight, target, False, hidden / number)
