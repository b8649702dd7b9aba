"""Mask-and-replace diffusion of token ids in closed form: forward process, posterior, bound (MC-Diffusion).

This is VQ-Diffusion's forward process (Gu et al. 2022, arXiv 2111.14822, Eqs. 7, 8), a case of D3PM (Austin et al.
2021, arXiv 2107.03006), which MC-Diffusion applies to captions. At each step a token stays, becomes [MASK], or becomes
a random id (all are equally probable). [MASK] stays. Everything costs O(V) per token, without a [V, V] matrix.

Over t steps, for V ids i, j and m = [MASK]:

    q(x_t = j | x_0 = i) = keep_t [i = j] + replace_t,   q(x_t = m | x_0 = i) = mask_t,   keep + V replace + mask = 1

`Schedule.bridge` gives these numbers for the steps from s to t > s. With replace = 0 this is MDC's process in T steps:
T times the bound's term is -log p / t at a masked token and 0 elsewhere.

Dimensions: R captions, L positions, M predicted tokens, V vocabulary, T steps.
"""
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.types import Device

from ..text.packing import of_token
from ..text.special_tokens import mask_id

# keep and mask at t = 1 and t = T, linear between. "code" has the numbers of VQ-Diffusion's code, which replace 1e-6 of
# the tokens. "replace" has those of its paper, which replace 10 %.
PRESETS = {"code": ((0.99999, 9e-6), (9e-6, 0.99999)),
           "replace": ((0.99999, 0.0), (9e-6, 0.9))}


