"""Likelihoods of any number of candidate captions for a batch of images, within a memory budget (Sec. 4.2).

An image is encoded once, and its keys and values are computed once. The methods, with decoder passes per caption:

    autoregressive   1 pass, for models that learnt to read from left to right (Eq. 7).
    heuristic        N passes. Start fully masked. At each step, score and reveal the true token at the position where
                     the model is most confident of any token.
    parallel         1 pass for all captions of a length, each token with all masked. Another, cheaper estimate.
    monte_carlo      Up to `num_samples` passes. An unbiased estimate of the bound of Eq. 8, with standard error.
    bound            `num_samples` passes. The same for the bound of mask-and-replace diffusion.

Dimensions: B images, C candidates of an image, L positions, N scored tokens of a caption, P patches, D width.
"""
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.captioner import Captioner
from ..text.packing import each_tensor
from ..text.special_tokens import PAD_ID, caption_lengths, eot_id, sot_id, valid_tokens
from .blocks import heuristic_in_blocks, monte_carlo_in_blocks
from .draws import draw_masks
from .exact import autoregressive, heuristic
from .monte_carlo import monte_carlo
from .parallel import parallel
from .replace_bound import bound
from .scoring import Call, Likelihood, Scorer, Scoring, Sizes

if TYPE_CHECKING:
    from ..models.foreign.base import ForeignCaptioner
    AnyCaptioner = Captioner | ForeignCaptioner

MIB = 2 ** 20
CPU_TOKENS = 4096  # most tokens of a call unless memory_mib is given. Larger calls do not fit the CPU's caches


def mean_image(model: "AnyCaptioner", images: Iterable[Tensor]) -> Tensor:
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


SCORERS = {
    "autoregressive": Scorer(autoregressive, lambda n, options: 1),
    "heuristic": Scorer(heuristic, lambda n, options: n),
    "parallel": Scorer(parallel, lambda n, options: 1, lambda options: 1, by_length=True),
    "monte_carlo": Scorer(
        monte_carlo, lambda n, options: len(draw_masks(n, options.num_samples, options.seed, options.interval).hidden),
        lambda options: options.num_samples),
    "bound": Scorer(bound, lambda n, options: options.num_samples, lambda options: options.num_samples, 4),
}
# The same of a model that reads one block after another. N is then the tokens of a caption's largest block.
OF_BLOCKS = {
    "heuristic": Scorer(heuristic_in_blocks, SCORERS["heuristic"].passes),
    "monte_carlo": Scorer(monte_carlo_in_blocks, SCORERS["monte_carlo"].passes),
}


@torch.inference_mode()
def log_likelihood(model: "AnyCaptioner", image: Tensor | None, text: Tensor, method: str | None = None,
                   blind: Tensor | None = None, memory_mib: int | None = None, return_details: bool = False,
                   **options) -> Tensor | Likelihood:
    """Return log p(caption | image) in nats, exact or estimated, for any number of candidate captions per image.

    A score does not depend on the rest of the batch. Equal candidates of an image are scored once.

    Args:
        model: a Captioner, or one of models/foreign. Its mode is not changed, so call `model.eval()` before.
        image: [B, 3, height, width]. With `blind` it is ignored and may be None.
        text: long [B, L] or [B, C, L] from the tokenizer: SOT, tokens, EOT, anything. Best on the CPU.
        method: a key of SCORERS that fits the model. None is the first that fits.
        blind: the null image, [P, D] from `mean_image`, used as every image. It gives log p(caption), which you can
            subtract for a debiased score.
        memory_mib: memory of the decoder, beside weights, encoder and result. Less is slower. By default it is 512, or
            what 4,096 tokens take if that is less. On CUDA it is a quarter of the free memory.
        return_details: return the whole `Likelihood`, not just its first field.
        options: `num_samples`, `seed` and `interval` of `Scoring`.

    Returns float32 [B] or [B, C], or a Likelihood of such tensors. Raises ValueError if the method or an option does
    not fit the model, if a caption does not run from SOT to EOT, or if the memory is too little for one caption.
    """
    options = Scoring(method, **options).fit(model.objective)
    scorer = (OF_BLOCKS if model.objective.order == "blocks" else SCORERS)[options.method]
    image_embs = model.encode_image_tokens(image) if blind is None else blind.expand(len(text), -1, -1)
    if len(image_embs) != len(text):
        raise ValueError(f"text holds the captions of {len(text)} images, but there are {len(image_embs)}")
    captions, first = _unique_captions((text if text.ndim == 3 else text[:, None]).cpu(), model.vocab_size)
    sizes = _call_sizes(model, image_embs, captions, memory_mib, scorer, options)

    # Keys and values are computed once for the images of a group, [B, P, D] each.
    groups = []
    for rows, embs in zip(captions.split(sizes.images), image_embs.split(sizes.images), strict=True):
        network = model.network(embs)
        parts = []
        for part in rows.split(sizes.captions, 1):
            call = Call(model, network, part.flatten(0, 1), len(rows), sizes.tokens, embs.device)
            # [B*C, ...] -> [B, C, ...]
            parts.append(each_tensor(scorer.score(call, options), lambda x, part=part: x.unflatten(0, part.shape[:2])))
        groups.append(_joined(parts, 1))
    found = each_tensor(_joined(groups, 0), partial(
        _of_all_candidates, first=first.to(image_embs.device, non_blocking=True), length=text.shape[-1]))
    if text.ndim == 2:
        found = each_tensor(found, lambda x: x.squeeze(1))
    return found if return_details else found.log_likelihood


