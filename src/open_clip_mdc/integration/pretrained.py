"""`open_clip_mdc.load`: a trained captioner with its transform and tokenizer, for Python and the command-line tools.

    model = open_clip_mdc.load("logs/RUN")          # or "photo", a checkpoint, local-dir:DIR, hf-hub:ORG/NAME
    model.caption(["cat.jpg", image])               # images: files, folders, PIL images, arrays, preprocessed tensors
    model.score(["cat.jpg"], ["a cat", "a dog"])    # log p(caption | image) in nats, or kind="debiased"
    model.features("photos/", kind="cls", layer=-2) # "gap" (Sec. 4.2), "cls" or "patches" after any layer

Dimensions: B images, C captions of an image, L positions, P patches, D width, E embedding, H and W pixels.
"""
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.layers import to_2tuple
from torch import Tensor

from ..data.images import Transform, open_image
from ..decoding import options as decoding
from ..decoding.confidence import tokenize_with_masks
from ..decoding.generate import OF_UNMASK_IMAGES, generate
from ..decoding.options import Sampling, Search, Unmasking
from ..decoding.sampling import Decoded
from ..errors import check_numbers, check_options, check_scale
from ..likelihood import log_likelihood as scoring
from ..models.captioner import Captioner
from ..models.precision import in_eval_mode
from ..models.towers import patch_tokens, tower
from ..text.special_tokens import caption_lengths, decode_captions, decode_tokens, tokenize_whole, whole_words
from . import checkpoints
from .folding import MANY, read_only_tokens
from .inputs import Captions, Images, as_captions, as_list
from .prefetch import PrefetchLoader, split_normalization

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SCORES = ("plain", "blind", "debiased")


def names_of(*functions: Callable) -> set[str]:
    """Return the options of functions, without those that the methods below set."""
    return {name for function in functions for name in signature(function).parameters} - {
        "self", "model", "image", "images", "text", "captions", "sampling", "options", "return_trace", "return_details"}


