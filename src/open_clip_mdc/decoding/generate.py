"""Captions images: masked diffusion decoding (Eq. 6), or search from left to right for a causal model (Sec. 3.2).

An image is encoded once, and its keys and values are computed once. If guidance masks image features, it is twice.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, P patches, D image width, S lengths.
"""
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..models.captioner import Captioner
from ..models.interface import ImageKV, Network, StepLogits
from ..objectives.replace_process import make_schedule
from ..objectives.times import mask_condition
from ..text.special_tokens import caption_lengths, eot_id, sot_id, valid_tokens
from .ancestral import denoise
from .beam import beam_search, sample
from .clip_guidance import Guide
from .confidence import fully_masked, guided, unmask_by_confidence
from .consensus import agreement
from .options import REPEATS, check_scale
from .sampling import GREEDY, Decoded, Sampling, sample_tokens

LENGTH = 15  # default number of tokens for a model without a length head, one of the paper's lengths
CHOSEN = ("auto", "sample", "likely")  # values of `length` for which the length head chooses
SAMPLERS = ("confidence", "ancestral")
MAX_LENGTHS = 8  # most lengths per image that "auto" and "likely" decode
LIKELY = 0.1  # a length is "likely" if it has at least this share of the most probable length's probability
LENGTH_NORM = 5  # tokens that a caption counts as in `best_of_lengths`. The best of 1 to 10 on Flickr8k's val split


def best_of_lengths(decode: Callable[[Tensor], Decoded], log_prob: Tensor) -> Decoded:
    """Return each row's best caption over lengths N, by log p(N | image) + LENGTH_NORM * mean token log-probability.

    The second term is the log-probability that the caption would have with LENGTH_NORM tokens. Unlike the plain sum it
    is comparable over N. The most probable lengths are tried in turn. As the second term is at most 0, lengths that
    cannot win against the first one are skipped. The host waits for the device twice.

    Args:
        decode: takes lengths, long [R] on the CPU, with -1 to skip a row. Returns captions [R, L].
        log_prob: log p(N | image), [R, S].
    """
    log_prob, lengths = log_prob.topk(min(MAX_LENGTHS, log_prob.shape[1]))
    on_cpu = lengths.cpu()
    best = decode(on_cpu[:, 0])
    value = log_prob[:, 0] + LENGTH_NORM * best.log_prob.sum(1) / lengths[:, 0]
    can_win = (log_prob > value[:, None]).cpu()
    for rank in range(1, 1 + int(can_win[:, 1:].any(0).sum())):
        found = decode(on_cpu[:, rank].where(can_win[:, rank], -1))
        found_value = log_prob[:, rank] + LENGTH_NORM * found.log_prob.sum(1) / lengths[:, rank]
        better = found_value > value
        best = Decoded(*(torch.where(better[:, None], *parts) for parts in zip(found, best, strict=True)))
        value = torch.where(better, found_value, value)
    return best


def uncond_tokens(model: Captioner, image: Tensor, image_embs: Tensor, uncond: str, blind: Tensor | None,
                  generator: torch.Generator | None) -> Tensor:
    """Return the patch tokens of guidance's unconditional branch, [B, P, D] or [1, P, D]."""
    cfg = model.caption_cfg
    if uncond not in ("blind", "masked"):
        raise ValueError(f"guidance_weak is {uncond!r}: it must be 'blind' or 'masked'")
    if uncond == "masked":
        if not cfg.condition_drop:
            raise ValueError("guidance_weak='masked' needs a model that was trained with masked image features "
                             "(caption_cfg.condition_drop); 'blind' does not")
        masked = mask_condition(image_embs.shape[:2], 1.0, cfg.condition_mask, generator, image.device)
        return model.encode_image_tokens(image, masked, image_embs)
    if cfg.condition_zeros:
        return torch.zeros_like(image_embs[:1])
    if blind is None:
        raise ValueError("guidance needs a null image: give blind=mean_image(model, images)")
    return blind[None]


def default_length(model: Captioner) -> int | str:
    # A length head of zeros was never trained, as older checkpoints have none.
    return "auto" if model.causal or model.length_head is not None and model.length_head.weight.any() else LENGTH


