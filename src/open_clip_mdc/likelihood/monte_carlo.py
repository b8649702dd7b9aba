"""The lower bound of a caption's log-likelihood by Monte Carlo (Eq. 8), with its standard error.

draws.py draws the masks. Here the network reads those of all images together.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, N scored tokens of a caption, K draws,
J pairs of a caption and a draw.
"""
import numpy as np
import torch
from torch import Tensor

from ..models.interface import Network, TokenLogits
from ..text.packing import scatter_flat
from ..text.special_tokens import mask_id, target_tokens
from .draws import draw_masks, estimate
from .exact import Likelihood, estimated, score_draws, token_log_prob
from .scoring import DEFAULT, Scoring


def hidden_log_likelihood(network: Network, text: np.ndarray, row: np.ndarray, hidden: np.ndarray, vocab_size: int,
                          num_images: int, max_tokens: int, device: torch.device | str) -> np.ndarray:
    """Return the mean log-likelihood of the masked tokens, float32 [J]. The host waits for the device once.

    Args:
        text: long [R, L].
        row: long [J], indices of captions, in the order of their images.
        hidden: bool [J, L], True at masked tokens.
    """
    def to_device(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device, non_blocking=True)

    length = target_tokens(torch.from_numpy(text), vocab_size).sum(1).numpy()[row] + 1  # with SOT, [J]

    def score(index: np.ndarray, token_logits: TokenLogits) -> Tensor:
        longest = length[index].max()
        truth = text[row[index], :longest]  # [R, longest]
        # A row that only fills up the call has index -1. It predicts nothing.
        places = (hidden[index, :longest] & (index >= 0)[:, None]).ravel().nonzero()[0]  # [M] into R*longest
        noisy = truth.copy()
        noisy.flat[places] = mask_id(vocab_size)
        log_prob = token_log_prob(token_logits(to_device(noisy), to_device(places)), to_device(truth.flat[places]))
        return scatter_flat(torch.zeros(truth.shape, device=device), to_device(places), log_prob).sum(1)

    # Rows of an image lie together, the same number for each.
    image = row * num_images // len(text)
    found = score_draws(network, image, length, num_images, max_tokens, score).cpu().numpy()
    return found / hidden.sum(1).astype(np.float32)


def monte_carlo(network: Network, text: Tensor, vocab_size: int, options: Scoring = DEFAULT,
                max_tokens: int = 4096, num_images: int = 1, device: torch.device | str | None = None) -> Likelihood:
    """Return an estimate of the bound of Eq. 8 for the candidate captions of images, with common random masks.

    It is unbiased for every number of draws. Masks depend on (seed, length) alone. So the difference of two candidates
    of equal length has a smaller error than either score, and the errors of different images are not independent.

    With `options.interval`, only mask counts between t_min * N and t_max * N are drawn, which the model was trained on.
    Their mean replaces the mean over all counts, so the score is the training objective of a caption rather than Eq. 8.
    It is still a bound if t_max = 1 and the model predicts better the more it sees.

    Args:
        network: bidirectional.
        text: long [R, L], each image's candidates. A row without scored tokens gets 0.
        options: the largest number of draws per caption, their seed, and the interval.
        max_tokens: tokens per decoder call.
        num_images: B.
        device: the network's device, by default the text's. The host waits for it once.
    """
    device = text.device if device is None else device
    text = text.cpu()
    lengths, text = target_tokens(text, vocab_size).sum(1).numpy(), text.numpy()
    draws = {n: draw_masks(n, options.num_samples, options.seed, options.interval)
             for n in np.unique(lengths[lengths > 0]).tolist()}
    # The captions of an image that have the same length share their masks.
    groups = [(n, rows[lengths[rows] == n]) for rows in np.split(np.arange(len(text)), num_images)
              for n in np.unique(lengths[rows]).tolist() if n]
    score, error, used = np.zeros(len(text), np.float32), np.zeros(len(text)), np.zeros(len(text), int)
    if groups:
        # Masks of a length for each caption of it: [J, L], with SOT and padding visible, and the caption of each, [J].
        hidden = [np.tile(np.pad(draws[n].hidden, ((0, 0), (1, text.shape[1] - n - 1))), (len(rows), 1))
                  for n, rows in groups]
        row = [rows.repeat(len(draws[n].hidden)) for n, rows in groups]
        values = hidden_log_likelihood(network, text, np.concatenate(row), np.concatenate(hidden), vocab_size,
                                       num_images, max_tokens, device)
        for (n, rows), own in zip(groups, np.split(values, np.cumsum([len(x) for x in row])[:-1]), strict=True):
            score[rows], error[rows] = estimate(own.reshape(len(rows), -1).astype(float), draws[n])
            used[rows] = len(draws[n].hidden)
    return estimated(device, score, error, used)
