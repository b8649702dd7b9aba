"""Images made worse before a model sees them, as in ImageNet-C (Hendrycks & Dietterich 2019). Brightness is multiplied.

The stored image is corrupted, before any model's own transform: whatever their sizes, all models see the same, the CLIP
that guides too. Training images of a probe, references, and the CLIP that scores captions have clean ones.
"""
import hashlib
from typing import NamedTuple

import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

SIDE = 224  # pixels, to which the sigmas of blur refer
LEVELS = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),  # standard deviation, of 0 to 1
    "gaussian_blur": (1, 2, 3, 4, 6),  # standard deviation in pixels of 224
    "jpeg": (25, 18, 15, 10, 7),  # quality
    "brightness": (1.2, 1.4, 1.6, 1.8, 2.0),  # factor
}


def noise(image: torch.Tensor, sigma: float) -> torch.Tensor:
    # Seeded by the pixels: an image is always corrupted alike, whichever shard it lies in and process reads it.
    seed = int.from_bytes(hashlib.sha256(image.numpy().tobytes()).digest()[:8], "big") >> 1
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return (image + 255 * sigma * noise).round().clamp(0, 255).to(torch.uint8)


def blur(image: torch.Tensor, sigma: float) -> torch.Tensor:
    shorter = min(image.shape[1:])
    sigma *= shorter / SIDE  # relative to ImageNet-C's 224 pixels, so that small images stay images
    kernel = 2 * min(round(4 * sigma) + 1, (shorter - 1) // 2) + 1  # odd, and no longer than the image is reflected
    return F.gaussian_blur(image, kernel, sigma)


APPLY = {"gaussian_noise": noise, "gaussian_blur": blur, "jpeg": F.jpeg, "brightness": F.adjust_brightness}


class Corruption(NamedTuple):
    name: str
    severity: int  # 0 to 5; 0 changes nothing

    def __call__(self, image: Image.Image) -> Image.Image:
        if self.severity == 0:
            return image
        pixels = F.pil_to_tensor(image.convert("RGB"))
        return F.to_pil_image(APPLY[self.name](pixels, LEVELS[self.name][self.severity - 1]))


def parse(spec: str) -> Corruption:
    name, _, severity = spec.partition(":")
    if name not in LEVELS or severity not in tuple("012345"):
        raise ValueError(f"--corruption {spec} is not NAME:SEVERITY, {', '.join(LEVELS)} and 0 to 5")
    return Corruption(name, int(severity))
