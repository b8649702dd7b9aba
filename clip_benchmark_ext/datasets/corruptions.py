"""Corrupt test images as in ImageNet-C (Hendrycks & Dietterich 2019), but with brightness as a factor.

The stored image is corrupted before any model's own transform, so that all models see the same image, including a CLIP
model that guides decoding. Training images of a probe and images for CLIPScore stay clean.
"""
import hashlib
from typing import NamedTuple

import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

SIDE = 224  # the shorter side in pixels to which the sigmas of blur refer
LEVELS = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),  # standard deviation, for values from 0 to 1
    "gaussian_blur": (1, 2, 3, 4, 6),  # standard deviation in pixels, for SIDE
    "jpeg": (25, 18, 15, 10, 7),  # quality
    "brightness": (1.2, 1.4, 1.6, 1.8, 2.0),  # factor
}


def noise(image: torch.Tensor, sigma: float) -> torch.Tensor:
    # Seeded by the pixels, so that an image is always corrupted alike, in any shard and process.
    seed = int.from_bytes(hashlib.sha256(image.numpy().tobytes()).digest()[:8], "big") >> 1
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return (image + 255 * sigma * noise).round().clamp(0, 255).to(torch.uint8)


def blur(image: torch.Tensor, sigma: float) -> torch.Tensor:
    shorter = min(image.shape[1:])
    sigma *= shorter / SIDE  # relative to ImageNet-C's 224 pixels, so that small images stay recognisable
    kernel = 2 * min(round(4 * sigma) + 1, (shorter - 1) // 2) + 1  # odd, and within the reflected padding
    return F.gaussian_blur(image, kernel, sigma)


APPLY = {"gaussian_noise": noise, "gaussian_blur": blur, "jpeg": F.jpeg, "brightness": F.adjust_brightness}


class Corruption(NamedTuple):
    name: str
    severity: int  # 0 (no change) to 5

    def __call__(self, image: Image.Image) -> Image.Image:
        if self.severity == 0:
            return image
        pixels = F.pil_to_tensor(image.convert("RGB"))
        return F.to_pil_image(APPLY[self.name](pixels, LEVELS[self.name][self.severity - 1]))


def parse(spec: str) -> Corruption:
    name, _, severity = spec.partition(":")
    if name not in LEVELS or severity not in tuple("012345"):
        raise ValueError(f"--corruption {spec} is not NAME:SEVERITY with a NAME of {', '.join(LEVELS)} and a SEVERITY "
                         "of 0 to 5")
    return Corruption(name, int(severity))
