"""The variational bound of mask-and-replace diffusion as a score, MC-Diffusion's counterpart of Eq. 8.

    log p(caption | image) >= -(prior KL + sum over t = 1..T of E KL(q(x_s | x_t, x_0) || p(x_s | x_t))),  s = t - 1

The sum is estimated as T times the mean over draws of t, each t equally often. The noise depends on (seed, length)
alone, so candidates of equal length share it. The terms of a caption's tokens add up to its score.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, N scored tokens of a caption, K draws,
T steps, V vocabulary.
"""
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..models.interface import TokenLogits
from ..objectives.replace_process import Schedule, bound_terms, prior_kl
from ..text.packing import scatter_flat
from ..text.special_tokens import mask_id, target_tokens
from .calls import score_draws
from .draws import Draws, estimate, systematic_sample
from .exact import estimated
from .scoring import Call, Likelihood, Scoring


class Noise(NamedTuple):
    """K draws of t and x_t for all captions of one length."""

    step: np.ndarray  # long [K] in 1..T, ascending
    masked: np.ndarray  # bool [K, N]
    replaced: np.ndarray  # bool [K, N]
    other: np.ndarray  # long [K, N], the id that replaces the token
    weight: np.ndarray  # float [K]. The weights add up to 1, with an equal share for each t that is drawn


def draw_noise(num_tokens: int, num_samples: int, seed: int, schedule: Schedule) -> Noise:
    """Draw a systematic sample of t, and noise from a uniform number per token. The arguments alone decide it."""
    last = len(schedule.mask) - 1
    rng = np.random.default_rng([seed, num_tokens])
    step = np.sort(systematic_sample(last, num_samples, rng.integers(last))) + 1
    u = rng.random((num_samples, num_tokens))
    mask, replace = (x.numpy()[step][:, None] for x in (schedule.mask, schedule.replace))
    count = np.bincount(step)[step]
    return Noise(step, u < mask, (u >= mask) & (u < mask + schedule.vocab_size * replace),
                 rng.integers(schedule.vocab_size, size=u.shape), 1 / count / len(np.unique(step)))


def bound_of_draws(call: Call, noise: Mapping[int, Noise], schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Return T times the bound's term of captions [R, L]: for each draw, [R, K], and for each token as a mean, [R, L].

    Args: `noise` has N as its keys. The host waits for the device once.
    """
    lengths, text = target_tokens(call.text, schedule.vocab_size).sum(1).numpy(), call.text.numpy()
    to_device = call.to_device
    num_draws, last = len(next(iter(noise.values())).step), len(schedule.mask) - 1
    # J = captions with tokens * K pairs of a caption (its row in the text) and a draw.
    row = (lengths > 0).nonzero()[0].repeat(num_draws)
    draw = np.tile(np.arange(num_draws), len(row) // num_draws)
    tokens = torch.zeros(text.shape, dtype=torch.float64, device=call.device)

    def score(index: np.ndarray, token_logits: TokenLogits) -> tuple[np.ndarray, Tensor]:
        # A row that only fills up the call has index -1. It counts as a caption without tokens.
        number = np.where(index >= 0, lengths[row[index]], 0)  # N of each row, [R]
        truth = text[row[index], :number.max() + 1]
        # [R, longest + 1]: SOT stays, and tokens behind a caption's end are never asked for.
        x_t, predicted = truth.copy(), np.zeros(truth.shape, dtype=bool)
        step, weight = np.ones_like(index), np.zeros(len(index))
        for n in np.unique(number[number > 0]).tolist():  # captions of one length share their noise
            own, drawn = number == n, noise[n]
            at = draw[index[own]]
            replaced = np.where(drawn.replaced[at], drawn.other[at], truth[own, 1:n + 1])
            x_t[own, 1:n + 1] = np.where(drawn.masked[at], mask_id(schedule.vocab_size), replaced)
            predicted[own, 1:n + 1] = drawn.masked[at] if schedule.absorbing else True
            step[own], weight[own] = drawn.step[at], drawn.weight[at]
        places, truth = predicted.ravel().nonzero()[0], truth.ravel()  # [M] into R*(longest + 1)
        log_p = token_logits(to_device(x_t), to_device(places), to_device(step)).log_softmax(1)  # [M, V]
        kl = last * bound_terms(log_p, to_device(truth[places]), to_device(x_t.flat[places]),
                                to_device(step[places // x_t.shape[1]]), schedule).double()
        # Back to places, [R, longest + 1], for the sums by token and by draw.
        per_token_kl = scatter_flat(kl.new_zeros(x_t.shape), to_device(places), kl)
        tokens[:, :x_t.shape[1]].index_add_(0, to_device(row[index]), per_token_kl * to_device(weight)[:, None])
        return index, per_token_kl.sum(1)

    values = score_draws(call, call.image[row], lengths[row] + 1, score)
    # One copy brings both to the host, so that it waits once.
    both = torch.cat((values, tokens.flatten())).cpu().numpy()
    found = np.zeros((len(text), num_draws))
    found[row, draw] = both[:len(row)]
    return found, both[len(row):].reshape(text.shape)


def bound(call: Call, options: Scoring) -> Likelihood:
    """Return an unbiased estimate of each caption's bound, with its standard error.

    `options.num_samples` must be T or more to draw every t, and 2T or more for an exact standard error.
    """
    _, text, vocab_size = call.rows
    process, on_cpu = (call.model.objective.schedule(vocab_size, device) for device in (call.device, text.device))
    prior, steps = prior_kl(on_cpu), len(on_cpu.mask) - 1
    lengths = target_tokens(text, vocab_size).sum(1).numpy()
    noise = {n: draw_noise(n, options.num_samples, options.seed, on_cpu)
             for n in np.unique(lengths[lengths > 0]).tolist()}
    score, error, per_token = np.zeros(len(text)), np.zeros(len(text)), np.zeros(text.shape)
    if noise:
        values, tokens = bound_of_draws(call, noise, process)
    for n, drawn in noise.items():
        rows = (lengths == n).nonzero()[0]
        draws = Draws(drawn.masked, drawn.step - 1, np.full(steps, np.inf))
        score[rows], error[rows] = estimate(-values[rows] / n - prior, draws)
        per_token[rows, 1:n + 1] = -tokens[rows, 1:n + 1] - prior
    return estimated(call.device, score, error, options.num_samples * (lengths > 0), per_token)
