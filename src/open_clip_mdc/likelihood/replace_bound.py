"""The variational bound of mask-and-replace diffusion as a score: MC-Diffusion's counterpart of Eq. 8.

    log p(caption | image) >= -(prior KL + sum over t = 1..T of E KL(q(x_s | x_t, x_0) || p(x_s | x_t))),  s = t - 1

estimated as T times the mean over t, every t equally often, with noise that depends on (seed, length) alone: candidates
of equal length are noised alike. Each token's part is known, and they add up to the score.

Dimensions: R captions (rows), L positions, N scored tokens of a caption, K draws, T steps, V vocabulary.
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..models.interface import Network
from ..objectives.replace_process import Schedule, bound_terms, prior_kl
from ..text.packing import scatter_flat
from ..text.special_tokens import mask_id, target_tokens
from .exact import Likelihood, decoder_calls, estimated
from .monte_carlo import Draws, estimate, systematic_sample


class Noise(NamedTuple):
    """K draws of t and x_t for all captions of one length."""

    step: np.ndarray  # long [K] in 1..T, ascending
    masked: np.ndarray  # bool [K, N]
    replaced: np.ndarray  # bool [K, N]
    other: np.ndarray  # long [K, N], what stands for a replaced token
    weight: np.ndarray  # float [K], adds up to 1, and to 1 / T for each t if all are drawn

    def apply(self, text: Tensor, draw: np.ndarray, vocab_size: int) -> Tensor:
        """Return x_t, long [n, N + 1], of captions [n, N + 1] by one draw each, [n]."""
        masked, replaced, other = (torch.from_numpy(np.pad(x[draw], ((0, 0), (1, 0)))).to(text.device)
                                   for x in (self.masked, self.replaced, self.other))
        return torch.where(replaced, other, text).masked_fill(masked, mask_id(vocab_size))


def draw_noise(num_tokens: int, num_samples: int, seed: int, schedule: Schedule) -> Noise:
    """Draw a systematic sample of the times and one uniform number per token; depends on nothing but its arguments."""
    last = len(schedule.mask) - 1
    rng = np.random.default_rng([seed, num_tokens])
    step = np.sort(systematic_sample(last, num_samples, rng.integers(last))) + 1
    u = rng.random((num_samples, num_tokens))
    mask, replace = (x.numpy()[step][:, None] for x in (schedule.mask, schedule.replace))
    count = np.bincount(step)[step]
    return Noise(step, u < mask, (u >= mask) & (u < mask + schedule.vocab_size * replace),
                 rng.integers(schedule.vocab_size, size=u.shape), 1 / count / len(np.unique(step)))


def bound_of_draws(network: Network, text: Tensor, noise: Noise, schedule: Schedule,
                   max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return T times the bound's term of captions [R, N + 1], by draw [R, K] and, a weighted mean, by token [R, N]."""
    (rows, length), num_draws = text.shape, len(noise.step)
    last = len(schedule.mask) - 1
    predicted = np.pad(noise.masked if schedule.absorbing else np.ones_like(noise.masked), ((0, 0), (1, 0)))
    weight = torch.from_numpy(noise.weight).to(text.device)
    step = torch.from_numpy(noise.step).to(text.device)
    tokens = torch.zeros(rows, length, dtype=torch.float64, device=text.device)
    values = []
    for index, token_logits in decoder_calls(network, rows * num_draws, length, max_tokens):
        row, draw = (torch.from_numpy(x).to(text.device) for x in divmod(index, num_draws))
        truth = text.index_select(0, row)
        x_t = noise.apply(truth, index % num_draws, schedule.vocab_size)
        places = torch.from_numpy(predicted[index % num_draws].ravel().nonzero()[0]).to(text.device)
        time = step.index_select(0, draw)
        log_p = token_logits(x_t, places, time).log_softmax(1)
        kl = bound_terms(log_p, truth.take(places), x_t.take(places), time[places // length], schedule)
        kl = last * scatter_flat(torch.zeros_like(truth, dtype=torch.float64), places, kl.double())
        values.append(kl.sum(1))
        tokens = tokens.index_add(0, row, kl * weight.index_select(0, draw)[:, None])
    return torch.cat(values).cpu().numpy().reshape(rows, -1), tokens[:, 1:].cpu().numpy()


def bound(
        network: Network,
        text: Tensor,
        vocab_size: int,
        schedule: Callable[[int, torch.device], Schedule],
        num_samples: int = 1024,
        seed: int = 0,
        max_tokens: int = 4096,
) -> Likelihood:
    """Return an unbiased estimate of each caption's bound, with its standard error.

    Arguments as of `monte_carlo`; `num_samples` is T or more for every t, twice as many for an exact standard error.
    """
    process, on_cpu = schedule(vocab_size, text.device), schedule(vocab_size, torch.device("cpu"))
    prior, steps = prior_kl(on_cpu), len(on_cpu.mask) - 1
    lengths = target_tokens(text, vocab_size).sum(1).cpu().numpy()
    score, error = np.zeros(len(text)), np.zeros(len(text))
    per_token = np.zeros(text.shape)
    for n in np.unique(lengths[lengths > 0]).tolist():
        rows, noise = (lengths == n).nonzero()[0], draw_noise(n, num_samples, seed, on_cpu)
        captions = text[torch.from_numpy(rows).to(text.device), :n + 1]
        values, tokens = bound_of_draws(network, captions, noise, process, max_tokens)
        draws = Draws(noise.masked, noise.step - 1, np.arange(num_samples), np.full(steps, np.inf))
        score[rows], error[rows] = estimate(-values / n - prior, draws)
        per_token[rows, 1:n + 1] = -tokens - prior
    return estimated(text.device, score, error, num_samples * (lengths > 0), per_token)
