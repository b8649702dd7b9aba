"""Masked diffusion decoding: [MASK] tokens are revealed in the order of the model's confidence (Eq. 6, Sec. 3.2).

`generate` is the entry for a model and images; `unmask_by_confidence` the algorithm, which knows the network by one
function, `TokenLogits`, and can therefore be run on a table written by hand.

Dimensions: B images, C candidate captions per image, R rows, L positions, M masked tokens, V vocabulary.
"""
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .beam import sample_tokens, search_images
from .estimators import TokenLogits
from .tokens import PAD_ID, caption_lengths, eot_id, mask_id, sot_id, valid_tokens

if TYPE_CHECKING:
    from .model import Captioner

Score = Callable[["Captioner", Tensor, Tensor], Tensor]  # (model, image, text [B, C, L]) -> [B, C], higher is better

AUTO_LENGTHS = range(8, 21)


class Unmasked(NamedTuple):
    """Decoded captions and how they came about."""

    text: Tensor  # long [R, L], no mask ids
    step: Tensor  # long [R, L], the step that revealed the token, from 0; -1 where it was given
    log_prob: Tensor  # float32 [R, L], of the token when it was revealed, temperature 1; 0 where it was given

    @property
    def log_likelihood(self) -> Tensor:
        """By the chain rule along the order of decoding, [R]: with one token per step the paper's heuristic score."""
        return self.log_prob.sum(-1)


def cosine_schedule(tokens: int, steps: int) -> list[int]:
    """How many tokens to reveal at each step: few at first, when little is known (MaskGIT's cosine schedule).

    Returns:
        `steps` counts >= 1 with sum `tokens`.

    Raises:
        ValueError: unless 1 <= steps <= tokens.
    """
    if not 1 <= steps <= tokens:
        raise ValueError(f"{tokens} tokens cannot be revealed in {steps} steps of at least one token")
    left, counts = tokens, []
    for step in range(1, steps + 1):
        masked = math.floor(tokens * math.cos(math.pi / 2 * step / steps))
        count = min(max(left - masked, 1), left - (steps - step))
        counts.append(count)
        left -= count
    return counts


def rank(log_probs: Tensor, allowed: Tensor, confidence: str) -> Tensor:
    """How sure the model is at each masked position, [M], the higher the surer.

    Args:
        log_probs: float [M, V].
        allowed: the same, -inf for tokens that may not be chosen.
        confidence: see `unmask_by_confidence`.
    """
    if confidence == "probability":
        return allowed.amax(1)  # the logarithm: the same order, without underflow
    if confidence == "margin":
        best = allowed.topk(2).values.exp()
        return best[:, 0] - best[:, 1]
    return -torch.special.entr(log_probs.exp()).sum(1)


