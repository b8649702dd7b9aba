"""Captions images: masked diffusion decoding (Eq. 6), or search from left to right for a causal model (Sec. 3.2).

An image is encoded once, and its keys and values are computed once. If guidance masks image features, it is twice.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, P patches, D image width, S lengths.
"""
import math
from collections.abc import Callable
from dataclasses import replace
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
from .blocks import caption_in_blocks
from .clip_guidance import Guide
from .confidence import fully_masked, guided, unmask_by_confidence
from .consensus import agreement
from .options import check_scale
from .sampling import Decoded, Sampling, Search, Unmasking, sample_tokens

LENGTH = 15  # default number of tokens for a model without a length head, one of the paper's lengths
UNMASKING = Unmasking()
OF_UNMASK_IMAGES = ("text", "blind", "guidance_kl")  # its arguments that are no fields of `Unmasking`
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


def uncond_tokens(model: Captioner, image: Tensor, image_embs: Tensor, options: Unmasking,
                  blind: Tensor | None) -> Tensor:
    """Return the patch tokens of guidance's unconditional branch, [B, P, D] or [1, P, D]."""
    cfg = model.caption_cfg
    if options.uncond(cfg) == "masked":
        masked = mask_condition(image_embs.shape[:2], 1.0, cfg.condition_mask, options.sampling.generator, image.device)
        return model.encode_image_tokens(image, masked, image_embs)
    if cfg.condition_zeros:
        return torch.zeros_like(image_embs[:1])
    if blind is None:
        raise ValueError("guidance needs a null image: give blind=mean_image(model, images)")
    return blind[None]


def default_length(model: Captioner) -> int | str:
    # A length head of zeros was never trained, as older checkpoints have none.
    learnt = model.length_head is not None and model.length_head.weight.any()
    return "auto" if model.objective.order != "any" or learnt else LENGTH


