"""Choice of a token from its logits: the most probable one, or a drawn one.

Dimensions: M tokens, V vocabulary.
"""
import math
from typing import NamedTuple

import torch
from torch import Tensor

COLDEST = 1e-6  # a temperature that any logits can be divided by


class Sampling(NamedTuple):
    """Greedy as it stands. With a temperature tokens are drawn."""

    temperature: float = 0.0  # 0 takes the most probable token; more divides the logits before anything is cut off
    top_k: int | None = None  # keep the k most probable tokens
    top_p: float | None = None  # of these, keep the fewest that together have probability p or more (nucleus sampling)
    generator: torch.Generator | None = None  # of the logits' device; the global one if None

    def check(self) -> None:
        """Raise ValueError for a value out of range, or one that greedy decoding does not read."""
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy), or finite and 1e-6 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be more than 0 and at most 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p need a temperature: without one the most probable token is taken")


GREEDY = Sampling()


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits at the temperature (0: of the likeliest token alone), cut to top_k and top_p: float64 [M, V]."""
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

    The noise is float64, as float32 noise draws rare tokens too rarely. Greedy choice takes the lowest id of equals.
    """
    sampling.check()
    if sampling.temperature == 0:
        return logits.argmax(1)
    logits = truncate(logits, sampling)
    return (logits - torch.empty_like(logits).exponential_(generator=sampling.generator).log()).argmax(1)


class Decoded(NamedTuple):
    """Decoded captions and how they came about.

    The sum of `log_prob` is the likelihood of what was decoded given what was not. For a causal model that is the
    caption's (Eq. 7). A masked diffusion model was given where the caption ends, so that it is not the caption's
    heuristic score, for which EOT is one of the tokens to predict: use `log_likelihood`.
    """

    text: Tensor  # long [R, L], SOT to EOT, then padding; no mask ids
    step: Tensor  # long [R, L], the step that decoded the token, from 0; -1 where it was given
    log_prob: Tensor  # float32 [R, L], of the token at that step, temperature 1; 0 where it was given