@torch.no_grad()
def unmask_by_confidence(
        token_logits: TokenLogits,
        text: Tensor,
        valid: Tensor,
        vocab_size: int,
        tokens_per_step: int | Sequence[int] = 1,
        confidence: str = "probability",
        forbidden: Sequence[int] = (),
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
) -> Unmasked:
    """Replaces every [MASK], the most confident first; what is revealed stays (Eq. 6).

    Each step asks for the logits of the masked positions only, and reveals the k of each row where the model is most
    confident, the leftmost of equals. The paper's decoding is k = 1, greedy, by probability.

    The order looks at distributions, not at drawn tokens: with k = 1 and temperature 1 this samples from the model.
    (To draw everywhere and keep the most probable draw, as MaskGIT and LLaDA do, favours probable tokens.)

    Args:
        token_logits: the network.
        text: ids, mask_id where a token is to be found, long [R, L].
        valid: bool [R, L], what is no padding.
        tokens_per_step: k; or a schedule, k of each step, of which the last is repeated until nothing is masked.
        confidence: of a position: "probability" of its most probable token, "margin" between the two most probable, or
            "entropy" (its negative).
        forbidden: ids that may not be chosen. Probabilities are not renormalised without them, so that a position that
            longs for one is not confident.
        temperature: 0 takes the most probable token (the lowest id of equals), more draws one (`sample_tokens`).
        top_k, top_p, generator: see `sample_tokens`.

    Raises:
        ValueError: if an argument is out of range, or padding is masked.
    """
    schedule = (tokens_per_step,) if isinstance(tokens_per_step, int) else tuple(tokens_per_step)
    if not schedule or min(schedule) < 1:
        raise ValueError(f"tokens_per_step is {tokens_per_step}; every step must reveal at least one token")
    if confidence not in ("probability", "margin", "entropy"):
        raise ValueError(f"confidence is {confidence!r}; it must be 'probability', 'margin' or 'entropy'")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or more")
    masked = text == mask_id(vocab_size)
    if (masked & ~valid).any():
        raise ValueError("a [MASK] stands in the padding, after the caption's end")

    step = torch.full_like(text, -1)
    log_prob = torch.zeros(text.shape, device=text.device)
    for number in range(int(masked.sum(1).max())):
        if not masked.any():
            break
        count = schedule[min(number, len(schedule) - 1)]
        log_probs = token_logits(text, valid, masked).float().log_softmax(1)
        allowed = log_probs.index_fill(1, torch.tensor(forbidden, dtype=torch.long, device=text.device), -torch.inf)
        order = torch.full_like(log_prob, -torch.inf).masked_scatter(masked, rank(log_probs, allowed, confidence))
        surest = order.argsort(dim=1, descending=True, stable=True)[:, :count]
        chosen = torch.zeros_like(masked).scatter(1, surest, True) & masked
        allowed = allowed[chosen[masked]]  # [chosen, V]
        token = sample_tokens(allowed, temperature, top_k, top_p, generator) if temperature else allowed.argmax(1)
        text = text.masked_scatter(chosen, token)
        log_prob = log_prob.masked_scatter(chosen, allowed.gather(1, token[:, None]))
        step = step.masked_fill(chosen, number)
        masked = masked & ~chosen
    return Unmasked(text, step, log_prob)


def fully_masked(lengths: Tensor, vocab_size: int, force_eot: bool = True) -> tuple[Tensor, Tensor]:
    """SOT, as many masks as asked for and, if forced, EOT.

    Args:
        lengths: long [B].

    Returns:
        text: long [B, L], padded.
        valid: bool [B, L].
    """
    position = torch.arange(int(lengths.max()) + 1 + force_eot, device=lengths.device)
    end = lengths[:, None] + 1
    text = torch.full((len(lengths), len(position)), PAD_ID, device=lengths.device)
    text = text.masked_fill(position < end, mask_id(vocab_size))
    if force_eot:
        text = text.masked_fill(position == end, eot_id(vocab_size))
    text[:, 0] = sot_id(vocab_size)
    return text, position < end + force_eot


def surest_length(token_logits: TokenLogits, lengths: Sequence[int], batch_size: int, vocab_size: int,
                  force_eot: bool, forbidden: Sequence[int], device: torch.device | str) -> Tensor:
    """The length at which the model is surest of an image's caption before a word of it stands, long [B].

    One look at each length, all masked: the mean over positions of the highest log-probability, that is the likelihood
    per token of decoding in one step. A masked diffusion captioner models captions given image *and length*, never how
    likely a length is, so that nothing it says about captions of different length compares strictly, and all its
    likelihoods per token lean towards the short end: the lengths to choose from are part of the method.
    """
    forbidden = torch.tensor(forbidden, dtype=torch.long, device=device)
    sureness = []
    for length in lengths:
        text, valid = fully_masked(torch.full((batch_size,), length, device=device), vocab_size, force_eot)
        log_probs = token_logits(text, valid, text == mask_id(vocab_size)).float().log_softmax(1)
        sureness.append(log_probs.index_fill(1, forbidden, -torch.inf).amax(1).view(batch_size, length).mean(1))
    return torch.tensor(lengths, device=device)[torch.stack(sureness, dim=1).argmax(1)]