def decoder_passes(model: "AnyCaptioner", text: Tensor, method: str, **options) -> Tensor:
    """Return the number of decoder passes to score each caption [C, L], long [C].

    A pass that serves all captions of a length counts for the first of them. One that serves all blocks of a caption
    is one.
    """
    options, lengths = Scoring(method, **options), (caption_lengths(text, model.vocab_size).cpu() - 1).tolist()
    if model.objective.order == "blocks":  # all of a caption in one pass, filled with EOT. The first has SOT
        size, context = model.caption_cfg.block_sizes[0], model.context_length
        lengths = [max(min(size, context) - 1, (n >= size) * min(size, context - size)) for n in lengths]
    passes = [SCORERS[method].passes(n, options) if n else 0 for n in lengths]
    if SCORERS[method].by_length:
        first = {n: c for c, n in reversed([*enumerate(lengths)])}
        passes = [count * (first[n] == c) for c, (n, count) in enumerate(zip(lengths, passes, strict=True))]
    return torch.tensor(passes)


def _unique_captions(text: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return captions [B, C, L], cut to the longest, repeats emptied, and the first candidate equal to each [B, C]."""
    eot = eot_id(vocab_size)
    broken = ((text[..., 0] != sot_id(vocab_size)) | ~(text == eot).any(-1)).nonzero().tolist()
    if broken:
        raise ValueError(f"candidate {broken[0][1]} of image {broken[0][0]} does not run from SOT ({eot - 1}) to EOT "
                         f"({eot}): tokenize captions with the model's own tokenizer")
    # Cut to the longest caption, [B, C, L], with the same padding everywhere, so that bytes tell equal captions.
    valid = valid_tokens(text, vocab_size)
    text = text.masked_fill(~valid, PAD_ID)[..., :int(valid.sum(-1).max())]
    first = []
    for captions in text.numpy():
        seen: dict[bytes, int] = {}
        first.append([seen.setdefault(caption.tobytes(), c) for c, caption in enumerate(captions)])
    # [B, C], the number of the first candidate that is equal to each.
    first = torch.tensor(first)
    repeats = first != torch.arange(text.shape[1])
    return text.masked_fill(repeats[..., None], eot), first  # a lone EOT has no scored token and costs almost nothing


def _call_sizes(model: "AnyCaptioner", image_embs: Tensor, captions: Tensor, memory_mib: int | None, scorer: Scorer,
                options: Scoring) -> Sizes:
    vocab_size, width, layers, element, copies_image, _ = model.footprint
    streams = 2 if model.objective.order == "blocks" else 1
    # A token is counted as float32 logits and about 16 vectors of the decoder's width (the MLP's hidden layer takes 4).
    token_bytes = streams * (vocab_size * 4 * (1 + scorer.logits) + 16 * width * element)
    # An image is counted as keys and values of all layers.
    image_bytes = 2 * layers * image_embs.shape[1] * width * element
    if memory_mib is not None:
        budget = memory_mib * MIB
    elif image_embs.device.type == "cuda":
        budget = torch.cuda.mem_get_info(image_embs.device)[0] // 4
    else:
        budget = min(512 * MIB, image_bytes + CPU_TOKENS * token_bytes)
    candidates, length = captions.shape[1:]
    if copies_image:  # counted as further tokens without logits
        length += math.ceil(image_embs.shape[1] * 16 * width * element / token_bytes)
    max_tokens = (budget - image_bytes) // token_bytes
    if max_tokens < length:
        needed = math.ceil((image_bytes + length * token_bytes) / MIB)
        raise ValueError(f"memory_mib={budget // MIB} is too little: a caption of {length} tokens takes {needed} MiB")
    texts = candidates if scorer.texts is None else candidates * scorer.texts(options)
    if scorer.by_length:
        texts = min(texts, length)
    images = min(len(captions), max(1, budget // (image_bytes + texts * length * token_bytes)))
    if scorer.texts is None:
        return Sizes(images, min(candidates, max_tokens // length), max_tokens)
    return Sizes(images, candidates, (budget - images * image_bytes) // token_bytes)


def _joined(parts: Sequence[Likelihood], dim: int) -> Likelihood:
    return Likelihood(*(None if x[0] is None else torch.cat(x, dim) for x in zip(*parts, strict=True)))


def _of_all_candidates(x: Tensor, first: Tensor, length: int) -> Tensor:
    """Return scores of all candidates, [B, C] or [B, C, length], from those of the first of equal ones.

    `first` is long [B, C], the candidate that each is equal to.
    """
    if x.ndim == 2:
        return torch.take_along_dim(x, first, 1)
    x = torch.take_along_dim(x, first[..., None], 1)  # [B, C, L]
    return F.pad(x, (0, length - x.shape[-1]), value=-1 if x.dtype == torch.long else 0)