@dataclass(frozen=True)
class PretrainedCaptioner:
    """A captioner with its transform and tokenizer, on a device, in a precision."""

    model: Captioner
    transform: Transform
    tokenizer: Any  # OpenCLIP's SimpleTokenizer
    device: str
    precision: str  # fp32, bf16 or fp16: that of autocast, as weights stay float32

    def autocast(self) -> AbstractContextManager:
        """Return the context in which the model runs at `precision`."""
        dtype = PRECISIONS[self.precision]
        return torch.autocast(torch.device(self.device).type, dtype=dtype, enabled=dtype is not None)

    @cached_property
    def to_bytes(self) -> Transform:
        """Return `transform` up to its conversion to floats, which is cheaper for a whole batch (`from_bytes`)."""
        return split_normalization(self.transform)[0]

    @cached_property
    def _loader(self) -> PrefetchLoader:
        return PrefetchLoader((), self.device, split_normalization(self.transform)[1])

    def from_bytes(self, image: Tensor) -> Tensor:
        """Convert a batch of `to_bytes`, uint8 [B, 3, H, W], as `transform` would, to the last bit, on the device.

        Patch tokens, [B, P, D], are only converted to float32.
        """
        return self._loader.normalized(image.to(self.device, non_blocking=True))

    def batches(self, images: Images, batch_size: int = 32) -> Iterator[Tensor]:
        """Yield preprocessed images on the device, [B, 3, H, W], B up to `batch_size`."""
        check_numbers({"batch_size": batch_size})
        images = as_list(images)
        for start in range(0, len(images), batch_size):
            batch = [self.preprocessed(x) for x in images[start:start + batch_size]]
            yield torch.stack(batch).to(self.device, non_blocking=True)

    def preprocessed(self, image: str | Path | Image.Image | Tensor) -> Tensor:
        """Return one image as the model takes it, float32 [3, H, W]. Raises ValueError if it is not one."""
        if not isinstance(image, Tensor):
            return self.transform(open_image(image))
        size = to_2tuple(self.model.visual.image_size)  # one number in a ResNet
        if image.shape != (3, *size) or not image.is_floating_point():
            raise ValueError(f"a tensor {list(image.shape)} of {image.dtype} is no image for this model: give what its "
                             f"transform returns, floats {[3, *size]}, or pixels as a NumPy array, uint8 [H, W, 3]")
        return image.float()

    def pil_image(self, image: Tensor) -> Image.Image:
        """Return the picture that the model sees: a preprocessed image [3, H, W] without its normalisation."""
        mean, std = (torch.tensor(self.model.visual.preprocess_cfg[name]).view(-1, 1, 1) for name in ("mean", "std"))
        pixels = (255 * (image.cpu() * std + mean).clamp(0, 1)).round().byte()
        return Image.fromarray(pixels.permute(1, 2, 0).numpy())

    def _encode(self, encode: Callable[[Tensor], Tensor], images: Images, batch_size: int) -> Tensor:
        with torch.inference_mode(), self.autocast(), in_eval_mode(self.model):
            parts = [encode(x).float().cpu() for x in self.batches(images, batch_size)]
        return torch.cat(parts)  # no inference tensor, so that a probe can be trained on it

    def encode_image(self, images: Images, normalize: bool = False, batch_size: int = 32) -> Tensor:
        """Return the average-pooled features that a linear probe takes, float32 [B, D], on the CPU.

        For a model trained with a contrastive loss they are embeddings [B, E], comparable with those of `encode_text`.
        """
        return self._encode(lambda x: self.model.encode_image(x, normalize), images, batch_size)

    def encode_text(self, captions: Captions, normalize: bool = False) -> Tensor:
        """Return embeddings of captions, of nested lists one after another, float32 [C, E], on the CPU.

        Raises ValueError if a caption is longer than the context, or the model was trained without a contrastive loss.
        """
        if not hasattr(self.model, "encode_text"):
            raise ValueError("this captioner has no text embeddings: train one whose name ends in -contrastive")
        text = tokenize_whole(sum(as_captions(captions), []), self.tokenizer, self.model.context_length)
        with torch.no_grad(), self.autocast():
            return self.model.encode_text(text.to(self.device), normalize).float().cpu()

    def features(self, images: Images, kind: str = "gap", layer: int = -1, batch_size: int = 32) -> Tensor:
        """Return features, float32 on the CPU: [B, D], or [B, P, D] for kind "patches" (`Tower.features`)."""
        return self._encode(lambda x: tower(self.model.visual).features(x, kind, layer), images, batch_size)

    def mean_image(self, images: Images, batch_size: int = 32) -> Tensor:
        """Return the null image for unconditional scores, [P, D]: the mean patch tokens of some hundred typical images.

        Raises ValueError for fewer than 32 images, as their mean would show what is in them.
        """
        images = as_list(images)
        decoding.check_null_images(len(images), "blind_images")
        with self.autocast(), in_eval_mode(self.model):
            return scoring.mean_image(self.model, self.batches(images, batch_size))

    def _null_image(self, blind_images: Images | None, others: list, batch_size: int) -> Tensor:
        if isinstance(blind_images, Tensor) and blind_images.ndim == 2:
            shape = self.model.tower.num_patches, self.model.tower.width
            if blind_images.shape != shape:
                raise ValueError(f"blind_images is a tensor {list(blind_images.shape)}: give images, or mean_image() "
                                 f"of this model, {list(shape)}")
            return blind_images.to(self.device)
        return self.mean_image(others if blind_images is None else blind_images, batch_size)

    def encode_image_tokens(self, images: Images, batch_size: int = 32) -> Tensor:
        """Return normalised patch tokens, float32 [B, P, D], on the CPU."""
        return self._encode(self.model.encode_image_tokens, images, batch_size)

    def masked_text(self, text: str, length: int | str | None = None) -> Tensor:
        """Return the ids of a caption with [MASK] to fill in, long [1, L].

        Raises OptionError if there is nothing to fill in, if a length is given, or if the model cannot fill in.
        """
        decoding.searches({"text": text}, self.model.objective)
        decoding.check_text(text, length)
        return tokenize_with_masks(self.tokenizer, text, self.model.context_length)

    def decode(self, image: Tensor, **options) -> list[dict]:
        """Return captions of one preprocessed batch [B, 3, H, W], token by token (`describe_captions`)."""
        with self.autocast():
            decoded = self.model.generate(image, return_trace=True, **options)
        return describe_captions(decoded, self.tokenizer)

    def trace(self, images: Images, text: str | None = None, temperature: float = 0.0, top_k: int | None = None,
              top_p: float | None = None, seed: int = 0, batch_size: int = 32,
              blind_images: Images | None = None, **options) -> list[dict]:
        """Return captions with the step and the log-probability of every token (`describe_captions`)."""
        check_numbers({"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
                       "batch_size": batch_size, **options})
        if text is not None and not isinstance(text, str):
            raise TypeError(f"text is {text!r}: it must be one caption with a [MASK], to fill in for each image")
        given = {**options, **({} if text is None else {"text": text})}
        causal = decoding.searches(given, self.model.objective)
        known = names_of(generate, Search if causal else Unmasking, PretrainedCaptioner.trace)
        check_options("caption", options, known | (set() if causal else {*OF_UNMASK_IMAGES} - {"text"}))
        # What does not fit is refused before an image is read.
        sampling = Sampling(temperature, top_k, top_p, torch.Generator(self.device).manual_seed(seed))
        decoding.checked(options, causal, sampling)
        options = decoding.readable(options, causal) | {"sampling": sampling}
        images = as_list(images)
        if text is not None:
            options["text"] = self.masked_text(text, options.get("length"))
        if decoding.needs_null_image(options, self.model) and options.get("blind") is None:
            options["blind"] = self._null_image(blind_images,
                                                  decoding.spread(images)[:decoding.NULL_IMAGES], batch_size)
        elif blind_images is not None:
            raise ValueError("blind_images changes nothing without a guidance_scale other than 1")
        return [row for x in self.batches(images, batch_size) for row in self.decode(x, **options)]

    def caption(self, images: Images, **options) -> list[str]:
        """Return captions.

        Args:
            options: `text` is a caption to fill in, such as "a [MASK] dog", with one token for each [MASK].
                `temperature`, `top_k`, `top_p` and `seed` are for sampling. `batch_size` is in images. The mean of
                `blind_images` is the null image of guidance (default: 256 of `images`). All others are those
                of `generate.generate`, such as `tokens_per_step`, `length` (default: "auto" for a model that has
                learnt the lengths of captions, else 15) or `repeats` (default: "avoid", so that a word stands twice
                in a row only where the model is sure of it, or where one step reveals both).

        Raises ValueError or TypeError for an option that is unknown, out of range or not for this kind of captioner.
        """
        return [row["caption"] for row in self.trace(images, **options)]

    def score(self, images: Images, captions: Captions, kind: str = "plain", alpha: float | None = None,
              blind_images: Images | None = None, batch_size: int = 32, **options) -> Tensor:
        """Return scores of captions in nats, float32 [B, C], on the CPU.

        Args:
            captions: one caption or C captions, scored for every image, or a list of C captions for each image.
            kind: "plain" is log p(caption | image), by MDC given its length. "blind" is log p(caption) by the null
                image, and "debiased" is plain - alpha * blind. These are the columns of `open_clip_mdc score`.
            alpha: for "debiased". The default is 1.
            blind_images: for "blind" and "debiased": 32 images or more, whose mean is the null image, or their
                `mean_image`. The default is `images`.
            options: `memory_mib` of `log_likelihood`, and the fields of `Scoring`, such as method="parallel".

        Raises ValueError if a caption is longer than the context, or if there are too few images for the null image.
        """
        check_numbers({"batch_size": batch_size, "alpha": alpha, **options})
        check_scale("alpha", alpha or 0)
        check_options("score", options, names_of(
            scoring.log_likelihood, scoring.Scoring, PretrainedCaptioner.score) - {"blind"})
        if kind not in SCORES:
            raise ValueError(f"kind is {kind!r}: it must be {', '.join(SCORES[:-1])} or {SCORES[-1]}")
        for name, value, kinds in (("alpha", alpha, SCORES[2:]), ("blind_images", blind_images, SCORES[1:])):
            if value is not None and kind not in kinds:
                raise ValueError(f"{name} is for kind={' or kind='.join(map(repr, kinds))}, but this is kind={kind!r}")
        images, each = as_list(images), as_captions(captions)
        if len(each) not in (1, len(images)):
            raise ValueError(f"there are {len(images)} images, but captions for {len(each)}")
        text = torch.stack([tokenize_whole(c, self.tokenizer, self.model.context_length) for c in each])
        blind, plain = 0.0, []
        if kind != "plain":
            null_image = self._null_image(blind_images, images, batch_size)
            with self.autocast():
                blind = self.model.log_likelihood(None, text, blind=null_image, **options).cpu()
        if kind == "blind":
            return blind.expand(len(images), -1).clone()
        texts = text.expand(len(images), -1, -1).split(batch_size)
        for image, own in zip(self.batches(images, batch_size), texts, strict=True):
            with self.autocast(), in_eval_mode(self.model):
                plain.append(self.model.log_likelihood(image, own, **options).cpu())
        return torch.cat(plain) - (1.0 if alpha is None else alpha) * blind