def tokenize_with_masks(tokenizer: Callable, templates: str | list[str], context_length: int | None = None) -> Tensor:
    """Ids of captions with gaps, "a [MASK] dog on a [MASK]": one [MASK] stands for one token.

    Args:
        tokenizer: an OpenCLIP SimpleTokenizer.
        context_length: the tokenizer's own if None.

    Returns:
        SOT to EOT, then padding, long [B, context_length].

    Raises:
        ValueError: if a template does not fit, as cutting it would lose words that were asked for.
    """
    context_length = context_length or tokenizer.context_length
    templates = [templates] if isinstance(templates, str) else templates
    text = torch.full((len(templates), context_length), PAD_ID)
    for row, template in zip(text, templates, strict=True):
        ids = [sot_id(tokenizer.vocab_size)]
        for i, part in enumerate(template.split("[MASK]")):
            ids += [mask_id(tokenizer.vocab_size)] * (i > 0) + tokenizer.encode(part)
        ids.append(eot_id(tokenizer.vocab_size))
        if len(ids) > context_length:
            raise ValueError(f"{template!r} has {len(ids)} tokens with SOT and EOT; {context_length} fit")
        row[:len(ids)] = torch.tensor(ids)
    return text


def guided(conditional: TokenLogits, blind: TokenLogits, guidance: float) -> TokenLogits:
    """Classifier-free guidance: blind + (1 + guidance) (conditional - blind), on log-probabilities.

    Guidance 0 is the conditional model, and more leans towards what only the image explains.
    """
    def token_logits(text: Tensor, valid: Tensor, asked: Tensor) -> Tensor:
        with_image = conditional(text, valid, asked).float().log_softmax(1)
        without = blind(text, valid, asked).float().log_softmax(1)
        return without + (1 + guidance) * (with_image - without)

    return token_logits


def end_at_eot(decoded: Unmasked, valid: Tensor, vocab_size: int) -> Unmasked:
    """Cuts captions after their first EOT and ends those that have none by one: [R, L] -> [R, L + 1]."""
    text = F.pad(decoded.text.masked_fill(~valid, eot_id(vocab_size)), (0, 1), value=eot_id(vocab_size))
    kept = valid_tokens(text, vocab_size)
    step, log_prob = F.pad(decoded.step, (0, 1), value=-1), F.pad(decoded.log_prob, (0, 1))
    return Unmasked(text.where(kept, PAD_ID), step.where(kept, -1), log_prob.where(kept, 0.0))


