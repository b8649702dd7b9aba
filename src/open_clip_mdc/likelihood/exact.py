"""Likelihoods of captions in a given order: autoregressive (Eq. 7) and in order of confidence (heuristic, Sec. 4.2).

A `Network` is the decoder with the image built in. SOT is given. Every other token is scored, EOT included.

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
    tensors = (None if x is None else torch.as_tensor(x, dtype=torch.float32).to(device, non_blocking=True)
               for x in (score, per_token, None, error))
    return Likelihood(*tensors, torch.as_tensor(draws, dtype=torch.long).to(device, non_blocking=True))


def token_log_prob(logits: Tensor, target: Tensor) -> Tensor:
    return logits.gather(1, target[:, None]).squeeze(1) - logits.logsumexp(1)


def decoder_calls(network: Network, image: np.ndarray, length: np.ndarray, num_images: int,
                  max_tokens: int) -> Iterator[tuple[np.ndarray, TokenLogits]]:
    """Cut rows into decoder calls of several images, or else of a part of one image's rows.

    Args:
        network: of `num_images` images; see `interface.Network`.
        image, length: of each row, long [J]; images ascend.
        max_tokens: per call, with padding.

    Yields the rows of a call, long [R], -1 for a lone token that fills up an image with fewer rows than the others, and
    the call's function of texts [R, longest].
    """
    rows_per_call = max(1, max_tokens // int(length.max()))
    names, first, count = np.unique(image, return_index=True, return_counts=True)
    start = 0
    while start < len(names):
        stop = start + 1
        while stop < len(names) and (stop + 1 - start) * count[start:stop + 1].max() <= rows_per_call:
            stop += 1
        number = np.arange(count[start:stop].max())
        rows = np.where(number < count[start:stop, None], first[start:stop, None] + number, -1)
        step = max(1, rows_per_call // len(rows))
        images = () if stop - start == num_images else (names[start:stop],)
        for part in np.split(rows, range(step, rows.shape[1], step), axis=1):
            yield part.ravel(), network(np.where(part >= 0, length[part], 1).ravel(), *images)
        start = stop


def autoregressive(network: Network, text: Tensor, vocab_size: int,
                   device: torch.device | str | None = None) -> Likelihood:
    """Score by Eq. 7: the sum over i of log p(c_i | c_<i, image), from the first token after SOT to EOT."""
    lengths = caption_lengths(text, vocab_size).tolist()
    text = text.to(device or text.device, non_blocking=True)
    captions = text[:, :max(lengths)]
    predicted, _ = partition_indices(target_tokens(captions, vocab_size), sum(lengths) - len(lengths))
    per_token = torch.zeros(captions.shape, device=text.device)
    if len(predicted):
        log_prob = token_log_prob(network(lengths)(captions, predicted), captions.take(predicted))
        per_token = scatter_flat(per_token, predicted, log_prob)
    return Likelihood(per_token.sum(1), F.pad(per_token, (0, text.shape[1] - captions.shape[1])))


def heuristic(network: Network, text: Tensor, vocab_size: int, device: torch.device | str | None = None) -> Likelihood:
    """Reveal a caption in order of confidence and add up what its tokens got when revealed: the paper's heuristic.

    Confidence is the highest probability in the vocabulary, whatever the true token's is. Of equal ones the first
    position wins. As the next position depends on the revealed tokens alone, this is a chain rule: given the length,
    the probabilities of all captions add up to 1, and the score is the exact log-probability that decoding in order of
    confidence samples the caption. It is a likelihood of its own, which Eq. 8 does not bound.

    A text [R, L] on the CPU is read without a wait for the device, which is the network's, the text's if None.
    """
    lengths = caption_lengths(text, vocab_size).cpu().numpy()
    text = text.to(device or text.device, non_blocking=True)
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
