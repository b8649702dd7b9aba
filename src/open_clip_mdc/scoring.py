"""Likelihoods of captions (Sec. 4.2): autoregressive (Eq. 7), Monte Carlo (Eq. 8), in order of confidence (heuristic).

The estimators are functions of captions and a `TokenLogits`, the decoder with the image built in; `log_likelihood`
runs them for a batch of images with any number of candidate captions each, within a memory budget. SOT is given;
every other token is scored, EOT included: a caption of N words and marks has N + 1 terms.

    autoregressive   1 decoder call a caption, causal models
    heuristic        N calls: start fully masked; at each step score the true token where the model is surest of
                     anything, and reveal it
    monte_carlo      up to `num_samples` calls: an unbiased estimate of the lower bound of Eq. 8, with standard error

Dimensions: B images, C candidates of an image, R captions (rows), L positions, N scored tokens of a caption, K draws,
S mask counts, M asked tokens, P patches, D width, V vocabulary.
"""
import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import stdtrit
from torch import Tensor

from .tokens import PAD_ID, eot_id, mask_id, scored_tokens, sot_id, valid_tokens

# (text [R, L], valid [R, L], asked [R, L]) -> logits [M, V] in row-major order of `asked`, as Captioner.token_logits.
# With the keys and values of I images, R/I consecutive rows belong to each.
TokenLogits = Callable[[Tensor, Tensor, Tensor], Tensor]

METHODS = ("autoregressive", "heuristic", "monte_carlo")
FIRST_ROUND = 4  # draws per mask count before early stopping looks for the first time; doubled from look to look
MIB = 2 ** 20
MAX_ENUMERATED = 16  # masks are drawn without replacement where there are at most this many times the draws


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
    valid, scored = valid_tokens(text, vocab_size), scored_tokens(text, vocab_size)
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
    valid, masked = valid_tokens(text, vocab_size), scored_tokens(text, vocab_size)
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


# ---- Eq. 8

class Draws(NamedTuple):
    """Random masks for all captions of one length. Each prefix of whole repeats is such a set of draws, too."""

    hidden: np.ndarray  # bool [K, N]
    stratum: np.ndarray  # long [K] in [0, S), which of the S mask counts a draw has
    repeat: np.ndarray  # long [K], ascending: how many draws of this count came before
    population: np.ndarray  # float [S], how many masks of a count they are drawn from; inf: with replacement


def mask_counts(num_tokens: int, interval: tuple[float, float] | None = None) -> range:
    """The mask counts n with t_min * N <= n <= t_max * N, at least one, at most 1..N."""
    t_min, t_max = interval or (0.0, 1.0)
    low = max(1, math.ceil(t_min * num_tokens - 1e-9))
    return range(low, max(low, math.floor(t_max * num_tokens + 1e-9)) + 1)


