"""Likelihoods of captions in a given order: autoregressive (Eq. 7) and in order of confidence (heuristic, Sec. 4.2).

Functions of captions and a `TokenLogits`, the decoder with the image built in. SOT is given; every other token is
scored, EOT included: a caption of N words and marks has N + 1 terms. The bound of Eq. 8 is in monte_carlo.py.

Dimensions: R captions (rows), I images, L positions, N scored tokens of a caption, M asked tokens, V vocabulary.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import TokenLogits
from .tokens import mask_id, target_tokens, valid_tokens


class Likelihood(NamedTuple):
    """Scores of captions and what else their estimator knows. [R, ...] of one, [B, C, ...] of `log_likelihood`."""

    log_likelihood: Tensor  # float32 [B, C], nats
    token_log_likelihood: Tensor | None = None  # float32 [B, C, L], 0 where not scored; not of monte_carlo
    order: Tensor | None = None  # long [B, C, L], the step at which a token was revealed, -1 if never; of heuristic
    standard_error: Tensor | None = None  # float32 [B, C], inf if unknown; of monte_carlo
    draws: Tensor | None = None  # long [B, C], the draws behind the score; of monte_carlo


def token_log_prob(logits: Tensor, target: Tensor) -> Tensor:
    """log p of the target ids, float32 [M], from logits [M, V] and ids [M]."""
    logits = logits.float()
    return logits.gather(1, target[:, None]).squeeze(1) - logits.logsumexp(1)


def autoregressive(token_logits: TokenLogits, text: Tensor, vocab_size: int) -> Likelihood:
    """Eq. 7: sum over i of log p(c_i | c_<i, image), from the first token after SOT to EOT.

    Args:
        token_logits: of a causal model.
        text: long [R, L].
    """
    valid, scored = valid_tokens(text, vocab_size), target_tokens(text, vocab_size)
    per_token = torch.zeros(text.shape, device=text.device)
    if scored.any():
        per_token[scored] = token_log_prob(token_logits(text, valid, scored), text[scored])
    return Likelihood(per_token.sum(1), per_token)


def heuristic(token_logits: TokenLogits, text: Tensor, vocab_size: int) -> Likelihood:
    """The paper's heuristic: reveals a caption in order of confidence and adds up what its tokens got when revealed.

    Confidence is the highest probability in the vocabulary, whatever the true token's is; of equal ones the first
    position wins. As the next position depends on the revealed tokens alone, this is a chain rule: given the length,
    the probabilities of all captions add up to 1, and the score is the exact log-probability that decoding in order of
    confidence samples the caption. It is a likelihood of its own, which Eq. 8 does not bound.

    All rows step together. A row that is finished shrinks to its SOT: it stays one of its image's R/I rows, at the
    cost of one token and no logits.

    Args:
        token_logits: of a bidirectional model.
        text: long [R, L].
    """
    valid, masked = valid_tokens(text, vocab_size), target_tokens(text, vocab_size)
    noisy = text.masked_fill(masked, mask_id(vocab_size))
    per_token = torch.zeros(text.shape, device=text.device)
    order = torch.full_like(text, -1)
    is_sot = torch.zeros_like(valid)
    is_sot[:, 0] = True
    for step in range(int(masked.sum(1).max())):
        unfinished = masked.any(1)
        logits = token_logits(noisy, valid & unfinished[:, None] | is_sot, masked).float()
        log_z = logits.logsumexp(1)
        confidence = torch.full_like(per_token, -torch.inf)
        confidence[masked] = logits.amax(1) - log_z
        log_prob = torch.zeros_like(per_token)
        log_prob[masked] = logits.gather(1, text[masked][:, None]).squeeze(1) - log_z
        revealed = F.one_hot(confidence.argmax(1), text.shape[1]).bool() & unfinished[:, None]
        per_token = torch.where(revealed, log_prob, per_token)
        order = order.masked_fill(revealed, step)
        noisy = torch.where(revealed, text, noisy)
        masked = masked & ~revealed
    return Likelihood(per_token.sum(1), per_token, order)
