"""Rules for the number of tokens of a caption, by p(N | image) of the length head. rules.LENGTHS names them.

Dimensions: B images, R captions (R/B consecutive rows per image), S lengths, K lengths that are tried, L positions.
"""
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..models.captioner import Captioner
from .options import Sampling, Unmasking
from .sampling import Decoded, sample_tokens

LENGTH = 15  # default number of tokens for a model without a length head, one of the paper's lengths
MAX_LENGTHS = 8  # most lengths per image that are tried
LIKELY = 0.1  # a length is likely if it has at least this share of the most probable length's probability
LENGTH_NORM = 5  # tokens that a caption counts as in `best_length`. The best of 1 to 10 on Flickr8k's val split
LOGITS = 2 ** 28  # numbers in the first step's logits of all lengths that are decoded together: 1 GiB in float32


def default_length(model: Captioner) -> int | str:
    """Return "auto" for a model that knows the lengths of captions, else LENGTH."""
    # A length head of zeros was never trained, as older checkpoints have none.
    learnt = model.length_head is not None and model.length_head.weight.any()
    return "auto" if model.objective.order != "any" or learnt else LENGTH


def best_length(model: Captioner, decode: Callable[..., Decoded], log_prob: Tensor, options: Unmasking) -> Decoded:
    """Return each caption's best length N, by log p(N | image) + LENGTH_NORM * mean token log-probability.

    The second term is comparable over N, unlike the plain sum. It is at most 0, so that a length without rivals, as of
    captions that are all alike, is the only one that is decoded. Else the others follow as rows of one batch, as far as
    memory allows.

    Args:
        decode: takes lengths, long [R * k] on the CPU, -1 for none, and the most tokens. Returns captions [R * k, L].
        log_prob: log p(N | image), [B, S].
    """
    # [R, K] each.
    prior, lengths = log_prob.repeat_interleave(options.samples, 0).topk(min(MAX_LENGTHS, log_prob.shape[1]))
    on_cpu, longest = lengths.cpu(), log_prob.shape[1] - 1
    first = decode(on_cpu[:, 0], longest)
    # [R], what the others have to beat with their priors.
    value = prior[:, 0] + LENGTH_NORM * first.log_prob.sum(1) / lengths[:, 0]
    can_win = (prior[:, 1:] > value[:, None]).cpu()
    # [R, K - 1], or none.
    others = on_cpu[:, 1:].where(can_win, -1)[:, :(lengths.shape[1] - 1) * bool(can_win.any())]
    # Draws must not depend on how many lengths fit.
    at_once = 1 if options.draws else max(1, LOGITS // (len(on_cpu) * int(on_cpu.max()) * model.vocab_size))
    found = [first, *(decode(some.flatten(), longest) for some in others.split(at_once, 1) if some.numel())]
    # [R, K or 1, L] each.
    text, step, log_probs = (torch.cat([part.view(len(on_cpu), -1, longest + 2) for part in parts], 1)
                             for parts in zip(*found, strict=True))
    # [R, K or 1]. What was not decoded has its prior, with which it cannot win.
    tried = lengths[:, :text.shape[1]].clamp_min(1)
    value = prior[:, :text.shape[1]] + LENGTH_NORM * log_probs.sum(2) / tried
    rows, best = torch.arange(len(value), device=value.device), value.argmax(1)
    return Decoded(text[rows, best], step[rows, best], log_probs[rows, best])


def drawn_length(model: Captioner, decode: Callable[..., Decoded], log_prob: Tensor, options: Unmasking) -> Decoded:
    """Return captions whose lengths are drawn from p(N | image)."""
    rows = log_prob.repeat_interleave(options.samples, 0)
    return decode(sample_tokens(rows, Sampling(1.0, generator=options.sampling.generator)).cpu())


def top_lengths(model: Captioner, decode: Callable[..., Decoded], log_prob: Tensor, options: Unmasking) -> Decoded:
    """Return captions of an image that have its likely lengths in turn, at least LIKELY as probable as the first."""
    value, found = log_prob.topk(min(MAX_LENGTHS, log_prob.shape[1]))
    # [B, 1], how many are likely.
    count = (value >= value[:, :1] + math.log(LIKELY)).sum(1, keepdim=True)
    return decode(found.gather(1, torch.arange(options.samples, device=count.device) % count).flatten().cpu())