def systematic_sample(size: int, draws: int, start: int) -> np.ndarray:
    """Integers spread evenly over [0, size), long [draws]; over all starts in [0, size) each one is equally frequent.

    Rounding an evenly spaced real grid instead, as others do, is biased for many sizes and numbers of draws.
    """
    return (start + np.arange(draws) * size // draws) % size


@lru_cache(maxsize=256)
def draw_masks(num_tokens: int, num_samples: int, seed: int = 0, interval: tuple[float, float] | None = None) -> Draws:
    """At most `num_samples` random masks, equally often of each mask count.

    The counts are a systematic sample from a random start: every count has the same expected number of draws whatever
    their total, and the numbers differ by at most one. Of a count that has few masks each is drawn at most once; once
    all are drawn nothing is left to chance, and short captions need fewer draws than asked for.

    Depends on nothing but its arguments: all candidates of equal length, in any batch, get the same masks.
    """
    counts = mask_counts(num_tokens, interval)
    rng = np.random.default_rng([seed, num_tokens])
    sample = systematic_sample(len(counts), num_samples, rng.integers(len(counts)))
    hidden, stratum, repeat, population = [], [], [], []
    for s, (n, size) in enumerate(zip(counts, np.bincount(sample, minlength=len(counts)), strict=True)):
        num_masks = math.comb(num_tokens, n)
        if num_masks <= MAX_ENUMERATED * size:
            positions = rng.permutation(np.array(list(combinations(range(num_tokens), n))))[:size]
            population.append(float(num_masks))
        else:
            positions = rng.random((size, num_tokens)).argsort(axis=1)[:, :n]
            population.append(math.inf)
        masks = np.zeros((len(positions), num_tokens), dtype=bool)
        np.put_along_axis(masks, positions, True, axis=1)
        hidden.append(masks)
        stratum.append(np.full(len(masks), s))
        repeat.append(np.arange(len(masks)))
    ascending = np.concatenate(repeat).argsort(kind="stable")
    return Draws(np.concatenate(hidden)[ascending], np.concatenate(stratum)[ascending],
                 np.concatenate(repeat)[ascending], np.array(population))


def estimate(values: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eq. 8 from the first draws: N times the mean over mask counts of the mean over a count's draws.

    The standard error is that of a stratified sample, from the spread within each count and with the finite population
    correction. With a single draw of some count there is no such spread, and the spread between the counts stands in:
    too large by the trend over n, and no estimate at all (inf) from a single count.

    Args:
        values: float64 [R, K], mean log-likelihood of the hidden tokens in each draw; K may be fewer than all draws.

    Returns:
        estimate, standard error and its degrees of freedom (Satterthwaite), float64 [R] each.
    """
    member = np.eye(len(draws.population))[draws.stratum[:values.shape[1]]]  # [K, S]
    size = member.sum(0)
    drawn = size > 0
    member, size, population = member[:, drawn], size[drawn], draws.population[drawn]
    mean = values @ member / size  # [R, S]
    if drawn.all() and ((size > 1) | (size >= population)).all():
        spread = (values - mean @ member.T) ** 2 @ member / np.maximum(size - 1, 1)
        variance = spread / size * (1 - size / population) / len(size) ** 2  # [R, S]
        total = variance.sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            freedom = total ** 2 / (variance ** 2 / np.maximum(size - 1, 1)).sum(1)
        freedom[total == 0] = math.inf
    elif len(size) > 1:
        total = mean.var(axis=1, ddof=1) / len(size)
        freedom = np.full(len(mean), len(size) - 1.0)
    else:
        total, freedom = np.full(len(mean), math.inf), np.ones(len(mean))
    num_tokens = draws.hidden.shape[1]
    return num_tokens * mean.mean(1), num_tokens * np.sqrt(total), freedom


def _hidden_log_likelihood(token_logits: TokenLogits, text: Tensor, hidden: Tensor, vocab_size: int,
                           max_tokens: int) -> np.ndarray:
    """Mean log-likelihood of the hidden tokens, float64 [R, K], for captions [R, N + 1] and masks [K, N]."""
    rows, length = text.shape
    values = []
    for index in torch.arange(rows * len(hidden), device=text.device).split(max(1, max_tokens // length)):
        truth = text[index // len(hidden)]
        asked = F.pad(hidden[index % len(hidden)], (1, 0))
        logits = token_logits(truth.masked_fill(asked, mask_id(vocab_size)), torch.ones_like(asked), asked)
        log_prob = torch.zeros(asked.shape, device=text.device)
        log_prob[asked] = token_log_prob(logits, truth[asked])
        values.append((log_prob.sum(1) / asked.sum(1)).cpu())
        del logits
    return torch.cat(values).double().numpy().reshape(rows, -1)


def monte_carlo(
        token_logits: TokenLogits,
        text: Tensor,
        vocab_size: int,
        num_samples: int = 1024,
        seed: int = 0,
        interval: tuple[float, float] | None = None,
        stop_confidence: float | None = None,
        max_tokens: int = 4096,
) -> Likelihood:
    """The bound of Eq. 8 for the candidate captions of one image, estimated with common random masks.

    Unbiased for every number of draws. Candidates of equal length share their masks, so that their difference is more
    certain than either score. The masks depend on (seed, length) alone; errors are thus not independent over images.

    With `interval`, only mask counts between t_min * N and t_max * N are drawn, those the model was trained on, and
    their mean stands for the mean over all counts: the training objective per caption rather than Eq. 8. It is a bound
    still where t_max = 1 and the model predicts better the more it sees.

    With `stop_confidence`, candidates drop out as soon as they are behind the leader for certain, and drawing stops
    when only the leader is left. A look after 4, 8, 16, ... draws of each mask count tests the difference to the
    leader with Student's t, draw by draw for equal lengths and by both standard errors otherwise; the error
    probability is divided by looks and rivals. The score of a candidate that dropped out is as rough as its standard
    error says.

    Args:
        token_logits: of a bidirectional model and one image.
        text: long [R, L], the image's candidates; without scored tokens a row gets 0 and takes no part.
        num_samples: draws per caption, at most.
        interval: (t_min, t_max).
        stop_confidence: e.g. 0.999; None draws all.
        max_tokens: tokens per decoder call.
    """
    lengths = scored_tokens(text, vocab_size).sum(1).cpu().numpy()
    values = np.zeros((len(text), num_samples))
    used = np.zeros(len(text), dtype=int)
    score, error, freedom = np.zeros(len(text)), np.zeros(len(text)), np.full(len(text), math.inf)
    draws = {n: draw_masks(n, num_samples, seed, interval) for n in np.unique(lengths[lengths > 0]).tolist()}
    running = lengths > 0
    rivals = int(running.sum()) - 1
    most = max((d.repeat[-1] + 1 for d in draws.values()), default=0)
    looks = [most]
    if stop_confidence is not None and rivals > 0:
        looks = [FIRST_ROUND << i for i in range(64) if FIRST_ROUND << i < most] + looks
    for look in looks:
        for n in np.unique(lengths[running]).tolist():
            rows = (running & (lengths == n)).nonzero()[0]
            start, stop = used[rows[0]], int(np.searchsorted(draws[n].repeat, look))
            if start < stop:
                captions = text[torch.from_numpy(rows).to(text.device), :n + 1]
                hidden = torch.from_numpy(draws[n].hidden[start:stop]).to(text.device)
                values[rows, start:stop] = _hidden_log_likelihood(
                    token_logits, captions, hidden, vocab_size, max_tokens)
                used[rows] = stop
                score[rows], error[rows], freedom[rows] = estimate(values[rows, :stop], draws[n])
        if look == most:
            break
        leader = np.where(running, score, -math.inf).argmax()
        gap, gap_error = score[leader] - score, np.hypot(error[leader], error)
        gap_freedom = np.minimum(freedom[leader], freedom)
        paired = running & (lengths == lengths[leader])
        difference = values[leader, :used[leader]] - values[paired, :used[leader]]
        gap[paired], gap_error[paired], gap_freedom[paired] = estimate(difference, draws[lengths[leader]])
        error_probability = (1 - stop_confidence) / (rivals * len(looks))
        behind = gap > stdtrit(np.minimum(gap_freedom, 1e6), 1 - error_probability) * gap_error
        running &= ~behind
        if running.sum() == 1:
            break

    def to_tensor(x, dtype=torch.float32):
        return torch.as_tensor(x, dtype=dtype).to(text.device)

    return Likelihood(to_tensor(score), standard_error=to_tensor(error), draws=to_tensor(used, torch.long))


# ---- a batch of images

def mean_image(model, images: Iterable[Tensor]) -> Tensor:
    """The image of the blind score: patch tokens averaged over images, place by place, [P, D].

    In the image's place they turn p(caption | image) into a guess of p(caption). The alternatives guess worse: for
    two-object scenes, whose captions are equally likely (-6.2 nats), a small MDC gave -10.7 with the mean image, -11.8
    without cross-attention, an input that decoders have in every training step, and -13.3 with a grey picture. Use
    some hundred pictures of the data that is scored: the mean of one picture is that picture.

    Args:
        model: a Captioner.
        images: batches [B, 3, height, width].

    Raises:
        ValueError: there is no image.
    """
    total, count = 0, 0
    with torch.no_grad():
        for batch in images:
            image_embs = model.encode_image_tokens(batch)
            total = total + image_embs.float().sum(0)
            count += len(batch)
    if not count:
        raise ValueError("the mean image needs at least one image")
    return (total / count).to(image_embs.dtype)


@torch.inference_mode()
def log_likelihood(
        model,
        image: Tensor | None,
        text: Tensor,
        method: str | None = None,
        num_samples: int = 1024,
        seed: int = 0,
        interval: tuple[float, float] | None = None,
        stop_confidence: float | None = None,
        blind: Tensor | None = None,
        memory_mib: int = 512,
        return_details: bool = False,
) -> Tensor | Likelihood:
    """log p(caption | image) in nats, exact or estimated, for any number of candidate captions per image.

    An image is encoded once, and its keys and values are projected once for all candidates, steps and draws. Scores
    depend on nothing else in the batch, and equal candidates of an image get equal scores: they are scored once.

    Args:
        model: a Captioner; it stays in the mode it is in (use `model.eval()`).
        image: [B, 3, height, width]; ignored, and may be None, with `blind`.
        text: long [B, L] or [B, C, L] as the tokenizer makes it: SOT, tokens, EOT, anything.
        method: "autoregressive" for causal models (Eq. 7), "heuristic" or "monte_carlo" (Eq. 8) for the others;
            None is "autoregressive" or "heuristic".
        num_samples, seed, interval, stop_confidence: see `monte_carlo`.
        blind: `mean_image(...)`, [P, D], stands for all images: the text prior, for log p(c | i) - alpha * log p(c).
        memory_mib: what decoding may take beyond the weights, the encoder's share and the result; less is slower.
        return_details: the whole `Likelihood` instead of its first field.

    Returns:
        float32 [B] or [B, C], or a Likelihood of such tensors.

    Raises:
        ValueError: the method or one of its options does not fit the model, a caption does not run from SOT to EOT,
            or the memory is too little for one caption.
    """
    method = method or ("autoregressive" if model.causal else "heuristic")
    _check_options(model, method, num_samples, interval, stop_confidence)
    image_embs = model.encode_image_tokens(image) if blind is None else blind.expand(len(text), -1, -1)
    if len(image_embs) != len(text):
        raise ValueError(f"text holds the captions of {len(text)} images, but there are {len(image_embs)}")
    captions, first = _unique_captions((text if text.ndim == 3 else text[:, None]).to(image_embs.device),
                                       model.vocab_size)
    images_per_call, captions_per_call, max_tokens = _chunk_sizes(model, image_embs, captions, memory_mib)
    estimator = autoregressive if method == "autoregressive" else heuristic
    if method == "monte_carlo":
        images_per_call, captions_per_call = 1, captions.shape[1]  # it cuts its draws into calls itself
        estimator = partial(monte_carlo, num_samples=num_samples, seed=seed, interval=interval and tuple(interval),
                            stop_confidence=stop_confidence, max_tokens=max_tokens)

    groups = []
    for rows, embs in zip(captions.split(images_per_call), image_embs.split(images_per_call), strict=True):
        token_logits = partial(model.token_logits, model.text.project_image(embs))
        parts = [_score(estimator, token_logits, part, model.vocab_size) for part in rows.split(captions_per_call, 1)]
        groups.append(_each(lambda *x: torch.cat(x, 1), *parts))
    result = _each(lambda *x: torch.cat(x), *groups)

    def finish(x: Tensor) -> Tensor:
        """Copies the scores of repeated candidates and restores the shape of `text`."""
        x = torch.take_along_dim(x, first if x.ndim == 2 else first[..., None], 1)
        if x.ndim == 3:
            x = F.pad(x, (0, text.shape[-1] - x.shape[-1]), value=-1 if x.dtype == torch.long else 0)
        return x if text.ndim == 3 else x.squeeze(1)

    result = _each(finish, result)
    return result if return_details else result.log_likelihood


def _check_options(model, method: str, num_samples: int, interval: tuple[float, float] | None,
                   stop_confidence: float | None) -> None:
    """Raises ValueError in one line."""
    fitting = METHODS[:1] if model.causal else METHODS[1:]
    if method not in fitting:
        kind = "from left to right" if model.causal else "in both directions"
        raise ValueError(f"method {method!r} does not fit: this model reads captions {kind}; "
                         f"choose {' or '.join(map(repr, fitting))}")
    if method != "monte_carlo" and not (interval is None and stop_confidence is None):
        raise ValueError(f"interval and stop_confidence are options of method 'monte_carlo', not of {method!r}")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, not {num_samples}")
    if interval is not None and not 0 <= interval[0] <= interval[1] <= 1:
        raise ValueError(f"interval must be (t_min, t_max) with 0 <= t_min <= t_max <= 1, not {interval}")
    if stop_confidence is not None and not 0 < stop_confidence < 1:
        raise ValueError(f"stop_confidence must lie between 0 and 1, not {stop_confidence}")


def _unique_captions(text: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Captions [B, C, L] cut to the longest and cleared of padding, and the first candidate [B, C] equal to each.

    A candidate that repeats an earlier one becomes a lone EOT, which has no scored token and costs next to nothing.
    """
    eot = eot_id(vocab_size)
    broken = ((text[..., 0] != sot_id(vocab_size)) | ~(text == eot).any(-1)).nonzero().tolist()
    if broken:
        raise ValueError(f"candidate {broken[0][1]} of image {broken[0][0]} does not run from SOT ({eot - 1}) to EOT "
                         f"({eot}): tokenize captions with the model's own tokenizer")
    valid = valid_tokens(text, vocab_size)
    text = text.masked_fill(~valid, PAD_ID)[..., :int(valid.sum(-1).max())]
    first = []
    for captions in text.cpu().numpy():
        seen: dict[bytes, int] = {}
        first.append([seen.setdefault(caption.tobytes(), c) for c, caption in enumerate(captions)])
    first = torch.tensor(first, device=text.device)
    repeats = first != torch.arange(text.shape[1], device=text.device)
    return text.masked_fill(repeats[..., None], eot), first


def _chunk_sizes(model, image_embs: Tensor, captions: Tensor, memory_mib: int) -> tuple[int, int, int]:
    """Images and captions per image of a decoder call, and tokens per call for one image, that fit the budget.

    Counted are, per token, its logits, two float32 copies of them and some 16 vectors of the decoder's width (the MLP's
    hidden layer is 4 wide); per image, keys and values of all layers.
    """
    vocab_size, width = model.text.output.weight.shape
    element = image_embs.element_size()
    token_bytes = vocab_size * (element + 8) + 16 * width * element
    image_bytes = 2 * len(model.text.blocks) * image_embs.shape[1] * width * element
    budget = memory_mib * MIB
    candidates, length = captions.shape[1:]
    max_tokens = (budget - image_bytes) // token_bytes
    if max_tokens < length:
        needed = math.ceil((image_bytes + length * token_bytes) / MIB)
        raise ValueError(f"memory_mib={memory_mib} is too little: a caption of {length} tokens takes {needed} MiB")
    images = max(1, budget // (image_bytes + candidates * length * token_bytes))
    return images, min(candidates, max_tokens // length), max_tokens


def _each(function: Callable[..., Tensor], *parts: Likelihood) -> Likelihood:
    """Applies a function field by field; what an estimator does not know stays None."""
    return Likelihood(*(None if fields[0] is None else function(*fields) for fields in zip(*parts, strict=True)))


def _score(estimator: Callable[..., Likelihood], token_logits: TokenLogits, captions: Tensor,
           vocab_size: int) -> Likelihood:
    """Fields [I, C, ...] of captions [I, C, L], whose estimator takes rows."""
    return _each(lambda x: x.unflatten(0, captions.shape[:2]),
                 estimator(token_logits, captions.flatten(0, 1), vocab_size))
