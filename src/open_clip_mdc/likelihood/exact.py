"""Likelihoods of captions by the chain rule, in reading order (Eq. 7) or in order of confidence (heuristic, Sec. 4.2).

A `Network` is the decoder with the images' keys and values. SOT is given. All other tokens are scored, also EOT.

Dimensions: B images, C candidates of an image, R captions (R/B consecutive rows per image), L positions, N scored
tokens of a caption, M predicted tokens, V vocabulary.
"""
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.confidence import reveal
from ..models.interface import Network, TokenLogits
from ..text.packing import partition_indices, scatter_flat
from ..text.special_tokens import caption_lengths, mask_id, target_tokens
from .scoring import Likelihood


def estimated(device: torch.device, score: np.ndarray, error: np.ndarray, draws: np.ndarray,
              per_token: np.ndarray | None = None) -> Likelihood:
    tensors = (None if x is None else torch.as_tensor(x, dtype=torch.float32).to(device, non_blocking=True)
               for x in (score, per_token, None, error))
    return Likelihood(*tensors, torch.as_tensor(draws, dtype=torch.long).to(device, non_blocking=True))


def token_log_prob(logits: Tensor, target: Tensor) -> Tensor:
    return logits.gather(1, target[:, None]).squeeze(1) - logits.logsumexp(1)


def confidence_and_score(logits: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p of the most probable token, whichever it is, and of the true one, [M] each, from logits [M, V]."""
    log_z = logits.logsumexp(1)
    return logits.amax(1) - log_z, logits.gather(1, true[:, None]).squeeze(1) - log_z


def decoder_calls(network: Network, image: np.ndarray, length: np.ndarray, num_images: int,
                  max_tokens: int) -> Iterator[tuple[np.ndarray, TokenLogits]]:
    """Split J rows into decoder calls. A call has all rows of several images, or a part of one image's rows.

    Args:
        network: for `num_images` images, see `interface.Network`.
        image, length: of each row, long [J]. Images ascend.
        max_tokens: tokens per call, with padding.

    Yields the indices of a call's rows, long [R], and the call's `TokenLogits` for texts [R, longest]. All images of a
    call have the same number of rows: an index of -1 is a row of one token that fills up an image with fewer.
    """
    # One image more may not exceed the budget, nor the rows that the image with most rows asks of all.
    rows_per_call = max(1, max_tokens // int(length.max()))
    images, first, count = np.unique(image, return_index=True, return_counts=True)
    start = 0
    while start < len(images):
        stop = start + 1
        while stop < len(images) and (stop + 1 - start) * count[start:stop + 1].max() <= rows_per_call:
            stop += 1
        # [images, rows], -1 where an image has fewer rows than the others.
        number = np.arange(count[start:stop].max())
        rows = np.where(number < count[start:stop, None], first[start:stop, None] + number, -1)
        step = max(1, rows_per_call // len(rows))
        # All images need no copy of their keys and values.
        subset = () if stop - start == num_images else (images[start:stop],)
        for part in np.split(rows, range(step, rows.shape[1], step), axis=1):
            yield part.ravel(), network(np.where(part >= 0, length[part], 1).ravel(), *subset)
        start = stop


def score_draws(network: Network, image: np.ndarray, length: np.ndarray, num_images: int, max_tokens: int,
                score: Callable[[np.ndarray, TokenLogits], Tensor]) -> Tensor:
    """Return the scores of J noised captions, [J] on the device, in as many decoder calls as the budget needs.

    Args:
        image, length, num_images, max_tokens: those of `decoder_calls`.
        score: takes the indices of a call's rows, long [R], and its `TokenLogits`. Returns their scores, [R].
    """
    scores, order = [], []
    for index, token_logits in decoder_calls(network, image, length, num_images, max_tokens):
        scores.append(score(index, token_logits))
        order.append(index)
    scores, order = torch.cat(scores), np.concatenate(order)
    # `order` says which row a score is of. Its inverse says where a row's score is, without the rows that only fill up.
    real = (order >= 0).nonzero()[0]
    where = np.empty(len(length), dtype=int)
    where[order[real]] = real
    return scores.index_select(0, torch.from_numpy(where).to(scores.device, non_blocking=True))


def autoregressive(network: Network, text: Tensor, vocab_size: int,
                   device: torch.device | str | None = None) -> Likelihood:
    """Return the log-likelihood of Eq. 7: the sum of log p(c_i | c_<i, image), from the token after SOT to EOT."""
    lengths = caption_lengths(text, vocab_size).tolist()
    text = text.to(device or text.device, non_blocking=True)
    captions = text[:, :max(lengths)]
    # Long [M] into R*L. The host knows M, so that it need not ask the device.
    predicted, _ = partition_indices(target_tokens(captions, vocab_size), sum(lengths) - len(lengths))
    per_token = torch.zeros(captions.shape, device=text.device)
    if len(predicted):
        log_prob = token_log_prob(network(lengths)(captions, predicted), captions.take(predicted))
        per_token = scatter_flat(per_token, predicted, log_prob)
    return Likelihood(per_token.sum(1), F.pad(per_token, (0, text.shape[1] - captions.shape[1])))


def heuristic(network: Network, text: Tensor, vocab_size: int, device: torch.device | str | None = None) -> Likelihood:
    """Return the paper's heuristic: reveal a caption in order of confidence, and sum its tokens' log-probabilities.

    A position's confidence is the highest probability in the vocabulary, even if that of the true token is lower. The
    first of equal positions is revealed. The next position depends on the revealed tokens alone, so this is a chain
    rule: given the length, the probabilities of all captions add up to 1. The score is the exact log-probability that
    decoding in order of confidence samples this caption. It is another likelihood than the one that Eq. 8 bounds.

    Args:
        text: long [R, L]. If it is on the CPU, the host does not wait for the device.
        device: the network's device, by default the text's.
    """
    lengths = caption_lengths(text, vocab_size).cpu().numpy()  # [R]
    text = text.to(device or text.device, non_blocking=True)
    captions = text[:, :int(lengths.max())]
    # [R, L]: all but SOT are scored, so all but SOT are masked at first.
    masked = target_tokens(captions, vocab_size)
    num_masked = lengths - 1
    noisy = captions.masked_fill(masked, mask_id(vocab_size))
    per_token = torch.zeros(captions.shape, device=text.device)
    order = torch.full_like(captions, -1)
    token_logits = network(lengths)

    def predict(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return confidence_and_score(token_logits(noisy, hidden), captions.take(hidden))

    hidden, _ = partition_indices(masked, int(num_masked.sum()))
    for step, revealed in enumerate(reveal(predict, hidden, num_masked, captions.shape)):
        places = revealed.places
        per_token = scatter_flat(per_token, places, revealed.predicted.index_select(0, revealed.which))
        order = order.flatten().index_fill(0, places, step).view_as(order)
        # Decoding would write a token of its own here. Scoring writes the true one.
        noisy = scatter_flat(noisy, places, captions.take(places))
        unfinished = num_masked > step + 1
        if unfinished.any() and (num_masked == step + 1).any():
            # A finished row is cut to its SOT, which costs one token, and keeps its index.
            token_logits = network(np.where(unfinished, lengths, 1))
    padding = (0, text.shape[1] - captions.shape[1])
    return Likelihood(per_token.sum(1), F.pad(per_token, padding), F.pad(order, padding, value=-1))
