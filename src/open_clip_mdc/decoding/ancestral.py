"""Ancestral sampling of mask-and-replace diffusion: draw x_s from p(x_s | x_t), from t = T down to 0 (MC-Diffusion).

This is the reverse process of VQ-Diffusion (Gu et al. 2022, Eq. 11) in any number of steps. A step from t to s < t
uses the posterior of that interval. top_k and top_p cut p(x_0 | x_t) before the posterior is computed. One uniform
number per token decides when it is unmasked, so it is known beforehand which logits each step needs.

Dimensions: R captions (rows), L positions, M predicted tokens, V vocabulary, T steps of the schedule.
"""
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.types import Device

from ..errors import OptionError
from ..models.captioner import Captioner
from ..models.interface import Network
from ..objectives.replace_process import Schedule, log_posterior, make_schedule
from ..text.packing import of_token, partition_indices, scatter_flat
from ..text.special_tokens import eot_id, mask_id, sot_id, valid_tokens
from .options import GREEDY, Sampling, Unmasking
from .sampling import Decoded, sample_tokens, truncate


def times(steps: int, last: int) -> list[int]:
    """Return `steps` + 1 evenly spaced times from T (`last`) down to 0. Raises OptionError if `steps` exceeds T."""
    if not 1 <= steps <= last:
        raise OptionError(f"{{steps}} is {steps}: it must be a number of steps from 1 to {last}")
    return np.linspace(last, 0, steps + 1).round().astype(int).tolist()


def by_ancestral(model: Captioner, network: Network, text: Tensor, options: Unmasking, guide: object) -> Decoded:
    """Unmask captions [R, L] by draws of the reverse process (`denoise`)."""
    make = model.objective.schedule or make_schedule  # a model of continuous time gets the linear one
    device, forbidden = model.text.output.weight.device, (sot_id(model.vocab_size), eot_id(model.vocab_size))
    return denoise(network, text, valid_tokens(text, model.vocab_size), make(model.vocab_size, device=device),
                   options.steps, forbidden, options.sampling, device)


@torch.no_grad()
def denoise(network: Network, text: Tensor, valid: Tensor, schedule: Schedule, steps: int | None = None,
            forbidden: Sequence[int] = (), sampling: Sampling = GREEDY, device: Device = None) -> Decoded:
    """Fill in every [MASK] by ancestral sampling, with a bidirectional network that is given the step.

    `sampling` applies to p(x_0 | x_t). Masking and replacement are random at any temperature. A replacement can be any
    id, also EOT, so lengths come from `valid`. It is drawn again later. After the last step no mask, no replacement and
    no forbidden id is left.

    Args:
        text: long [R, L], mask_id at the tokens to fill in.
        valid: bool [R, L], False at padding.
        steps: None is the schedule's T.
        forbidden: ids that p(x_0 | x_t) must not choose. The rest is not renormalised.
        device: the network's device, by default the text's.

    Returns the captions. `step` is when a token last changed, and `log_prob` is its log p(x_0 | x_t) at that step.
    """
    size, last, generator = schedule.vocab_size, len(schedule.mask) - 1, sampling.generator
    grid = times(last if steps is None else steps, last)
    text, valid, forbidden, at = (x.to(device or text.device, non_blocking=True) for x in (
        text, valid, torch.tensor(forbidden, dtype=torch.long), torch.tensor(grid)))
    free = text == mask_id(size)
    u = torch.rand(text.shape, dtype=torch.float64, device=text.device, generator=generator)
    # [steps + 1, R, L]. A token is masked at t where u < mask_t. All times are counted at once, as the host waits here.
    masked = free & (u < schedule.mask[at].view(-1, 1, 1))
    counts = torch.cat((valid.sum(1), masked.sum((1, 2)), torch.stack((free.sum(), (free & ~valid).sum())))).tolist()
    lengths, num_masked, (num_free, misplaced) = counts[:len(text)], counts[len(text):-2], counts[-2:]
    if misplaced:
        raise ValueError("a [MASK] stands in the padding, after the caption's end")
    token_logits = network(lengths)
    longest = max(lengths)
    text, padding = text.tensor_split([longest], dim=1)
    free, masked = free[:, :longest], masked[..., :longest]
    if not schedule.absorbing:
        text = torch.where(free & ~masked[0], torch.randint(size, text.shape, device=text.device,
                                                            generator=generator), text)
    since, log_prob, number = torch.full_like(text, -1), torch.zeros(text.shape, device=text.device), 0
    for i, (t, s) in enumerate(zip(grid, grid[1:], strict=False)):
        # Without replacement a token is drawn once. Else all that are visible at s may change.
        drawn, count = (masked[i], num_masked[i]) if schedule.absorbing else (free, num_free)
        places, _ = partition_indices(drawn & ~masked[i + 1], count - num_masked[i + 1])
        if not len(places):
            continue
        now = torch.full((len(text),), t, device=text.device)
        log_p = token_logits(text, places, now).log_softmax(1).index_fill(1, forbidden, -torch.inf)
        # [M], the tokens that stand there, [MASK] or a replacement, and their posterior [M, V + 1].
        old = text.take(places)
        posterior = log_posterior(truncate(log_p, sampling).log_softmax(1).to(log_p.dtype), old, *(
            torch.full_like(places, time) for time in (s, t)), schedule)
        new = sample_tokens(posterior[:, :size], Sampling(1.0, generator=generator))  # not [MASK], as u decided
        changed = (new != old) | (since.take(places) < 0)
        text = scatter_flat(text, places, new)
        since = scatter_flat(since, places, since.take(places).where(~changed, number))
        log_prob = scatter_flat(log_prob, places, of_token(log_p, new).where(changed, log_prob.take(places)))
        number += 1
    return Decoded(text, since, log_prob).padded(padding)
