"""Likelihoods of any number of candidate captions for a batch of images, within a memory budget (Sec. 4.2).

An image is encoded once, and its keys and values are computed once. The methods, with decoder passes per caption:

    autoregressive   1 pass, for causal models (Eq. 7).
    heuristic        N passes. Start fully masked. At each step, score and reveal the true token at the position where
                     the model is most confident of any token.
    monte_carlo      Up to `num_samples` passes. An unbiased estimate of the bound of Eq. 8, with standard error.
    bound            `num_samples` passes. The same for the bound of mask-and-replace diffusion.

Dimensions: B images, C candidates of an image, L positions, N scored tokens of a caption, P patches, D width.
"""
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.captioner import Captioner
from ..models.interface import ImageKV, Network, TokenLogits
from ..text.special_tokens import PAD_ID, caption_lengths, eot_id, sot_id, valid_tokens
from .blocks import heuristic_in_blocks
from .draws import draw_masks
from .exact import Likelihood, autoregressive, heuristic
from .monte_carlo import monte_carlo
from .replace_bound import bound

MIB = 2 ** 20
CPU_TOKENS = 4096  # most tokens of a call unless memory_mib is given. Larger calls do not fit the CPU's caches


def mean_image(model: Captioner, images: Iterable[Tensor]) -> Tensor:
    """Return the null image: patch tokens averaged over batches of images, position by position, [P, D].

    Used as the image, it turns p(caption | image) into an estimate of p(caption). (A grey image would be unlike any in
    training.) Average a few hundred images of the data that you score, as the mean of few still shows them.
    """
    total, count = 0, 0
    with torch.no_grad():
        for batch in images:
            image_embs = model.encode_image_tokens(batch)
            total = total + image_embs.float().sum(0)
            count += len(batch)
    if not count:
        raise ValueError("the mean image needs at least one image")
    return total / count


@torch.inference_mode()
def log_likelihood(model: Captioner, image: Tensor | None, text: Tensor, method: str | None = None,
                   num_samples: int = 1024, seed: int = 0, interval: tuple[float, float] | None = None,
                   blind: Tensor | None = None, memory_mib: int | None = None, return_details: bool = False
                   ) -> Tensor | Likelihood:
    """Return log p(caption | image) in nats, exact or estimated, for any number of candidate captions per image.

    A score does not depend on the rest of the batch. Equal candidates of an image are scored once.

    Args:
        model: a Captioner. Its mode is not changed, so call `model.eval()` before.
        image: [B, 3, height, width]. With `blind` it is ignored and may be None.
        text: long [B, L] or [B, C, L] from the tokenizer: SOT, tokens, EOT, anything. Best on the CPU.
        method: "autoregressive" for causal models (Eq. 7), "heuristic" or "monte_carlo" (Eq. 8) for masked diffusion,
            "bound" if tokens are also replaced (the other two ignore that). None is the first that fits.
        num_samples, seed: see `monte_carlo` and `bound`. interval: see `monte_carlo`.
        blind: the null image, [P, D] from `mean_image`, used as every image. It gives log p(caption), which you can
            subtract for a debiased score.
        memory_mib: memory of the decoder, beside weights, encoder and result. Less is slower. By default it is 512, or
            what 4,096 tokens take if that is less. On CUDA it is a quarter of the free memory.
        return_details: return the whole `Likelihood`, not just its first field.

    Returns float32 [B] or [B, C], or a Likelihood of such tensors. Raises ValueError if the method or an option does
    not fit the model, if a caption does not run from SOT to EOT, or if the memory is too little for one caption.
    """
    method = method or model.objective.scorers[0]
    _check_options(model, method, num_samples, interval)
    image_embs = model.encode_image_tokens(image) if blind is None else blind.expand(len(text), -1, -1)
    if len(image_embs) != len(text):
        raise ValueError(f"text holds the captions of {len(text)} images, but there are {len(image_embs)}")
    captions, first = _unique_captions((text if text.ndim == 3 else text[:, None]).cpu(), model.vocab_size)
    first = first.to(image_embs.device, non_blocking=True)
    drawn = method in ("monte_carlo", "bound")
    copies = 5 if model.objective.order == "blocks" else 4 if method == "bound" else 2  # two streams take twice as many
    images_per_call, captions_per_call, max_tokens = _chunk_sizes(
        model, image_embs, captions, memory_mib, copies, num_samples if drawn else None)
    draws = {"num_samples": num_samples, "seed": seed, "max_tokens": max_tokens}
    estimator = {
        "autoregressive": autoregressive, "heuristic": _heuristic(model),
        "monte_carlo": partial(monte_carlo, interval=interval and tuple(interval), **draws),
        "bound": partial(bound, schedule=model.objective.schedule, **draws)}[method]

    groups = []
    for rows, embs in zip(captions.split(images_per_call), image_embs.split(images_per_call), strict=True):
        network = _network(model, model.text.project_image(embs))
        each = partial(estimator, device=embs.device, **({"num_images": len(rows)} if drawn else {}))
        parts = [_each(lambda x, shape=part.shape[:2]: x.unflatten(0, shape),
                       each(network, part.flatten(0, 1), model.vocab_size))
                 for part in rows.split(captions_per_call, 1)]
        groups.append(_each(lambda *x: torch.cat(x, 1), *parts))
    result = _each(lambda *x: torch.cat(x), *groups)

    def finish(x: Tensor) -> Tensor:
        # Copy the scores of repeated candidates and restore the shape of `text`.
        x = torch.take_along_dim(x, first if x.ndim == 2 else first[..., None], 1)
        if x.ndim == 3:
            x = F.pad(x, (0, text.shape[-1] - x.shape[-1]), value=-1 if x.dtype == torch.long else 0)
        return x if text.ndim == 3 else x.squeeze(1)

    result = _each(finish, result)
    return result if return_details else result.log_likelihood