def tokens_of(kept: dict, *image) -> Tensor:  # tower, images, and which tokens are masked
    return read_only_tokens(kept, *image) if len(image[1]) >= MANY else patch_tokens(*image)


def describe_captions(decoded: Decoded, tokenizer) -> list[dict]:
    """Return {"caption": text, "tokens": [{"token", "step", "log_prob"}, ...]} of each caption, in reading order.

    A token that ends a word ends in a space. `step` is the decoding step that revealed it, from 0, and `log_prob` its
    log-probability at that step, in nats. Both are None for a token that was given. If the model itself chose to end
    the caption, the last token is "<end>". The host waits for the device once.
    """
    text, step, bits = torch.stack((*decoded[:2], decoded.log_prob.view(torch.int32).long())).cpu()
    columns = text.tolist(), step.tolist(), bits.int().view(torch.float32).tolist()
    whole, rows = whole_words(tokenizer).keys(), []
    for i, n in enumerate(caption_lengths(text, tokenizer.vocab_size).tolist()):
        ids, steps, log_probs = (column[i][1:n] for column in columns)  # without SOT
        words = decode_tokens(ids[:-1], tokenizer)
        caption = "".join(words).strip() if whole >= {*ids[:-1]} else decode_captions(text[i:i + 1], tokenizer)[0]
        tokens = [{"token": word, "step": None, "log_prob": None} if step < 0 else
                  {"token": word, "step": step, "log_prob": log_prob}
                  for word, step, log_prob in zip((*words, "<end>"), steps, log_probs, strict=True)]
        rows.append({"caption": caption, "tokens": tokens if steps[-1] >= 0 else tokens[:-1]})
    return rows


