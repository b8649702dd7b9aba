"""Cross-attention maps: where in the image the decoder looked at the step that revealed a word.

A decoded caption is replayed step by step (Eq. 6). The paper has no such maps, but its decoder (Fig. 2) is not changed.

Dimensions: B images, L positions, M tokens that the model chose, K layers, H heads, P patches, D image width,
W decoder width.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.captioner import Captioner
from ..models.precision import without_autocast
from ..text.special_tokens import caption_lengths, mask_id
from .sampling import Decoded

DIM = 0.3  # light of a patch without attention, in which the photograph can still be seen


class WordMaps(NamedTuple):
    """The maps of one caption."""

    position: Tensor  # long [M], positions of the tokens in the caption
    attention: Tensor  # float32 [M, K, H, P], attention weights. They sum to 1 over P


def attention_weights(query: Tensor, key: Tensor) -> Tensor:
    """Return softmax(Q K^T / sqrt(W / H)), [M, H, P], from queries [M, W] and keys [H, P, W / H]."""
    query = query.unflatten(-1, (len(key), -1))
    return (torch.einsum("thw,hpw->thp", query, key) * key.shape[-1] ** -0.5).softmax(-1)


@torch.inference_mode()
def word_maps(model: Captioner, image: Tensor, decoded: Decoded) -> list[WordMaps]:
    """Return each image's maps. `decoded` is `model.generate(image [B, 3, H, W], return_trace=True)`, no beam."""
    model.check_attention()
    lengths = caption_lengths(decoded.text, model.vocab_size).tolist()
    image_embs = model.encode_image_tokens(image)
    with without_autocast(image.device.type):  # autocast would run copies of the blocks, without our hooks
        return [_maps_of_one(model, embs, text[:n], step[:n]) for embs, text, step, n in zip(
            image_embs.split(1), decoded.text, decoded.step, lengths, strict=True)]


def _maps_of_one(model: Captioner, image_embs: Tensor, text: Tensor, step: Tensor) -> WordMaps:
    position = (step >= 0).nonzero().squeeze(1)
    # [M, L], for each chosen token the caption as the decoder read it then.
    texts = text.expand(len(position), -1)
    if not model.causal:  # a causal decoder does not see later tokens anyway
        texts = texts.masked_fill(step >= step[position, None], mask_id(model.vocab_size))
    rows, length = texts.shape
    place = torch.arange(rows, device=text.device) * length + position
    image_kv, queries = model.text.project_image(image_embs), []  # for each layer [M*L, W]
    hooks = [block.cross_q.register_forward_hook(lambda module, args, output: queries.append(output))
             for block in model.text.blocks]
    try:
        model.token_logits(image_kv, [length] * rows)(texts, place)
    finally:
        for hook in hooks:
            hook.remove()
    return WordMaps(position, torch.stack([
        attention_weights(q[place - int(model.causal)], key[0])
        for q, (key, _) in zip(queries, image_kv, strict=True)], 1))


def light(weights: Tensor) -> Tensor:
    """Return the light, from DIM to 1, of each patch by a word's attention, which is >= 0 and of any shape.

    It goes by the square root: half of the patches have less than a tenth of the largest weight, and would be black.
    """
    return DIM + (1 - DIM) * (weights / weights.max()).sqrt()


def principal_components(image_embs: Tensor, count: int = 3) -> Tensor:
    """Return the first principal components of patch tokens [B, P, D], float32 [B, P, count], with unit variance."""
    x = image_embs.float().flatten(0, 1)
    x = x - x.mean(0)
    loadings = torch.linalg.eigh(x.T @ x).eigenvectors[:, -count:].flip(1)
    loadings = loadings * loadings.gather(0, loadings.abs().argmax(0, keepdim=True)).sign()  # the largest is positive
    components = x @ loadings
    return (components / components.std(0, correction=0).clamp_min(1e-12)).view(*image_embs.shape[:2], count)