class Schedule(NamedTuple):
    """Cumulative probabilities by step, float64 [T + 1]. Step 0 is the clean caption."""

    keep: Tensor
    mask: Tensor
    replace: Tensor  # for each of the V ids
    vocab_size: int
    absorbing: bool  # True if nothing is ever replaced, so that a visible token is the true one

    def at(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.keep[t], self.mask[t], self.replace[t]

    def bridge(self, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keep, mask and replace of q(x_t | x_s), s < t, float64."""
        (keep_s, mask_s, replace_s), (keep, mask, replace) = self.at(s), self.at(t)
        stay = keep / keep_s
        return stay, (mask - mask_s) / (1 - mask_s), ((replace - stay * replace_s) / (1 - mask_s)).clamp(min=0)


@lru_cache
def make_schedule(vocab_size: int, steps: int = 100, preset: str = "absorbing", device: Device = "cpu") -> Schedule:
    """Return the schedule "absorbing" (mask_t = t/T, MDC's linear one in T steps), "code" or "replace" (`PRESETS`)."""
    if steps < 2 or preset not in ("absorbing", *PRESETS):
        raise ValueError(f"a schedule needs at least 2 steps and one of absorbing, {', '.join(PRESETS)}; "
                         f"not {steps}, {preset!r}")
    if preset == "absorbing":
        mask = torch.arange(steps + 1, dtype=torch.float64, device=device) / steps
        return Schedule(1 - mask, mask, torch.zeros_like(mask), vocab_size, True)
    args = dict(dtype=torch.float64, device=device)
    keep, mask = (torch.cat((torch.full((1,), clean, **args), torch.linspace(*ends, steps, **args)))
                  for clean, ends in zip((1.0, 0.0), PRESETS[preset], strict=True))
    replace = 1 - keep - mask
    return Schedule(keep, mask, replace.where(replace > 1e-12, 0) / vocab_size, vocab_size, False)


def noise(text: Tensor, noised: Tensor, t: Tensor, schedule: Schedule,
          generator: torch.Generator | None = None) -> Tensor:
    """Draw x_t, long [R, L], from q(x_t | x_0) of clean ids [R, L].

    One uniform number per token decides if it is masked, replaced or kept. A replaced token can be any id, also EOT, so
    take lengths from the clean text.

    Args:
        noised: bool [R, L], True at tokens that get noise.
        t: long [R] in 1..T.
    """
    _, mask, replace = (x[:, None] for x in schedule.at(t))
    u = torch.rand(text.shape, dtype=torch.float64, device=text.device, generator=generator)
    # One number decides: [0, mask) masks, the next V * replace replaces, the rest keeps.
    masked, replaced = noised & (u < mask), noised & (u < mask + schedule.vocab_size * replace)
    if not schedule.absorbing:  # each id has a part of the interval, `replace` wide (which can be 0)
        other = (u - mask).div(replace.where(replace > 0, 1)).clamp(0, schedule.vocab_size - 1).long()
        text = text.where(~replaced, other)
    return text.masked_fill(masked, mask_id(schedule.vocab_size))


def log_x_s(log_p: Tensor, x_t: Tensor, s: Tensor, t: Tensor, schedule: Schedule) -> Tensor:
    """Return log sum over x_0 of q(x_s | x_0) r(x_0), unnormalised, [M, V]. r is the belief about x_0 given x_t.

    For a masked token, r is p(x_0). For a visible token k that may have been replaced, r is p(x_0) too, but r_k is
    multiplied by the share of replacement in q(x_t = k | x_0 = k).
    """
    (keep_s, _, replace_s), (keep, _, replace) = ((x[:, None] for x in schedule.at(time)) for time in (s, t))
    k = x_t.clamp(max=schedule.vocab_size - 1)[:, None]
    share = torch.where((x_t != schedule.vocab_size)[:, None] & (replace > 0), replace / (keep + replace), 1)
    r = log_p.scatter_add(1, k, share.log().to(log_p.dtype))
    # In logs, as keep_s * r underflows in float32 for rare tokens.
    keep_s, replace_s = (x.log().to(log_p.dtype) for x in (keep_s, replace_s))
    return torch.logaddexp(keep_s + r, replace_s + r.logsumexp(1, keepdim=True))


def arrivals(s: Tensor, t: Tensor, x_t: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Return the factors of exp(`log_x_s`) in p(x_s | x_t), float64 [M], for x_s another id, and for x_s = x_t.

    A factor is q(x_t | x_s) / mask_t if x_t is [MASK], else q(x_t | x_s) / replace_t.
    """
    stay, to_mask, to_other = schedule.bridge(s, t)
    _, mask, replace = schedule.at(t)
    replace = replace.where(replace > 0, 1)  # 1 keeps unused gradients finite where nothing is replaced
    return torch.where(x_t == schedule.vocab_size, to_mask / mask, to_other / replace), (stay + to_other) / replace


def log_posterior(log_p: Tensor, x_t: Tensor, s: Tensor, t: Tensor, schedule: Schedule) -> Tensor:
    """Return log p(x_s | x_t) = log sum over x_0 of q(x_s | x_t, x_0) p(x_0 | x_t), normalised (VQ-Diffusion, Eq. 11).

    A masked token stays masked with probability mask_s / mask_t. Otherwise it is drawn from p(x_0), noised to time s. A
    visible token is drawn again if it may have been replaced (`log_x_s`), and otherwise stays.

    Args:
        log_p: log p(x_0 | x_t), [M, V].
        x_t: ids or [MASK], long [M].
        s, t: long [M], 0 <= s < t.

    Returns [M, V + 1]. The last column is [MASK].
    """
    (_, mask_s, _), (_, mask, replace) = schedule.at(s), schedule.at(t)
    is_masked = x_t == schedule.vocab_size
    k = x_t.clamp(max=schedule.vocab_size - 1)[:, None]
    other, same = (x.log().to(log_p.dtype)[:, None] for x in arrivals(s, t, x_t, schedule))
    # [M, V], the belief about x_0 noised to step s.
    log_q = log_x_s(log_p, x_t, s, t, schedule)
    here = log_q.gather(1, k) + torch.where(is_masked[:, None], other, same)
    posterior = (log_q + other).scatter(1, k, here)
    fixed = (~is_masked & (replace == 0))[:, None]
    posterior = torch.where(fixed, torch.full_like(posterior, -torch.inf).scatter(1, k, 0.0), posterior)
    still = torch.where(is_masked, (mask_s / mask).log().to(log_p.dtype), -torch.inf)
    return torch.cat((posterior, still[:, None]), dim=1)


def bound_terms(log_p: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor, schedule: Schedule) -> Tensor:
    """Return the bound's terms KL(q(x_s | x_t, x_0) || p(x_s | x_t)) at s = t - 1, in nats, [M].

    The true posterior has three values: for x_0, for x_t if that is another id, and for all other ids. [MASK] is
    equally probable on both sides. At t = 1 the term is -log p(x_0 | x_1). `log_p` is [M, V], the others long [M].
    """
    size, s = schedule.vocab_size, t - 1
    (keep_s, mask_s, replace_s), (keep, mask, replace) = schedule.at(s), schedule.at(t)
    is_masked, same = x_t == size, x_t == x_0
    if schedule.absorbing:  # the same in closed form, without a second [M, V]
        revealed = ((mask - mask_s) / mask).to(log_p.dtype)
        return torch.where(is_masked, -revealed * of_token(log_p, x_0), 0)
    stay, to_mask, to_other = schedule.bridge(s, t)
    total = torch.where(is_masked, mask, keep * same + replace)  # q(x_t | x_0)
    arrive = torch.where(is_masked, to_mask, to_other)  # q(x_t | x_s), x_s another id
    at_0 = torch.where(same, stay + to_other, arrive) * (keep_s + replace_s) / total
    at_t = torch.where(is_masked | same, 0, (stay + to_other) * replace_s / total)
    other = arrive * replace_s / total
    # How many ids are neither x_0 nor x_t.
    others = size - 1 - (~is_masked & ~same).long()

    log_q = log_x_s(log_p, x_t, s, t, schedule)
    q_0, q_t = of_token(log_q, x_0), of_token(log_q, x_t.clamp(max=size - 1))
    rest = log_q.sum(1) - q_0 - torch.where(is_masked | same, 0, q_t)
    to_others, to_itself = (x.log() for x in arrivals(s, t, x_t, schedule))

    def part(q: Tensor, log_q: Tensor, log_arrival: Tensor, count: Tensor | int = 1) -> Tensor:
        some = q > 0
        known = count * torch.where(some, torch.xlogy(q, q) - q * log_arrival, 0)
        return known.to(log_p.dtype) - q.to(log_p.dtype) * log_q.where(some, 0)

    kl = part(at_0, q_0, torch.where(same, to_itself, to_others)) + part(at_t, q_t, to_itself) \
        + part(other, rest, to_others, others)
    return torch.where(is_masked | (replace > 0), kl, 0)


def infer_time(share: Tensor, schedule: Schedule) -> Tensor:
    """Return the first step, long [R], whose expected share of masked tokens is at least `share` [R]."""
    # mask_t grows with t, so the first step that reaches the share is found by bisection.
    first = torch.searchsorted(schedule.mask[1:], share.double()) + 1
    return first.clamp(max=len(schedule.mask) - 1)


def prior_kl(schedule: Schedule) -> float:
    """Return KL(q(x_T | x_0) || p(x_T)), nats per token. p(x_T) is [MASK] with probability mask_T, else any id."""
    keep, mask, replace = (x.tolist()[-1] for x in schedule[:3])
    size, visible = schedule.vocab_size, 1 - mask
    if visible <= 0:
        return 0.0
    # (number of ids, p(x_T = id | x_0)): the token itself, and the others. 0 log 0 is 0.
    ids = (1, keep + replace), (size - 1, replace)
    return sum(count * p * math.log(p * size / visible) for count, p in ids if p)
