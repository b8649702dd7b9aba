"""Score captions by an OpenCLIP model: CLIPScore and RefCLIPScore (Hessel et al. 2021, arXiv 2104.08718).

Published numbers use OpenAI's ViT-B/32, which is ViT-B-32-quickgelu here. Scores by different models do not compare.

Dimensions: N images with a candidate each, R references of an image, D width.
"""
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.decoding.clip_guidance import TEXTS_PER_BATCH, Clip, encode_text
from open_clip_mdc.integration import clip as clip_models

from ..datasets.caption_data import read_batch, unique_ids
from ..distributed import merge, own_batches

WEIGHT = 2.5
PREFIX = "A photo depicts "  # before candidates and references
Captioned = tuple[list[str], list[list[str]], Tensor | None]  # ids, captions, embeddings or cosines


def load(name: str | None, pretrained: str | None, device: str) -> Clip:
    if name is None:
        raise ValueError(f"--clipscore_pretrained {pretrained} needs --clipscore_model, the name of the model")
    if pretrained is None and ":" not in name:  # local-dir:, hf-hub:
        raise ValueError(f"--clipscore_model {name} needs --clipscore_pretrained: a file, or a tag to download")
    return clip_models.load(name, pretrained, device)


def clip_scores(image_embs: Tensor, caption_embs: Tensor) -> Tensor:
    """Return CLIP-S = 2.5 max(cos(caption, image), 0), [N], of embeddings [N, D], which need not be normalised."""
    return WEIGHT * F.cosine_similarity(image_embs, caption_embs, dim=-1).clamp(min=0)


def ref_clip_scores(image_embs: Tensor, caption_embs: Tensor, reference_embs: Sequence[Tensor]) -> Tensor:
    """Return RefCLIP-S, [N], the harmonic mean of CLIP-S and the highest cosine with a reference ([R, D] per image)."""
    with_image = clip_scores(image_embs, caption_embs)
    with_text = torch.stack([F.cosine_similarity(caption[None], texts, dim=-1).max()
                             for caption, texts in zip(caption_embs, reference_embs, strict=True)]).clamp(min=0)
    total = with_image + with_text
    return torch.where(total > 0, 2 * with_image * with_text / total, 0)  # 0 / 0 where both are 0


@torch.no_grad()
def encode_texts(clip: Clip, texts: Sequence[str], device: str, what: str) -> Tensor:
    batches = [texts[i:i + TEXTS_PER_BATCH] for i in range(0, len(texts), TEXTS_PER_BATCH)]
    return torch.cat(merge([
        (i, encode_text(clip.model, clip.tokenizer(batch), device).float().cpu())
        for i, batch in own_batches(batches, what)]))


@torch.no_grad()
def read_captioned(clip: Clip | None, dataloader: DataLoader, device: str, what: str) -> Captioned:
    """Return ids and captions of all images, and with a CLIP model their embeddings [N, D], on every process."""
    found = []
    for i, batch in own_batches(dataloader, what):
        ids, images, texts = read_batch(i, batch, dataloader)
        found.append((i, (ids, texts, clip and clip.model.encode_image(images.to(device)).float().cpu())))
    ids, texts, embs = zip(*merge(found), strict=True)
    texts = [own for batch in texts for own in batch]
    return unique_ids([i for batch in ids for i in batch]), texts, clip and torch.cat(embs)


@torch.no_grad()
def evaluate(clip: Clip, dataloader: DataLoader, captions: Mapping[str, str], references: Mapping[str, Sequence[str]],
             device: str) -> dict[str, list[float]]:
    """Return CLIPScore and RefCLIPScore of each image, in the loader's order.

    `captions` and `references` are by the ids of `read_captioned`.
    """
    ids, _, image_embs = read_captioned(clip, dataloader, device, "CLIPScore, images")
    counts = [len(references[i]) for i in ids]
    texts = [captions[i] for i in ids] + [reference for i in ids for reference in references[i]]
    texts = encode_texts(clip, [PREFIX + text for text in texts], device, "CLIPScore, texts")
    caption_embs, reference_embs = texts[:len(ids)], texts[len(ids):].split(counts)
    return {"CLIPScore": clip_scores(image_embs, caption_embs).tolist(),
            "RefCLIPScore": ref_clip_scores(image_embs, caption_embs, reference_embs).tolist()}