def unmask_images(model: Captioner, image: Tensor, length: int | str | None = None, text: Tensor | None = None,
                  tokens_per_step: int | float = 1, sampler: str = "confidence", steps: int | None = None,
                  guidance_scale: float = 1.0, guidance_weak: str | None = None,
                  guidance_kl: list[Tensor] | None = None, blind: Tensor | None = None, sampling: Sampling = GREEDY,
                  samples: int = 1, guide: Guide | None = None, repeats: str = "allow") -> Decoded:
    """Caption images by masked diffusion decoding, R = samples * B.

    Args:
        image: [B, 3, height, width], preprocessed.
        length: the paper's N', the number of tokens to generate between SOT and EOT, which are given. "auto" takes each
            image's best length (`best_of_lengths`), "sample" draws from p(N | image), and "likely" gives an image's
            `samples` its most probable lengths in turn (those at least a tenth as probable as the first). None is
            `default_length`.
        text: captions to fill in, long [B, L] or [1, L] (`tokenize_with_masks`), instead of `length`. For a text on the
            CPU, the host does not wait for the device.
        tokens_per_step: see `unmask_by_confidence`.
        sampler: "confidence" (Eq. 6, `unmask_by_confidence`) or "ancestral", which is random (`denoise`).
        steps: number of steps for "ancestral". None is 100, as in training.
        guidance_scale: see `guided`. 1 is the model itself, without a second pass.
        guidance_weak: the unconditional branch. "blind" is the null image, "masked" the image with features masked as
            in training, drawn once (MC-Diffusion). None is the one that the model was trained with.
        guidance_kl: each decoder call appends the strength of guidance, see `guided`.
        blind: the null image, [P, D] from `mean_image`. Not needed for a model that was trained with zeros for it.
        sampling: how tokens are chosen. Its generator is used for all random numbers.
        samples: number of captions per image. They differ only if they are drawn.
        guide: reweights the most probable tokens of each step of "confidence" (`reweigh`) unless its scale is 0.
        repeats: see `unmask_by_confidence`.
    """
    vocab_size, longest = model.vocab_size, model.context_length - 2
    length = default_length(model) if length is None and text is None else length
    if text is None and length not in CHOSEN and not (isinstance(length, int) and 1 <= length <= longest):
        raise ValueError(f"length is {length!r}: it must be 'auto', 'sample' or a number of tokens from 1 to {longest}")
    if text is None and length in CHOSEN and model.length_head is None:
        raise ValueError(f"length={length!r} needs a model with a length head (caption_cfg.length_head)")
    if text is not None and len(text) not in (1, len(image)):
        raise ValueError(f"there are {len(image)} images, but {len(text)} texts to fill in; "
                         "give one each, or one for all")
    if text is not None and not (text == eot_id(vocab_size)).any(-1).all():
        raise ValueError("a text to fill in has no EOT, which tells the model where the caption ends")
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler is {sampler!r}: it must be {' or '.join(map(repr, SAMPLERS))}")
    if sampler == "confidence" and steps is not None:
        raise ValueError("steps needs sampler='ancestral'; for 'confidence' give tokens_per_step")
    if sampler == "ancestral" and tokens_per_step != 1:
        raise ValueError("tokens_per_step needs sampler='confidence'; for 'ancestral' give steps")
    if repeats not in REPEATS:
        raise ValueError(f"repeats is {repeats!r}: it must be {' or '.join(map(repr, REPEATS))}")
    if sampler == "ancestral" and repeats == "avoid":
        raise ValueError("repeats='avoid' needs sampler='confidence'")
    check_scale("guidance_scale", guidance_scale)
    if guide is not None:
        check_scale("the scale of CLIP", guide.scale)

    image_embs = model.encode_image_tokens(image)

    def network_of(image_embs: Tensor) -> Network:
        return partial(model.token_logits, model.text.project_image(image_embs), graphs=model.step_graphs)

    network = network_of(image_embs)
    if guidance_scale != 1:
        uncond = uncond_tokens(model, image, image_embs, guidance_weak or model.caption_cfg.default_uncond, blind,
                               sampling.generator)
        network = guided(network, network_of(uncond), guidance_scale, guidance_kl)
    forbidden = (sot_id(vocab_size), eot_id(vocab_size))

    guides = ()
    if guide is not None and guide.scale != 0 and guide.top_k > 1:
        guides = (lambda captions, row: guide(captions, row // samples)), guide.top_k

    def decode(text: Tensor) -> Decoded:
        valid, device = valid_tokens(text, vocab_size), image.device
        if sampler == "confidence":
            return unmask_by_confidence(network, text, valid, vocab_size, tokens_per_step, forbidden, sampling, *guides,
                                        device=device, repeats=repeats)
        make = model.objective.schedule or make_schedule  # a model of continuous time gets the linear one
        return denoise(network, text, valid, make(vocab_size, device=device), steps, forbidden, sampling, device)

    if text is not None:
        return decode(text.expand(len(image), -1).repeat_interleave(samples, 0))
    if length in CHOSEN:
        log_prob = model.length_head.log_prob(image_embs).repeat_interleave(samples, 0)
        if length == "auto":
            return best_of_lengths(lambda lengths: decode(fully_masked(lengths, vocab_size, longest)), log_prob)
        if length == "likely":
            value, found = log_prob[::samples].topk(min(MAX_LENGTHS, log_prob.shape[1]))
            count = (value >= value[:, :1] + math.log(LIKELY)).sum(1, keepdim=True)
            lengths = found.gather(1, torch.arange(samples, device=count.device) % count).flatten().cpu()
        else:
            lengths = sample_tokens(log_prob, Sampling(1.0, generator=sampling.generator)).cpu()
    else:
        lengths = torch.full((samples * len(image),), length)
    return decode(fully_masked(lengths, vocab_size))


def cached_step_logits(model: Captioner, image_kv: ImageKV) -> StepLogits:
    past = None

    def step_logits(text: Tensor, parent: Tensor) -> Tensor:
        nonlocal past
        if past is not None:
            past = [(k[parent], v[parent]) for k, v in past]
        hidden, past = model.text.step(text[:, -1], image_kv, past)
        return model.text.output(hidden)

    return step_logits


def search_images(model: Captioner, image: Tensor, length: int | str | None = None, num_beams: int = 6,
                  sampling: Sampling = GREEDY, min_length: int = 0, samples: int = 1) -> Decoded:
    """Caption images with a causal model, R = samples * B.

    Args:
        image: [B, 3, height, width], preprocessed.
        length: most tokens before EOT, which the model predicts itself. "auto" or None is what fits the context.
        num_beams: see `beam_search`. Not used with a temperature.
        sampling: with a temperature, tokens are drawn and there is no search.
        min_length: fewest tokens before EOT. Without it, likelihood favours short captions.
        samples: number of captions per image. More than one needs a temperature.
    """
    longest = model.context_length - 2
    max_length = longest if length in (None, "auto") else length
    if not isinstance(max_length, int) or not 1 <= max_length <= longest:
        raise ValueError(f"length is {length!r}: it must be 'auto' or a number of tokens from 1 to {longest}")
    image_kv = model.text.project_image(model.encode_image_tokens(image))
    args = (cached_step_logits(model, image_kv), samples * len(image), model.vocab_size, max_length)
    return sample(*args, sampling, image.device, min_length) if sampling.temperature else \
        beam_search(*args, num_beams, image.device, min_length)


@torch.no_grad()
def generate(model: Captioner, image: Tensor, return_trace: bool = False, guide: Guide | None = None,
             rerank: bool = False, select: str | None = None, **options) -> Tensor | Decoded:
    """Return captions as ids from SOT to EOT, then padding, long [R, L], as `CoCa.generate` does. No id is a mask.

    Args:
        image: [B, 3, height, width], preprocessed.
        return_trace: return `Decoded`, with the step and the log-probability of every token, instead of ids.
        guide: reweights tokens of a masked diffusion captioner at each step, if its scale is not 0.
        rerank: keep only the one of an image's `samples` that the guide finds most similar to the image.
        select: "consensus" keeps only the one of an image's `samples` that is most similar to all (`agreement`).
        options: those of `unmask_images` for a masked diffusion captioner, of `search_images` for a causal one.

    Raises ValueError if an argument is out of range.
    """
    sampling, samples = options.get("sampling", GREEDY), options.get("samples", 1)
    sampling.check()  # before the image is encoded
    drawn = sampling.temperature or options.get("length") in ("sample", "likely") \
        or options.get("sampler") == "ancestral"
    if samples < 1 or samples > 1 and not drawn:
        raise ValueError(f"samples is {samples}: it must be 1, or more with a temperature (without one all are equal)")
    if guide is not None and guide.scale and model.causal:
        raise ValueError("CLIP guides masked diffusion only. This model is autoregressive: rerank its captions instead")
    if guide is not None and guide.scale and options.get("sampler") == "ancestral":
        raise ValueError("CLIP guides the sampler 'confidence' only. For 'ancestral', rerank captions instead")
    if rerank and (guide is None or samples < 2):
        raise ValueError("reranking needs a guide and two samples or more")
    if select not in (None, "consensus") or select and (rerank or samples < 2):
        raise ValueError(f"select is {select!r}: it must be None, or 'consensus' with two samples or more and without "
                         "rerank")
    was_training = model.training
    model.train(False)
    try:
        decoded = search_images(model, image, **options) if model.causal else \
            unmask_images(model, image, guide=guide, **options)
        if rerank or select:
            value = guide.similarity(decoded.text) if rerank else agreement(decoded.text, samples, model.vocab_size)
            best = value.view(-1, samples).argmax(1)  # the first of equals
            rows = best + samples * torch.arange(len(best), device=best.device)
            decoded = Decoded(*(part[rows] for part in decoded))
    finally:
        model.train(was_training)
    return cut(decoded, model.vocab_size, return_trace)


def cut(decoded: Decoded, vocab_size: int, return_trace: bool) -> Tensor | Decoded:
    longest = int(caption_lengths(decoded.text, vocab_size).max())
    decoded = Decoded(*(part[:, :longest] for part in decoded))
    return decoded if return_trace else decoded.text
