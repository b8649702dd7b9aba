"""Captions images: masked diffusion decoding (Eq. 6), or search from left to right for a causal model (Sec. 3.2).

An image is encoded once, and its keys and values are computed once. If guidance masks image features, it is twice.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, P patches, D image width, S lengths.
"""
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..models.caption_logits import BlockReader
from ..models.captioner import Captioner
from ..models.interface import ImageKV, Network, StepLogits
from ..models.precision import in_eval_mode
from ..objectives.times import mask_condition
from ..text.special_tokens import caption_lengths, eot_id
from .beam import beam_search, sample
from .block_beam import search_in_blocks
from .blocks import caption_in_blocks
from .clip_guidance import Guide
from .confidence import fully_masked, guided
from .consensus import agreement
from .lengths import default_length
from .options import OptionError, Search, Unmasking, check_rule, check_scale, searches
from .rules import LENGTHS, SAMPLERS
from .sampling import Decoded

if TYPE_CHECKING:
    from ..models.foreign.base import ForeignCaptioner
    AnyCaptioner = Captioner | ForeignCaptioner

DEFAULTS = Unmasking()
OF_UNMASK_IMAGES = ("text", "blind", "guidance_kl")  # its arguments that are no fields of `Unmasking`


def uncond_tokens(model: Captioner, image: Tensor, image_embs: Tensor, options: Unmasking,
                  blind: Tensor | None) -> Tensor:
    """Return the patch tokens of guidance's unconditional branch, [B, P, D] or [1, P, D]."""
    cfg = model.caption_cfg
    if (options.uncond or cfg.default_uncond) == "masked_image":
        if not cfg.condition_drop:
            raise OptionError("{uncond} masked_image needs a model that was trained with masked image features "
                              "(caption_cfg.condition_drop); null_image does not")
        masked = mask_condition(image_embs.shape[:2], 1.0, cfg.condition_mask, options.sampling.generator, image.device)
        return model.encode_image_tokens(image, masked, image_embs)
    if cfg.condition_zeros:
        return torch.zeros_like(image_embs[:1])
    if blind is None:
        raise ValueError("guidance needs a null image: give blind=mean_image(model, images)")
    return blind[None]


def unmask_images(model: Captioner, image: Tensor, text: Tensor | None = None, options: Unmasking = DEFAULTS,
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
        if options.length is None:
            options = replace(options, length=default_length(model))
        options.check_length(longest, model.length_head is not None)
    elif text is not None and len(text) not in (1, len(image)):
        raise ValueError(f"there are {len(image)} images, but {len(text)} texts to fill in; "
                         "give one each, or one for all")
    elif text is not None and not (text == eot_id(vocab_size)).any(-1).all():
        raise ValueError("a text to fill in has no EOT, which tells the model where the caption ends")
    # [B, P, D], once an image.
    image_embs = model.encode_image_tokens(image)

    def network_of(image_embs: Tensor) -> Network:
        return partial(model.network(image_embs), graphs=model.step_graphs)

    def with_guidance(network_of: Callable[[Tensor], Network]) -> Network:
        network = network_of(image_embs)
        if options.guidance_scale == 1:
            return network
        weak = network_of(uncond_tokens(model, image, image_embs, options, blind))
        return guided(network, weak, options.guidance_scale, guidance_kl)

    if in_blocks:
        return caption_in_blocks(model, image_embs, text, options, with_guidance)
    network, sampler = with_guidance(network_of), SAMPLERS[options.sampler]
    if text is not None:
        text = text.expand(len(image), -1).repeat_interleave(options.samples, 0)
        return sampler(model, network, text, options, guide)

    def decode(lengths: Tensor, longest: int | None = None) -> Decoded:
        return sampler(model, network, fully_masked(lengths, vocab_size, longest), options, guide)

    if isinstance(options.length, int):
        return decode(torch.full((options.samples * len(image),), options.length))
    # [B, S], log p(N | image).
    log_prob = model.length_head.log_prob(image_embs)
    return LENGTHS[options.length](model, decode, log_prob, options)


def cached_step_logits(model: Captioner, image_kv: ImageKV) -> StepLogits:
    reader = BlockReader(model.text, image_kv)

    def step_logits(text: Tensor, parent: Tensor) -> Tensor:
        reader.select(parent)
        return model.text.output(reader.keep(text[:, -1:])[:, 0])

    return step_logits


def search_images(model: "AnyCaptioner", image: Tensor, options: Search) -> Decoded:
    """Caption images [B, 3, height, width] from left to right, token by token or block by block, R = samples * B."""
    if model.objective.order == "blocks":
        return search_in_blocks(model, image, options)
    max_length = options.max_length(model.context_length - 2)
    step_logits = model.step_logits(image) if hasattr(model, "step_logits") else cached_step_logits(
        model, model.text.project_image(model.encode_image_tokens(image)))
    args = (step_logits, options.samples * len(image), model.vocab_size, max_length)
    if options.sampling.temperature:
        return sample(*args, options.sampling, image.device, options.min_length)
    return beam_search(*args, options.num_beams, image.device, options.min_length)


@torch.no_grad()
def generate(model: "AnyCaptioner", image: Tensor, return_trace: bool = False, guide: Guide | None = None,
             rerank: bool = False, **options) -> Tensor | Decoded:
    """Return captions as ids from SOT to EOT, then padding, long [R, L], as `CoCa.generate` does. No id is a mask.

    Args:
        image: [B, 3, height, width], preprocessed.
        return_trace: return `Decoded`, with the step and the log-probability of every token, instead of ids.
        guide: reweights tokens of a masked diffusion captioner at each step, if its scale is not 0.
        rerank: keep only the one of an image's `samples` that the guide finds most similar to the image.
        options: the fields of `Search` for a causal captioner, and by sampler="beam" for one of blocks or one that
            learnt both. Those of `Unmasking` for others, and `text`, `blind` and `guidance_kl` of `unmask_images`.

    Raises ValueError if an argument is out of range.
    """
    causal = searches(options, model.objective)
    if not model.objective.scorers and options.get("text") is None:
        raise OptionError("this model can only fill in words, if anything: give {text}, a caption with [MASK]")
    if causal:
        wanted = Search(**options)
    else:
        given = {name: options.pop(name) for name in OF_UNMASK_IMAGES if name in options}
        wanted = Unmasking(**options)
    samples, select = wanted.samples, wanted.select
    if guide is not None:
        check_scale("clip_scale", guide.scale)
        if len(guide.known) != len(image):
            raise ValueError("the guide has seen another number of images: give one for each batch")
        if guide.scale and (causal or model.objective.order != "any"):
            raise ValueError("CLIP guides whole captions of masked diffusion only. This model reads from left to "
                             "right: rerank its captions instead")
        if guide.scale:
            check_rule("clip_scale", wanted.sampler)
    if rerank and (guide is None or samples < 2 or select):
        raise ValueError("reranking needs a guide and two samples or more, and no select")
    with in_eval_mode(model):
        decoded = search_images(model, image, wanted) if causal else \
            unmask_images(model, image, options=wanted, guide=guide, **given)
        if rerank or select:
            value = guide.similarity(decoded.text) if rerank else agreement(decoded.text, samples, model.vocab_size)
            # [B], the first of equals.
            best = value.view(-1, samples).argmax(1)
            rows = best + samples * torch.arange(len(best), device=best.device)
            decoded = Decoded(*(part[rows] for part in decoded))
    longest = int(caption_lengths(decoded.text, model.vocab_size).max())
    decoded = Decoded(*(part[:, :longest] for part in decoded))
    return decoded if return_trace else decoded.text
