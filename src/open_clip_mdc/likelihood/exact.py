"""Likelihoods of captions in a given order: autoregressive (Eq. 7) and in order of confidence (heuristic, Sec. 4.2).

A `Network` is the decoder with the image built in. SOT is given; every other token is scored, EOT included.

Dimensions: R captions (rows), I images, L positions, N scored tokens of a caption, M asked tokens, V vocabulary.
"""
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.interface import Network, TokenLogits
from ..text.packing import partition_indices, scatter_flat
from ..text.special_tokens import caption_lengths, mask_id, target_tokens


class Likelihood(NamedTuple):
    """Scores of captions and what else their estimator knows: [R, ...], or [B, C, ...] from `log_likelihood`."""

    log_likelihood: Tensor  # float32 [B, C], nats
    token_log_likelihood: Tensor | None = None  # float32 [B, C, L], 0 where not scored; not of monte_carlo
    order: Tensor | None = None  # long [B, C, L], the step at which a token was revealed, -1 if never; of heuristic
    standard_error: Tensor | None = None  # float32 [B, C], inf if unknown; of monte_carlo and bound
    draws: Tensor | None = None  # long [B, C], the draws behind the score; of monte_carlo and bound


def estimated(device: torch.device, score: np.ndarray, error: np.ndarray, draws: np.ndarray,
              per_token: np.ndarray | None = None) -> Likelihood:
    tensors = (None if x is None else torch.as_tensor(x, dtype=torch.float32).to(device)
               for x in (score, per_token, None, error))
    return Likelihood(*tensors, torch.as_tensor(draws, dtype=torch.long).to(device))


def token_log_prob(logits: Tensor, target: Tensor) -> Tensor:
    return logits.gather(1, target[:, None]).squeeze(1) - logits.logsumexp(1)


def decoder_calls(network: Network, rows: int, length: int,
                  max_tokens: int) -> Iterator[tuple[np.ndarray, TokenLogits]]:
    """Yield the rows of each decoder call, and its function of them, which only another number of rows makes anew."""
    token_logits, packed_rows, step = None, 0, max(1, max_tokens // length)
    for index in np.split(np.arange(rows), range(step, rows, step)):
        if len(index) != packed_rows:
            token_logits, packed_rows = network([length] * len(index)), len(index)
        yield index, token_logits


def autoregressive(network: Network, text: Tensor, vocab_size: int) -> Likelihood:
    """Score by Eq. 7: the sum over i of log p(c_i | c_<i, image), from the first token after SOT to EOT."""
    lengths = caption_lengths(text, vocab_size).tolist()
    captions = text[:, :max(lengths)]
    predicted, _ = partition_indices(target_tokens(captions, vocab_size), sum(lengths) - len(lengths))
    per_token = torch.zeros(captions.shape, device=text.device)
    if len(predicted):
        log_prob = token_log_prob(network(lengths)(captions, predicted), captions.take(predicted))
        per_token = scatter_flat(per_token, predicted, log_prob)
    return Likelihood(per_token.sum(1), F.pad(per_token, (0, text.shape[1] - captions.shape[1])))


def heuristic(network: Network, text: Tensor, vocab_size: int) -> Likelihood:
    """Reveal a caption in order of confidence and add up what its tokens got when revealed: the paper's heuristic.

    Confidence is the highest probability in the vocabulary, whatever the true token's is; of equal ones the first
    position wins. As the next position depends on the revealed tokens alone, this is a chain rule: given the length,
    the probabilities of all captions add up to 1, and the score is the exact log-probability that decoding in order of
    confidence samples the caption. It is a likelihood of its own, which Eq. 8 does not bound.
    """
    lengths = caption_lengths(text, vocab_size).cpu().numpy()
    captions = text[:, :int(lengths.max())]
    left = lengths - 1  # masked tokens of each row
    masked = target_tokens(captions, vocab_size)
    remaining, _ = partition_indices(masked, int(left.sum()))
    noisy = captions.masked_fill(masked, mask_id(vocab_size))
    per_token = torch.zeros(captions.shape, device=text.device)
    order = torch.full_like(captions, -1)
    unknown, nowhere = torch.full_like(per_token, -torch.inf), torch.zeros_like(masked)
    for step in range(captions.shape[1] - 1):
        if step == 0 or (left == step).any():  # a row that is finished shrinks to its SOT, and stays in its place
            token_logits = network(np.where(left > step, lengths, 1))
        logits = token_logits(noisy, remaining)
        log_z = logits.logsumexp(1)
        log_prob = logits.gather(1, captions.take(remaining)[:, None]).squeeze(1) - log_z
        confidence = scatter_flat(unknown, remaining, logits.amax(1) - log_z)
        chosen = nowhere.scatter(1, confidence.argmax(1, keepdim=True), True).take(remaining)
        which, rest = partition_indices(chosen, int((left > step).sum()))
        places, remaining = remaining.index_select(0, which), remaining.index_select(0, rest)
        per_token = scatter_flat(per_token, places, log_prob.index_select(0, which))
        order = order.flatten().index_fill(0, places, step).view_as(order)
        noisy = scatter_flat(noisy, places, captions.take(places))
    padding = (0, text.shape[1] - captions.shape[1])
    return Likelihood(per_token.sum(1), F.pad(per_token, padding), F.pad(order, padding, value=-1))
