"""The lower bound of a caption's log-likelihood by Monte Carlo (Eq. 8), with its standard error.

draws.py draws the masks. Here the network reads those of all images together.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, N scored tokens of a caption, K draws,
J pairs of a caption and a draw.
"""
import numpy as np
from torch import Tensor

from ..models.interface import TokenLogits
from ..text.packing import scatter_flat
from ..text.special_tokens import caption_lengths, mask_id
from .calls import first_of_equal, score_draws
from .draws import draw_masks, estimate
from .exact import estimated, token_log_prob
from .scoring import Call, Likelihood, Scoring

FEW = 1024  # pairs, for which sharing saves little time. Decoder calls of another size may differ in the last bits


def hidden_log_likelihood(call: Call, row: np.ndarray, hidden: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the mean log-likelihood of the masked tokens, float32 [J]. The host waits for the device once.

    Args:
        row: long [J], indices of captions, in the order of their images.
        hidden: bool [J, L], True at masked tokens.
        first: long [J], the first pair whose noised caption is equal. The decoder reads only that one.
    """
    vocab_size, text, to_device = call.model.vocab_size, call.text.numpy(), call.to_device
    length = caption_lengths(call.text, vocab_size).numpy()[row]  # [J]
    read, count = np.unique(first, return_counts=True)  # the pairs that are read, and how many each serves, [D]
    pairs, start = first.argsort(kind="stable"), count.cumsum() - count  # those of a D lie together

    def score(index: np.ndarray, token_logits: TokenLogits) -> tuple[np.ndarray, Tensor]:
        # A row that only fills up the call has index -1. It predicts nothing.
        own, longest = read[index], length[read[index]].max()
        places = (hidden[own, :longest] & (index >= 0)[:, None]).ravel().nonzero()[0]  # [M] into R*longest
        noisy = text[row[own], :longest]  # [R, longest]
        noisy.flat[places] = mask_id(vocab_size)
        logits = token_logits(to_device(noisy), to_device(places))
        # The S pairs that the call serves, and the row that each is read in, [S]. Each looks up its own tokens.
        served = np.where(index >= 0, count[index], 0)
        of = np.arange(len(index)).repeat(served)
        number = pairs[start[index][of] + np.arange(len(of)) - (served.cumsum() - served)[of]]
        masked = hidden[number, :longest]  # [S, longest]
        numbered = np.zeros(noisy.size, dtype=int)
        numbered[places] = np.arange(len(places))
        at = to_device(numbered.reshape(noisy.shape)[of][masked])
        found = token_log_prob(logits, to_device(text[row[number], :longest][masked]), at)
        places = to_device(masked.ravel().nonzero()[0])
        return number, scatter_flat(found.new_zeros(masked.shape), places, found).sum(1)

    # Rows of an image lie together, the same number for each.
    found = score_draws(call, call.image[row[read]], length[read], score).cpu().numpy()
    return found / hidden.sum(1).astype(np.float32)


def monte_carlo(call: Call, options: Scoring) -> Likelihood:
    """Return an estimate of the bound of Eq. 8 for the candidate captions of images, with common random masks.

    It is unbiased for every number of draws. Masks depend on (seed, length) alone. So the difference of two candidates
    of equal length has a smaller error than either score, and the errors of different images are not independent.

    With `options.interval`, only mask counts between t_min * N and t_max * N are drawn, which the model was trained on.
    Their mean replaces the mean over all counts, so the score is the training objective of a caption rather than Eq. 8.
    It is still a bound if t_max = 1 and the model predicts better the more it sees.

    The host waits for the device once.
    """
    _, text, vocab_size = call.rows
    lengths, text = caption_lengths(text, vocab_size).numpy() - 1, text.numpy()  # without SOT
    draws = {n: draw_masks(n, options.num_samples, options.seed, options.interval)
             for n in np.unique(lengths[lengths > 0]).tolist()}
    # The captions of an image that have the same length share their masks.
    groups = [(n, rows[lengths[rows] == n]) for rows in np.split(np.arange(len(text)), call.num_images)
              for n in np.unique(lengths[rows]).tolist() if n]
    score, error, used = np.zeros(len(text), np.float32), np.zeros(len(text)), np.zeros(len(text), int)
    if groups:
        # Masks of a length for each caption of it: [J, L], with SOT and padding visible, and the caption of each, [J].
        hidden = [np.tile(np.pad(draws[n].hidden, ((0, 0), (1, text.shape[1] - n - 1))), (len(rows), 1))
                  for n, rows in groups]
        row = [rows.repeat(len(draws[n].hidden)) for n, rows in groups]
        starts = np.cumsum([0, *map(len, row)])[:-1]
        # Where a mask hides the difference of two captions, they are one noised caption.
        equal = [start + first_of_equal(np.where(own, mask_id(vocab_size), text[rows])[:, :n + 1])
                 for start, rows, own, (n, _) in zip(starts, row, hidden, groups, strict=True)]
        row, hidden, equal = map(np.concatenate, (row, hidden, equal))
        first = equal if len(row) > FEW else np.arange(len(row))
        values = hidden_log_likelihood(call, row, hidden, first)
        for (n, rows), own in zip(groups, np.split(values, starts[1:]), strict=True):
            score[rows], error[rows] = estimate(own.reshape(len(rows), -1).astype(float), draws[n])
            used[rows] = len(draws[n].hidden)
    return estimated(call.device, score, error, used)
