"""The lower bound of a caption's log-likelihood by Monte Carlo (Eq. 8), with standard error and early stopping.

The masks are those of draws.py, and race.py says which are read. Here a network reads those of all images together.

Dimensions: I images, R captions (rows), R/I consecutive rows per image, L positions, N scored tokens of a caption, K
draws, J pairs of a caption and a draw.
"""
import math

import numpy as np
import torch
from torch import Tensor

from ..models.interface import Network
from ..text.packing import scatter_flat
from ..text.special_tokens import mask_id, target_tokens
from .draws import draw_masks
from .exact import Likelihood, decoder_calls, estimated, token_log_prob
from .race import race, run


def hidden_log_likelihood(network: Network, text: np.ndarray, row: np.ndarray, hidden: np.ndarray, vocab_size: int,
                          num_images: int, max_tokens: int, device: torch.device | str) -> np.ndarray:
    """Return the hidden tokens' mean log-likelihood, float32 [J]: one wait for the device.

    Args:
        text: long [R, L].
        row: long [J], which captions. Those of an image follow one another.
        hidden: bool [J, L].
    """
    def there(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device, non_blocking=True)

    values, order, length = [], [], target_tokens(torch.from_numpy(text), vocab_size).sum(1).numpy()[row] + 1
    for index, token_logits in decoder_calls(network, row * num_images // len(text), length, num_images, max_tokens):
        longest = length[index].max()
        truth = text[row[index], :longest]
        places = (hidden[index, :longest] & (index >= 0)[:, None]).ravel().nonzero()[0]
        noisy = truth.copy()
        noisy.flat[places] = mask_id(vocab_size)
        log_prob = token_log_prob(token_logits(there(noisy), there(places)), there(truth.flat[places]))
        values.append(scatter_flat(torch.zeros(truth.shape, device=device), there(places), log_prob).sum(1))
        order.append(index)
    order, found = np.concatenate(order), np.empty(len(row), dtype=np.float32)
    found[order[order >= 0]] = torch.cat(values).cpu().numpy()[order >= 0]
    return found / hidden.sum(1).astype(np.float32)


def monte_carlo(network: Network, text: Tensor, vocab_size: int, num_samples: int = 1024, seed: int = 0,
                interval: tuple[float, float] | None = None, stop_confidence: float | None = None,
                max_tokens: int = 4096, num_images: int = 1, device: torch.device | str | None = None) -> Likelihood:
    """Estimate the bound of Eq. 8 for the candidate captions of images, with common random masks.

    Unbiased for every number of draws. The masks depend on (seed, length) alone: the difference of candidates of equal
    length is more certain than either score, and errors are not independent over images.

    With `interval`, only mask counts between t_min * N and t_max * N are drawn, those the model was trained on, and
    their mean stands for the mean over all counts: the training objective per caption rather than Eq. 8. It is a bound
    still where t_max = 1 and the model predicts better the more it sees.

    With `stop_confidence` candidates drop out as soon as they are behind the leader for certain, see `race`.

    Args:
        network: bidirectional.
        text: long [R, L], each image's candidates. Without scored tokens a row gets 0 and takes no part.
        num_samples: draws per caption, at most.
        stop_confidence: e.g. 0.999. None draws all.
        max_tokens: tokens per decoder call.
        num_images: I. Their candidates race apart.
        device: the network's, the text's if None. It is waited for once a look.
    """
    device = text.device if device is None else device
    text = text.cpu()
    lengths, text = target_tokens(text, vocab_size).sum(1).numpy(), text.numpy()
    draws = {n: draw_masks(n, num_samples, seed, interval) for n in np.unique(lengths[lengths > 0]).tolist()}

    def read(requests: list) -> list[np.ndarray]:
        row = [(image * len(text) // num_images + rows).repeat(len(draws[n].hidden[new]))
               for image, n, rows, new in requests]
        hidden = [np.tile(np.pad(draws[n].hidden[new], ((0, 0), (1, text.shape[1] - n - 1))), (len(rows), 1))
                  for _, n, rows, new in requests]
        values = hidden_log_likelihood(network, text, np.concatenate(row), np.concatenate(hidden), vocab_size,
                                       num_images, max_tokens, device)
        parts = np.split(values, np.cumsum([len(x) for x in row])[:-1])
        return [part.reshape(len(rows), -1) for part, (_, _, rows, _) in zip(parts, requests, strict=True)]

    races = [race(own, draws, stop_confidence, math.log(vocab_size)) for own in np.split(lengths, num_images)]
    return estimated(device, *map(np.concatenate, zip(*run(races, read), strict=True)))
