"""Batches on the device: prefetched one ahead, copied as bytes, and normalised there to the last bit of upstream.

It imports nothing of open_clip_train, as every command that reads images normalises them by it.

Dimensions: B images, H and W pixels, P patch tokens of width D.
"""
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose, Normalize, ToTensor
from torchvision.transforms.functional import pil_to_tensor


def to_bytes(image: Image.Image) -> Tensor:
    """Return uint8 [3, H, W], contiguous as from `ToTensor`: the memory layout changes how convolutions round."""
    return pil_to_tensor(image).contiguous()


def split_normalization(transform: Callable) -> tuple[Callable, Normalize | None]:
    """Split a transform into one that ends in `to_bytes`, and the normalisation of that result divided by 255.

    A transform that does not end in ToTensor and Normalize is returned as it is, with None.
    """
    stages = getattr(transform, "transforms", [])
    if len(stages) > 1 and isinstance(stages[-2], ToTensor) and isinstance(stages[-1], Normalize):
        return Compose([*stages[:-2], to_bytes]), stages[-1]
    return transform, None


def pair(batch: tuple[Tensor, Tensor] | dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return image and text of a batch, which is a dictionary in OpenCLIP 4.x."""
    return (batch["image"], batch["text"]) if isinstance(batch, dict) else batch


def one_ahead(items: Iterable, start: Callable) -> Iterator:
    """Yield start(item) of each item. The next one is started before each is yielded."""
    ahead = []
    for item in items:
        ahead.append(start(item))
        if len(ahead) > 1:
            yield ahead.pop(0)
    yield from ahead


class PrefetchLoader:
    """Training loader that prepares the next batch and copies it to the device during the present step."""

    def __init__(self, loader: Iterable, device: str, normalize: Normalize | None, named: bool = False):
        self.loader, self.device, self.named = loader, torch.device(device), named
        self.prepare: Callable = lambda text: text  # a captioner's is `Captioner.prepare`, on the CPU
        self.mean, self.std = None, None
        if normalize is not None:
            self.mean, self.std = (torch.as_tensor(x, dtype=torch.float32).view(-1, 1, 1).to(self.device)
                                   for x in (normalize.mean, normalize.std))

    def __getattr__(self, name: str):
        return getattr(self.loader, name)  # num_batches, num_samples

    def __iter__(self) -> Iterator[tuple | dict]:
        pairs = map(pair, self.loader)
        made = map(self.finish, one_ahead(pairs, self.start)) if self.device.type == "cuda" else (
            (self.normalized(image.to(self.device)), self.prepare(text).to(self.device)) for image, text in pairs)
        return ({"image": image, "text": text} for image, text in made) if self.named else made

    def start(self, batch: tuple) -> tuple:
        """Begin to copy a batch to the device. Returns it with the event of its arrival."""
        image, text = batch
        text = self.prepare(text).pin_memory()
        with torch.cuda.stream(self.stream):
            batch = tuple(x.to(self.device, non_blocking=True) for x in (image, text))
            return batch, self.stream.record_event()

    def finish(self, started: tuple) -> tuple:
        """Wait for a batch's copy on the current stream, and keep its memory until that stream has used it."""
        (image, text), arrived = started
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(arrived)
        image.record_stream(stream)
        text.record_stream(stream)
        return self.normalized(image), text

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def normalized(self, image: Tensor) -> Tensor:
        """Return images normalised as by the end of their transform, float [B, 3, H, W], to the last bit.

        Tokens of a `FeatureCache`, [B, P, D], are not normalised.
        """
        if image.ndim == 3:
            return image.float()
        if self.mean is None:
            return image
        return image.float().div_(255).sub_(self.mean).div_(self.std)