def load(pretrained: str | Path, model_name: str | None = None, device: str | torch.device | None = None,
         precision: str | None = None, compile: bool = False) -> PretrainedCaptioner:
    """Return a captioner as it was trained, in eval mode.

    Args:
        pretrained: a run folder of open_clip_train, a checkpoint file, a folder with open_clip_config.json,
            local-dir:DIR, hf-hub:ORG/NAME, or "photo", the packaged captioner of photographs.
        model_name: the architecture of a checkpoint outside a run folder.
        device: by default cuda if there is one, else cpu.
        precision: fp32, bf16 or fp16. By default bf16 on cuda, else fp32.
        compile: on cuda, caption faster after about a minute. The image encoder is compiled by torch.compile. Steps of
            masked diffusion run as CUDA graphs.

    Raises FileNotFoundError if there is no checkpoint, and ValueError if it is not that of a captioner.
    """
    if not os.fspath(pretrained).strip():
        raise ValueError("pretrained is empty: give a run folder, a checkpoint, local-dir:DIR or hf-hub:ORG/NAME")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: it must be {', '.join(PRECISIONS)}")
    device = checkpoints.default_device(None if device is None else str(device))
    if compile and not device.startswith("cuda"):
        raise ValueError(f"compile is {compile}: it must be False on {device}, as only cuda gains by it")
    model, transform, tokenizer = checkpoints.load(os.fspath(pretrained), model_name, device, captioner=True)
    model.patch_tokens = partial(tokens_of, {})
    if compile:
        from ..models.step_graphs import compile_for_captions
        compile_for_captions(model)
    return PretrainedCaptioner(model, transform, tokenizer, device,
                               precision or ("bf16" if device.startswith("cuda") else "fp32"))