def unmask_images(
        model: "Captioner",
        image: Tensor,
        length: int | str | Sequence[int] = 15,
        text: Tensor | None = None,
        tokens_per_step: int | Sequence[int] = 1,
        confidence: str = "probability",
        force_eot: bool = True,
        guidance: float = 0.0,
        blind: Tensor | None = None,
        num_candidates: int = 1,
        score: Score | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        return_trace: bool = False,
) -> Tensor | Unmasked:
    """Captions of images by masked diffusion decoding; the images are encoded and projected once.

    Args:
        image: [B, 3, height, width], preprocessed.
        length: N' of the paper, how many tokens are generated (SOT is not); or a sequence, of which each image gets the
            one that `surest_length` chooses; "auto" is `AUTO_LENGTHS`.
        text: captions to fill in instead, long [B, L] or [1, L] (`tokenize_with_masks`); `length` is then not used.
        tokens_per_step, confidence: see `unmask_by_confidence`.
        force_eot: EOT is given, right after the N' tokens, and none of them may be EOT: the caption has exactly N'
            tokens before EOT. False: EOT is one of the N' tokens to predict. The decoder does not see padding, so it
            knows where a caption ends and nearly always puts EOT there; where it puts it earlier, the caption is cut.
        guidance: strength of classifier-free guidance (`guided`); 0 runs no blind pass.
        blind: what guidance takes for no image, `scoring.mean_image(...)`, [P, D].
        num_candidates: captions drawn per image, at a temperature > 0; the one of highest `score` is kept.
        score: compares candidates, e.g. `scoring.log_likelihood`; by default `Unmasked.log_likelihood`, which is free.
        temperature, top_k, top_p, generator: see `unmask_by_confidence`.
        return_trace: return `Unmasked`, with the step and the log-probability of every token, rather than ids.

    Returns:
        ids from SOT to EOT, then padding, long [B, L]; no mask ids.

    Raises:
        ValueError: if an argument is out of range.
    """
    vocab_size, longest = model.vocab_size, model.context_length - 1 - force_eot
    lengths = (length,) if isinstance(length, int) else length
    if length == "auto":
        lengths = [n for n in AUTO_LENGTHS if n <= longest]
    if text is None and (isinstance(lengths, str) or not lengths or min(lengths) < 1 or max(lengths) > longest):
        raise ValueError(f"length is {length!r}; it must be 'auto' or numbers of tokens from 1 to {longest}")
    if num_candidates < 1 or (num_candidates > 1 and temperature == 0):
        raise ValueError(f"num_candidates is {num_candidates}; it must be 1 at temperature 0, where all are equal")
    if text is not None and len(text) not in (1, len(image)):
        raise ValueError(f"there are {len(image)} images, but {len(text)} texts to fill in; "
                         "give one each, or one for all")
    if text is not None and force_eot and not (text == eot_id(vocab_size)).any(-1).all():
        raise ValueError("a text to fill in has no EOT; add it, or let it be predicted with force_eot=False")

    if guidance and blind is None:
        raise ValueError("guidance needs to know what no image is: blind=scoring.mean_image(model, images)")

    image_kv = model.text.project_image(model.encode_image_tokens(image))
    token_logits = partial(model.token_logits, image_kv)
    if guidance:
        blind_kv = model.text.project_image(blind[None])  # of one image, which serves any rows
        token_logits = guided(token_logits, partial(model.token_logits, blind_kv), guidance)
    forbidden = (sot_id(vocab_size), eot_id(vocab_size))[:1 + force_eot]
    if text is not None:
        start, valid = text.expand(len(image), -1), valid_tokens(text, vocab_size).expand(len(image), -1)
    else:
        chosen = torch.full((len(image),), lengths[0], device=image.device) if len(lengths) == 1 else surest_length(
            token_logits, lengths, len(image), vocab_size, force_eot, forbidden, image.device)
        start, valid = fully_masked(chosen, vocab_size, force_eot)
    candidates = [
        end_at_eot(unmask_by_confidence(token_logits, start, valid, vocab_size, tokens_per_step, confidence, forbidden,
                                        temperature, top_k, top_p, generator), valid, vocab_size)
        for _ in range(num_candidates)]

    decoded = Unmasked(*(torch.stack(part, dim=1) for part in zip(*candidates, strict=True)))  # [B, C, L]
    value = decoded.log_likelihood if score is None else score(model, image, decoded.text)
    best = value.argmax(1)
    decoded = Unmasked(*(part[torch.arange(len(image)), best] for part in decoded))
    decoded = Unmasked(*(part[:, :caption_lengths(decoded.text, vocab_size).max()] for part in decoded))
    return decoded if return_trace else decoded.text


@torch.no_grad()
def generate(model: "Captioner", image: Tensor, **options) -> Tensor | Unmasked:
    """Captions of images, as ids from SOT to EOT, then padding, long [B, L], like `CoCa.generate`.

    Args:
        image: [B, 3, height, width], preprocessed.
        options: of `unmask_images` for a masked diffusion captioner, of `beam.search_images` for one that reads left to
            right. Both know `length`, `temperature`, `top_k`, `top_p` and `generator`.
    """
    was_training = model.training
    model.eval()
    try:
        return (search_images if model.causal else unmask_images)(model, image, **options)
    finally:
        model.train(was_training)
