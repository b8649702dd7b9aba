"""CLIP guidance: a CLIP model reweights tokens at each decoding step, or reranks finished captions.

This is not in the paper. At each step, each of the K most probable tokens of the revealed position is put into the
caption, whose other masks are filled in with their most probable tokens. A token's log p becomes log p + scale * log
softmax_K(cos/0.01) (`confidence.reweigh`), as in ConZIC (Zeng et al. 2023), and for language models in MAGIC (Su et al.
2022). Do not evaluate such captions by the same CLIP, as it chose them.

Dimensions: B images, R captions (R/B consecutive rows per image), M revealed tokens, K candidate tokens, L positions,
E embedding width.
"""
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.types import Device

from ..text.special_tokens import decode_captions

TEMPERATURE = 0.01  # of CLIP's softmax after its training
TEXTS_PER_BATCH = 256
TOP_K = 5  # candidate tokens, K


class Clip(NamedTuple):
    """An OpenCLIP model that compares images with texts, in eval mode."""

    model: torch.nn.Module
    transform: Callable  # an RGB image -> [3, height, width]. It differs from the captioner's
    tokenizer: Callable


class _Texts(torch.nn.Module):
    def __init__(self, clip: torch.nn.Module):
        super().__init__()
        self.clip = clip

    def forward(self, text: Tensor) -> Tensor:
        return self.clip.encode_text(text)


def encode_text(clip: torch.nn.Module, text: Tensor, device: Device) -> Tensor:
    """Return the model's `encode_text`, equal up to rounding but faster: [R, E] from ids [R, L] on the CPU."""
    # A causal tower need not read positions after the last one that it pools. Other towers run as they are.
    # OpenCLIP keeps a text tower's attributes in a module of its own, or under names with "text_" in the model.
    tower, name, prefix = (clip.text, "clip.text", "") if hasattr(clip, "text") else (clip, "clip", "text_")
    pool = getattr(tower, f"{prefix}pool_type", None)
    causal = getattr(tower, "attn_mask", None) is not None and getattr(tower, "cls_emb", None) is None
    if not causal or pool not in ("argmax", "eos"):
        return clip.encode_text(text.to(device))
    end = text if pool == "argmax" else (text == getattr(tower, f"{prefix}eos_id")).int()
    length = int(end.argmax(1).max()) + 1
    shorter = {f"{name}.positional_embedding": tower.positional_embedding[:length],
               f"{name}.attn_mask": tower.attn_mask[:length, :length]}
    return functional_call(_Texts(clip), shorter, text[:, :length].to(device))


class Guide:
    """Compares captions with the images of one batch by CLIP. A caption of an image is never encoded twice."""

    @torch.no_grad()
    def __init__(self, clip: Clip, image: Tensor, tokenizer: Callable, scale: float = 0.0, top_k: int = TOP_K):
        """Encode images [B, 3, height, width] from CLIP's own transform. `tokenizer` is the captioner's."""
        self.clip, self.tokenizer, self.scale, self.top_k = clip, tokenizer, scale, top_k
        self.device = image.device
        self.image = F.normalize(clip.model.encode_image(image).float(), dim=-1)
        self.known: list[dict[str, float]] = [{} for _ in image]  # for each image, the cosines of its captions

    @property
    def texts(self) -> list[int]:
        """Return the number of captions that were encoded for each image, which is the cost of guidance."""
        return [len(known) for known in self.known]

    @torch.no_grad()
    def cosines(self, captions: Sequence[str], images: Sequence[int]) -> Tensor:
        missing = [pair for pair in dict.fromkeys(zip(images, captions, strict=True))
                   if pair[1] not in self.known[pair[0]]]
        for first in range(0, len(missing), TEXTS_PER_BATCH):
            rows, texts = zip(*missing[first:first + TEXTS_PER_BATCH], strict=True)
            text = self.clip.tokenizer(list(texts))
            embs = F.normalize(encode_text(self.clip.model, text, self.device).float(), dim=-1)
            values = (embs * self.image[list(rows)]).sum(1).tolist()
            for row, text, value in zip(rows, texts, values, strict=True):
                self.known[row][text] = value
        return torch.tensor([self.known[i][text] for i, text in zip(images, captions, strict=True)], device=self.device)

    def similarity(self, text: Tensor) -> Tensor:
        """Return cosines [R] of captions, long [R, L], with their images."""
        per_image = len(text) // len(self.known)
        return self.cosines(decode_captions(text, self.tokenizer), [row // per_image for row in range(len(text))])

    def __call__(self, text: Tensor, row: Tensor, captions_per_image: int = 1) -> Tensor:
        """Return scale * log softmax over K of CLIP's logits, float32 [M, K].

        Args: `text` has captions, long [M, K, L], and `row` the number of each among all captions, long [M].
        """
        images = [i // captions_per_image for i in row.tolist() for _ in range(text.shape[1])]
        cosines = self.cosines(decode_captions(text.flatten(0, 1), self.tokenizer), images)
        return self.scale * (cosines.view(text.shape[:2]) / TEMPERATURE).log_softmax(1)