def decoder_passes(text: Tensor, vocab_size: int, method: str, num_samples: int = 1024, seed: int = 0,
                   interval: tuple[float, float] | None = None) -> Tensor:
    """Return the number of decoder passes to score each caption [C, L], long [C]."""
    lengths = caption_lengths(text, vocab_size).cpu() - 1
    passes = {"autoregressive": lambda n: 1, "heuristic": lambda n: n, "bound": lambda n: num_samples,
              "monte_carlo": lambda n: len(draw_masks(n, num_samples, seed, interval and tuple(interval)).hidden)}
    return torch.tensor([passes[method](n) if n else 0 for n in lengths.tolist()])


def _heuristic(model: Captioner) -> Callable:
    if model.objective.order != "blocks":
        return heuristic
    return partial(heuristic_in_blocks, size=model.caption_cfg.block_sizes[0], context_length=model.context_length)


def _check_options(model: Captioner, method: str, num_samples: int, interval: tuple[float, float] | None) -> None:
    fitting = model.objective.scorers
    if method not in fitting:
        kind = "from left to right" if model.causal else "in both directions"
        raise ValueError(f"method {method!r} does not fit: this model reads captions {kind}; "
                         f"choose {' or '.join(map(repr, fitting))}")
    if method != "monte_carlo" and interval is not None:
        raise ValueError(f"interval is an option of method 'monte_carlo', not of {method!r}")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, not {num_samples}")
    if interval is not None and not 0 <= interval[0] <= interval[1] <= 1:
        raise ValueError(f"interval must be (t_min, t_max) with 0 <= t_min <= t_max <= 1, not {interval}")


def _unique_captions(text: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return captions [B, C, L], cut to the longest, repeats emptied, and the first candidate equal to each [B, C]."""
    eot = eot_id(vocab_size)
    broken = ((text[..., 0] != sot_id(vocab_size)) | ~(text == eot).any(-1)).nonzero().tolist()
    if broken:
        raise ValueError(f"candidate {broken[0][1]} of image {broken[0][0]} does not run from SOT ({eot - 1}) to EOT "
                         f"({eot}): tokenize captions with the model's own tokenizer")
    valid = valid_tokens(text, vocab_size)
    text = text.masked_fill(~valid, PAD_ID)[..., :int(valid.sum(-1).max())]
    first = []
    for captions in text.numpy():
        seen: dict[bytes, int] = {}
        first.append([seen.setdefault(caption.tobytes(), c) for c, caption in enumerate(captions)])
    first = torch.tensor(first)
    repeats = first != torch.arange(text.shape[1])
    return text.masked_fill(repeats[..., None], eot), first  # a lone EOT has no scored token and costs almost nothing


def _chunk_sizes(model: Captioner, image_embs: Tensor, captions: Tensor, memory_mib: int | None,
                 copies: int = 2, draws: int | None = None) -> tuple[int, int, int]:
    # Images per decoder call, captions per image and tokens per call. A token is counted as float32 logits, `copies` of
    # them, and about 16 vectors of the decoder's width (the MLP's hidden layer takes 4). An image is counted as keys
    # and values of all layers. An estimator that reads `draws` of a caption at once splits them into calls itself, and
    # copies keys and values for calls with some of the images only.
    vocab_size, width = model.text.output.weight.shape
    element = model.text.output.weight.element_size()
    token_bytes = vocab_size * 4 * (1 + copies) + 16 * width * element
    image_bytes = (2 if draws is None else 4) * len(model.text.blocks) * image_embs.shape[1] * width * element
    if memory_mib is not None:
        budget = memory_mib * MIB
    elif image_embs.device.type == "cuda":
        budget = torch.cuda.mem_get_info(image_embs.device)[0] // 4
    else:
        budget = min(512 * MIB, image_bytes + CPU_TOKENS * token_bytes)
    candidates, length = captions.shape[1:]
    max_tokens = (budget - image_bytes) // token_bytes
    if max_tokens < length:
        needed = math.ceil((image_bytes + length * token_bytes) / MIB)
        raise ValueError(f"memory_mib={budget // MIB} is too little: a caption of {length} tokens takes {needed} MiB")
    images = max(1, budget // (image_bytes + candidates * (draws or 1) * length * token_bytes))
    if draws is None:
        return images, min(candidates, max_tokens // length), max_tokens
    images = min(images, len(captions))
    return images, candidates, (budget - images * image_bytes) // token_bytes


def _network(model: Captioner, image_kv: ImageKV) -> Network:
    def network(lengths: Sequence[int], images: np.ndarray | None = None, **clean: Tensor) -> TokenLogits:
        if images is None:
            return model.token_logits(image_kv, lengths, **clean)
        index = torch.from_numpy(images).to(image_kv[0][0].device, non_blocking=True)
        return model.token_logits([(k.index_select(0, index), v.index_select(0, index)) for k, v in image_kv], lengths)

    return network


def _each(function: Callable[..., Tensor], *parts: Likelihood) -> Likelihood:
    return Likelihood(*(None if fields[0] is None else function(*fields) for fields in zip(*parts, strict=True)))


