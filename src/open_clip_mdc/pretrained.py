"""`open_clip_mdc.load`: a trained captioner with the transform and tokenizer of its run, for Python and for the tools.

    model = open_clip_mdc.load("logs/RUN")          # or a checkpoint, local-dir:DIR, hf-hub:ORG/NAME
    model.caption(["cat.jpg", image])               # images: files, PIL images, preprocessed tensors
    model.score(["cat.jpg"], ["a cat", "a dog"])    # log p(caption | image), nats
    model.encode_image(["cat.jpg"])                 # the GAP feature (Sec. 4.2)

Dimensions: B images, C captions of an image, L positions, P patches, D image width.
"""
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from . import checkpoints
from .data.images import open_image, upright
from .interface import Decoded
from .loading import Batches, split_normalization
from .model import Captioner
from .sampling import Sampling
from .tokens import caption_lengths, decode_captions, decode_tokens, tokenize_whole
from .unmask import tokenize_with_masks

AnyImage = str | Path | Image.Image | Tensor  # a file, an RGB image, or what the transform makes of one, [3, H, W]
Images = AnyImage | Sequence[AnyImage]  # also a tensor [B, 3, H, W]


@dataclass(frozen=True)
class PretrainedCaptioner:
    """A captioner, what belongs to it, and how it is run."""

    model: Captioner
    transform: Callable[[Image.Image], Tensor]
    tokenizer: Any  # OpenCLIP's SimpleTokenizer
    device: str
    precision: str  # of the arithmetic: fp32, bf16 or fp16; weights stay float32

    def autocast(self) -> AbstractContextManager:
        """In which the model computes in `precision`."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        return torch.autocast(torch.device(self.device).type, dtype=dtype, enabled=dtype is not None)

    @cached_property
    def _split(self) -> tuple[Callable, Batches]:
        to_bytes, normalize = split_normalization(self.transform)
        return to_bytes, Batches((), self.device, normalize)

    @property
    def to_bytes(self) -> Callable[[Image.Image], Tensor]:
        """`transform` up to its conversion to floats, which costs more than the rest and is cheaper for a batch."""
        return self._split[0]

    def from_bytes(self, image: Tensor) -> Tensor:
        """A batch [B, 3, H, W] by `to_bytes`, on the device, as `transform` makes it: equal to the last bit."""
        return self._split[1].normalized(image.to(self.device, non_blocking=True))

    def batches(self, images: Images, batch_size: int = 32) -> Iterator[Tensor]:
        """Preprocessed images on the device, [B, 3, H, W], B up to `batch_size`.

        Raises:
            ValueError: a file cannot be read as an image, or an image has pixels of 32 bits.
        """
        images = as_list(images)
        for start in range(0, len(images), batch_size):
            batch = [x if isinstance(x, Tensor) else self.transform(
                upright(x) if isinstance(x, Image.Image) else open_image(Path(x)))
                for x in images[start:start + batch_size]]
            yield torch.stack(batch).to(self.device, non_blocking=True)

    def pil_image(self, image: Tensor) -> Image.Image:
        """What the model sees of an image: the transform's [3, H, W] without its normalisation."""
        mean, std = (torch.tensor(self.model.visual.preprocess_cfg[name]).view(-1, 1, 1) for name in ("mean", "std"))
        pixels = (255 * (image.cpu() * std + mean).clamp(0, 1)).round().byte()
        return Image.fromarray(pixels.permute(1, 2, 0).numpy())

    def encode_image(self, images: Images, normalize: bool = False, batch_size: int = 32) -> Tensor:
        """The GAP features that are probed, float32 [B, D], on the CPU."""
        with torch.inference_mode(), self.autocast():
            return torch.cat([self.model.encode_image(x, normalize).float().cpu()
                              for x in self.batches(images, batch_size)])

    def encode_image_tokens(self, images: Images, batch_size: int = 32) -> Tensor:
        """Normalised patch tokens, float32 [B, P, D], on the CPU."""
        with torch.inference_mode(), self.autocast():
            return torch.cat([self.model.encode_image_tokens(x).float().cpu()
                              for x in self.batches(images, batch_size)])

    def decode(self, image: Tensor, **options) -> list[dict]:
        """Captions of one preprocessed batch [B, 3, H, W], token by token: see `describe_captions`.

        Args:
            options: of `generate.generate`.
        """
        with self.autocast():
            decoded = self.model.generate(image, return_trace=True, **options)
        return describe_captions(decoded, self.tokenizer)

    def trace(
            self,
            images: Images,
            text: str | None = None,
            temperature: float = 0.0,
            top_k: int | None = None,
            top_p: float | None = None,
            seed: int = 0,
            batch_size: int = 32,
            **options,
    ) -> list[dict]:
        """`caption` with the step and the log-probability of every token: see `describe_captions`."""
        if text is not None:
            options["text"] = tokenize_with_masks(self.tokenizer, text, self.model.context_length).to(self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        options["sampling"] = Sampling(temperature, top_k, top_p, generator)
        return [row for x in self.batches(images, batch_size) for row in self.decode(x, **options)]

    def caption(self, images: Images, **options) -> list[str]:
        """Captions.

        Args:
            options: `text`, a caption to fill in, "a [MASK] dog", a token each; `temperature`, `top_k`, `top_p`, `seed`
                of what is drawn; `batch_size`; and those of `generate.generate`: `length`, `tokens_per_step` and more.

        Raises:
            ValueError: an option is out of range. TypeError: this kind of captioner does not know it.
        """
        return [row["caption"] for row in self.trace(images, **options)]

    def score(self, images: Images, captions: Sequence[str] | Sequence[Sequence[str]], batch_size: int = 32,
              **options) -> Tensor:
        """log p(caption | image) in nats, float32 [B, C], on the CPU.

        Args:
            captions: C captions, scored for every image; or a list of C captions for each image.
            options: of `scoring.log_likelihood`.

        Raises:
            ValueError: a caption is longer than the context, or an option is out of range.
        """
        images, each = as_list(images), [captions] if isinstance(captions[0], str) else captions
        if len(each) not in (1, len(images)):
            raise ValueError(f"there are {len(images)} images, but captions of {len(each)}")
        text = torch.stack([tokenize_whole(c, self.tokenizer, self.model.context_length) for c in each]).to(self.device)
        scores, count = [], 0
        for image in self.batches(images, batch_size):
            own = text.expand(len(image), -1, -1) if len(text) == 1 else text[count:count + len(image)]
            with self.autocast():
                scores.append(self.model.log_likelihood(image, own, **options).cpu())
            count += len(image)
        return torch.cat(scores)


def as_list(images: Images) -> Sequence[AnyImage]:
    """One image is a list of one."""
    one = isinstance(images, (str, Path, Image.Image)) or isinstance(images, Tensor) and images.ndim == 3
    return [images] if one else images


def describe_captions(decoded: Decoded, tokenizer) -> list[dict]:
    """{"caption": text, "tokens": [{"token", "step", "log_prob"}, ...]} of each caption, tokens in reading order.

    A token that ends a word ends in a space. `step` is the one that revealed it, from 0, and `log_prob` what the model
    gave it then (nats); both are None for a token that was given. Where the model itself chose to end the caption, the
    last token is "<end>".
    """
    rows = []
    captions = decode_captions(decoded.text, tokenizer)
    lengths = caption_lengths(decoded.text, tokenizer.vocab_size).tolist()
    for caption, n, *columns in zip(captions, lengths, *map(torch.Tensor.tolist, decoded), strict=True):
        ids, steps, log_probs = (column[1:n] for column in columns)  # without SOT
        words = [*decode_tokens(ids[:-1], tokenizer), "<end>"]
        tokens = [{"token": word, "step": None, "log_prob": None} if step < 0 else
                  {"token": word, "step": step, "log_prob": log_prob}
                  for word, step, log_prob in zip(words, steps, log_probs, strict=True)]
        rows.append({"caption": caption, "tokens": tokens if steps[-1] >= 0 else tokens[:-1]})
    return rows


def default_device(device: str | None = None) -> str:
    """The device given; else cuda where there is one, else cpu."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def load(pretrained: str | Path, model_name: str | None = None, device: str | None = None,
         precision: str | None = None) -> PretrainedCaptioner:
    """A captioner as it was trained, in eval mode.

    Args:
        pretrained: a run folder of open_clip_train, a checkpoint file, a folder with open_clip_config.json,
            local-dir:DIR or hf-hub:ORG/NAME.
        model_name: the architecture of a checkpoint outside a run folder.
        device: by default cuda where there is one, else cpu.
        precision: fp32, bf16 or fp16; by default bf16 on cuda, else fp32.

    Raises:
        FileNotFoundError: it is not there. ValueError: it is no captioner, or holds other weights.
    """
    device = default_device(device)
    model, transform, tokenizer = checkpoints.load(str(pretrained), model_name, device)
    if not isinstance(model, Captioner):
        raise ValueError(f"{pretrained} is no captioner")
    return PretrainedCaptioner(model, transform, tokenizer, device,
                               precision or ("bf16" if device.startswith("cuda") else "fp32"))