def by_confidence(model: Captioner, network: Network, text: Tensor, options: Unmasking, guide: Guide | None) -> Decoded:
    """Unmask captions [R, L] by the most confident token first (Eq. 6). A guide reweights tokens of each step."""
    guides = ()
    if guide is not None and guide.scale != 0 and guide.top_k > 1:
        guides = (lambda captions, row: guide(captions, row // options.samples)), guide.top_k
    forbidden = (sot_id(model.vocab_size), eot_id(model.vocab_size))
    return unmask_by_confidence(network, text, valid_tokens(text, model.vocab_size), model.vocab_size,
                                options.tokens_per_step, forbidden, options.sampling, *guides,
                                device=model.text.output.weight.device, repeats=options.repeats)


def by_ancestral(model: Captioner, network: Network, text: Tensor, options: Unmasking, guide: Guide | None) -> Decoded:
    """Unmask captions [R, L] by draws of the reverse process."""
    make = model.objective.schedule or make_schedule  # a model of continuous time gets the linear one
    device, forbidden = model.text.output.weight.device, (sot_id(model.vocab_size), eot_id(model.vocab_size))
    return denoise(network, text, valid_tokens(text, model.vocab_size), make(model.vocab_size, device=device),
                   options.steps, forbidden, options.sampling, device)


def sampled_lengths(log_prob: Tensor, options: Unmasking) -> Tensor:
    """Draw lengths from p(N | image): long [R] from its logarithm, [B, S]."""
    rows = log_prob.repeat_interleave(options.samples, 0)
    return sample_tokens(rows, Sampling(1.0, generator=options.sampling.generator)).cpu()


def likely_lengths(log_prob: Tensor, options: Unmasking) -> Tensor:
    """Give the captions of an image its most probable lengths in turn: long [R] from log p(N | image), [B, S]."""
    value, found = log_prob.topk(min(MAX_LENGTHS, log_prob.shape[1]))
    count = (value >= value[:, :1] + math.log(LIKELY)).sum(1, keepdim=True)  # [B, 1]
    return found.gather(1, torch.arange(options.samples, device=count.device) % count).flatten().cpu()


# A new rule is one function and one row. options.SAMPLER_NAMES and sampling.LENGTHS_OF_HEAD list the names.
SAMPLERS = {"confidence": by_confidence, "ancestral": by_ancestral}
LENGTH_RULES = {"sample": sampled_lengths, "likely": likely_lengths}  # "auto" decodes several lengths


def unmask_images(model: Captioner, image: Tensor, text: Tensor | None = None, options: Unmasking = UNMASKING,
                  blind: Tensor | None = None, guide: Guide | None = None,
                  guidance_kl: list[Tensor] | None = None) -> Decoded:
    """Caption images by masked diffusion decoding, R = samples * B.

    Args:
        image: [B, 3, height, width], preprocessed.
        text: captions to fill in, long [B, L] or [1, L] (`tokenize_with_masks`), instead of a length. For a text on the
            CPU, the host does not wait for the device.
        blind: the null image, [P, D] from `mean_image`. Not needed for a model that was trained with zeros for it.
        guide: reweights the most probable tokens of each step of "confidence" (`reweigh`) unless its scale is 0.
        guidance_kl: each decoder call appends the strength of guidance, see `guided`.
    """
    vocab_size, longest = model.vocab_size, model.context_length - 2
    in_blocks = model.objective.order == "blocks"
    if text is None and not in_blocks:
        options = replace(options, length=default_length(model)) if options.length is None else options
        options.check_length(longest, model.length_head is not None)
    elif text is not None and len(text) not in (1, len(image)):
        raise ValueError(f"there are {len(image)} images, but {len(text)} texts to fill in; "
                         "give one each, or one for all")
    elif text is not None and not (text == eot_id(vocab_size)).any(-1).all():
        raise ValueError("a text to fill in has no EOT, which tells the model where the caption ends")
    image_embs = model.encode_image_tokens(image)  # [B, P, D], once an image

    def network_of(image_embs: Tensor) -> Network:
        return partial(model.token_logits, model.text.project_image(image_embs), graphs=model.step_graphs)

    def with_guidance(network_of: Callable[[Tensor], Network]) -> Network:
        network = network_of(image_embs)
        if options.guidance_scale == 1:
            return network
        weak = network_of(uncond_tokens(model, image, image_embs, options, blind))
        return guided(network, weak, options.guidance_scale, guidance_kl)

    if in_blocks:
        return caption_in_blocks(model, image_embs, text, options, with_guidance)
    network, samples = with_guidance(network_of), options.samples

    def decode(text: Tensor) -> Decoded:
        return SAMPLERS[options.sampler](model, network, text, options, guide)

    if text is not None:
        return decode(text.expand(len(image), -1).repeat_interleave(samples, 0))
    if isinstance(options.length, int):
        return decode(fully_masked(torch.full((samples * len(image),), options.length), vocab_size))
    log_prob = model.length_head.log_prob(image_embs)  # log p(N | image), [B, S]
    if options.length == "auto":
        return best_of_lengths(lambda lengths: decode(fully_masked(lengths, vocab_size, longest)),
                               log_prob.repeat_interleave(samples, 0))
    return decode(fully_masked(LENGTH_RULES[options.length](log_prob, options), vocab_size))


def cached_step_logits(model: Captioner, image_kv: ImageKV) -> StepLogits:
    past = None

    def step_logits(text: Tensor, parent: Tensor) -> Tensor:
        nonlocal past
        if past is not None:
            past = [(k[parent], v[parent]) for k, v in past]
        hidden, past = model.text.step(text[:, -1:], image_kv, past)
        return model.text.output(hidden[:, 0])

    return step_logits


def search_images(model: Captioner, image: Tensor, options: Search) -> Decoded:
    """Caption images [B, 3, height, width] with a causal model, R = samples * B."""
    max_length = options.max_length(model.context_length - 2)
    image_kv = model.text.project_image(model.encode_image_tokens(image))
    args = (cached_step_logits(model, image_kv), options.samples * len(image), model.vocab_size, max_length)
    if options.sampling.temperature:
        return sample(*args, options.sampling, image.device, options.min_length)
    return beam_search(*args, options.num_beams, image.device, options.min_length)


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
        options: the fields of `Search` for a causal captioner. The fields of `Unmasking` for a masked diffusion
            captioner, and `text`, `blind` and `guidance_kl` of `unmask_images`.

    Raises ValueError if an argument is out of range.
    """
    if model.causal:
        wanted = Search(**options)
    else:
        given = {name: options.pop(name) for name in OF_UNMASK_IMAGES if name in options}
        wanted = Unmasking(**options)
    samples = wanted.samples
    if guide is not None and guide.scale and model.objective.order != "any":
        raise ValueError("CLIP guides whole captions of masked diffusion only. This model reads from left to right: "
                         "rerank its captions instead")
    if guide is not None and guide.scale and options.get("sampler") == "ancestral":
        raise ValueError("CLIP guides the sampler 'confidence' only. For 'ancestral', rerank captions instead")
    if guide is not None:
        check_scale("the scale of CLIP", guide.scale)
    if rerank and (guide is None or samples < 2):
        raise ValueError("reranking needs a guide and two samples or more")
    if select not in (None, "consensus") or select and (rerank or samples < 2):
        raise ValueError(f"select is {select!r}: it must be None, or 'consensus' with two samples or more and without "
                         "rerank")
    was_training = model.training
    model.train(False)
    try:
        decoded = search_images(model, image, wanted) if model.causal else \
            unmask_images(model, image, options=wanted, guide=guide, **given)
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
