"""A CLIP model beside a captioner: it re-weighs the tokens that decoding considers, or chooses among several captions.

Not in the paper: it is claimed elsewhere for masked diffusion captioners, and is here to be measured. At each step the
k most probable tokens of the position that is revealed are put into the caption completed by the step's own most
probable tokens, so that CLIP reads whole captions only. Their log p becomes log p + scale * log softmax_k(cos/0.01)
(`confidence.reweigh`), as ConZIC (Zeng et al. 2023) adds them and as MAGIC (Su et al. 2022) weighs a language model's.
CLIP's own score of such captions is no evidence, as they were chosen by it.

Dimensions: B images, R captions (R/B consecutive ones of an image), M revealed tokens, K candidates, L positions, N
texts, E embedding width.
"""
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from ..text.special_tokens import decode_captions

TEMPERATURE = 0.01  # of CLIP's own softmax, where its training leaves it
TEXTS_PER_BATCH = 256


class Clip(NamedTuple):
    """An OpenCLIP model that compares images with texts, in eval mode."""

    model: torch.nn.Module
    transform: Callable  # an RGB image -> [3, H, W]; not the captioner's
    tokenizer: Callable


class _Texts(torch.nn.Module):
    def __init__(self, clip: torch.nn.Module):
        super().__init__()
        self.clip = clip

    def forward(self, text: Tensor) -> Tensor:
        return self.clip.encode_text(text)


def encode_text(clip: torch.nn.Module, text: Tensor, device: str | torch.device) -> Tensor:
    """Return the model's `encode_text` up to rounding, [N, E] from ids [N, L] on the CPU, at less cost."""
    # In a causal tower the positions behind the last one that is pooled are read by none. Others run as they are.
    # OpenCLIP keeps what a text tower is in a module of its own, or under names with "text_" in the model.
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
    """CLIP's view of captions of the images of one batch. No caption of an image is encoded twice."""

    @torch.no_grad()
    def __init__(self, clip: Clip, image: Tensor, tokenizer: Callable, scale: float = 0.0, top_k: int = 5):
        """Encode the image [B, 3, H, W] (by CLIP's own transform), once. `tokenizer` is the captioner's."""
        self.clip, self.tokenizer, self.scale, self.top_k = clip, tokenizer, scale, top_k
        self.device = image.device
        self.image = F.normalize(clip.model.encode_image(image).float(), dim=-1)
        self.known: list[dict[str, float]] = [{} for _ in image]  # of each image, the cosines of captions

    @property
    def texts(self) -> list[int]:
        """Return the number of captions that were encoded for each image: the cost of guidance."""
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
        return torch.tensor([self.known[i][text] for i, text in zip(images, captions, strict=True)],
                            device=self.device)

    def similarity(self, text: Tensor) -> Tensor:
        """Return cosines of captions, long [R, L], with their images: [R]."""
        per_image = len(text) // len(self.known)
        return self.cosines(decode_captions(text, self.tokenizer), [row // per_image for row in range(len(text))])

    def __call__(self, text: Tensor, image: Tensor) -> Tensor:
        """Return scale * log softmax over K of CLIP's logits, float32 [M, K], for captions [M, K, L] of images [M]."""
        images = [i for i in image.tolist() for _ in range(text.shape[1])]
        cosines = self.cosines(decode_captions(text.flatten(0, 1), self.tokenizer), images)
        return self.scale * (cosines.view(text.shape[:2]) / TEMPERATURE).log_softmax(1)
