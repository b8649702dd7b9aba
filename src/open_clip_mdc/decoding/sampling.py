"""Choose tokens: the most probable ones, or draws with temperature, top_k and top_p.

Dimensions: R captions (rows), L positions, M predicted tokens, V vocabulary.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .options import Sampling


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
        # [M, V], the sum of all more probable tokens. The token that passes top_p is kept.
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

    def padded(self, padding: Tensor) -> "Decoded":
        """Return the captions with what follows the longest of them, long [R, n], which is given."""
        extra = (0, padding.shape[1])
        return Decoded(torch.cat((self.text, padding), 1), F.pad(self.step, extra, value=-1),
                       F.pad(self.log_prob, extra))
