"""Chooses tokens from logits: the most probable ones (greedy), or draws with temperature, top_k and top_p.

Dimensions: R captions (rows), L positions, M predicted tokens, V vocabulary.
"""
import math
from typing import NamedTuple

import torch
from torch import Tensor

COLDEST = 1e-6  # smallest temperature. Any logits can be divided by it


class Sampling(NamedTuple):
    """Settings to choose tokens by. The defaults are greedy, and a temperature draws."""

    temperature: float = 0.0  # 0 is greedy. Otherwise logits are divided by it, before top_k and top_p
    top_k: int | None = None  # keep the k most probable tokens
    top_p: float | None = None  # then keep the fewest that together have probability p or more (nucleus sampling)
    generator: torch.Generator | None = None  # on the logits' device. None is the global one

    def check(self) -> None:
        """Raise ValueError if a value is out of range, or if greedy decoding would ignore it."""
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: it must be 0 (greedy), or finite and 1e-6 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: it must be 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be more than 0 and at most 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p need a temperature: without one the most probable token is taken")


GREEDY = Sampling()


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits divided by the temperature and cut by top_k and top_p, float64 [M, V], -inf where cut.

    Temperature 0 keeps the most probable token alone.
    """
    logits = logits.double()
    if sampling.temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter(1, logits.argmax(1, keepdim=True), 0.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        kept, index = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(1, index, kept)
    if sampling.top_p is not None:
        probability, index = logits.softmax(1).sort(dim=1, descending=True)
        before = probability.cumsum(1) - probability
        logits = logits.masked_fill(
            torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, before >= sampling.top_p), -torch.inf)
    return logits


def sample_tokens(logits: Tensor, sampling: Sampling) -> Tensor:
    """Choose one token per row of logits [M, V], greedily or by the Gumbel-max trick: long [M].

    The noise is float64, as float32 noise draws rare tokens too rarely. If greedy tokens are equal, the lowest id wins.
    """
    sampling.check()
    if sampling.temperature == 0:
        return logits.argmax(1)
    logits = truncate(logits, sampling)
    return (logits - torch.empty_like(logits).exponential_(generator=sampling.generator).log()).argmax(1)


class Decoded(NamedTuple):
    """Decoded captions, with the step and the log-probability of each token.

    The sum of `log_prob` is the log-likelihood of the decoded tokens given the others. For a causal model this is the
    caption's log-likelihood (Eq. 7). A masked diffusion model was given EOT, so the sum is not the caption's heuristic
    score, which predicts EOT, too. Use `log_likelihood` for that.
    """

    text: Tensor  # long [R, L], SOT to EOT, then padding. No mask ids
    step: Tensor  # long [R, L], the step that decoded the token, from 0, or -1 where it was given
    log_prob: Tensor  # float32 [R, L], of the token at that step, at temperature 1, or 0 where it was given
