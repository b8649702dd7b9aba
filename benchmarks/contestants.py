"""Models to compare, each with its own loss: MDC, the paper's Algorithm 1 as printed, OpenCLIP's CLIP and its CoCa.

Dimensions: B images and captions, L = 77 positions, V vocabulary, M masked tokens.
"""
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import open_clip_mdc
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.models.step_graphs import compile_for_captions
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.text.packing import Captions
from open_clip_mdc.text.special_tokens import mask_id, target_tokens, valid_tokens


class Contestant(NamedTuple):
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]  # of image [B, 3, height, width] and text [B, L] or `prepare`'s

    def prepare(self, text: Tensor) -> Tensor | Captions:  # noising and packing on the CPU, as in training
        return self.model.prepare(text) if isinstance(self.model, Captioner) else text

    def step(self, image: Tensor, text: Tensor) -> None:
        self.model.zero_grad(set_to_none=True)
        self.loss(image, text).backward()


def algorithm_1(model: Captioner, image: Tensor, text: Tensor) -> Tensor:
    """Return 1/t * cross_entropy(logits[masked], text[masked]), with logits of all 77 positions as in the pseudocode.

    The paper does not say by what the sum is divided. Here it is divided as in `CaptionLoss`.
    """
    cfg, target = model.caption_cfg, target_tokens(text, model.vocab_size)
    t = torch.linspace(cfg.t_min, cfg.t_max, len(text), device=text.device)
    masked = target & (torch.rand(text.shape, device=text.device) < t[:, None])
    noisy = text.masked_fill(masked, mask_id(model.vocab_size))
    logits = model.logits(image, noisy, valid_tokens(text, model.vocab_size))
    nll = F.cross_entropy(logits[masked].float(), text[masked], reduction="none")
    return (nll / t[:, None].expand_as(text)[masked]).sum() / target.sum()


def vocab_size(model: nn.Module) -> int:
    return model.vocab_size if hasattr(model, "vocab_size") else model.text.vocab_size


def own_loss(model: nn.Module, loss: nn.Module, image: Tensor, text: Tensor) -> Tensor:
    return sum(loss(**model(image, text), output_dict=True).values())


def contestant(name: str, size: str, device: str = "cpu", compile_with: str | None = None) -> Contestant:
    """Return a model of this name and size in training mode, compiled if a backend of torch.compile is given."""
    open_clip_mdc.register()
    torch.manual_seed(0)
    config = {"Algorithm 1": f"MDC-{size}", "CLIP": size, "CoCa": f"coca_{size}"}.get(name, f"{name}-{size}")
    model = open_clip.create_model(config, device=device, output_dict=True).train()
    if name == "Algorithm 1":
        return Contestant(model, partial(algorithm_1, model))
    loss = {"CLIP": open_clip.ClipLoss, "CoCa": partial(open_clip.CoCaLoss, caption_loss_weight=2.0,
                                                        clip_loss_weight=1.0)}.get(name, CaptionLoss)()
    network = torch.compile(model, backend=compile_with) if compile_with else model
    return Contestant(model, partial(own_loss, network, loss))


def captioners(size: str, device: str) -> dict[str, Captioner]:
    """Return one MDC of this size in each mode of decoding. Only CUDA has others than "eager"."""
    made = {mode: contestant("MDC", size, device).model.eval()
            for mode in ("eager", "graphs", "graphs, compiled encoder")[:3 if device == "cuda" else 1]}
    for mode, model in made.items():
        if mode != "eager":
            compile_for_captions(model)
        if mode == "graphs":
            model.patch_tokens = made["eager"].patch_tokens
    return made


def tokenize(name: str, size: str, captions: list[str]) -> Tensor:
    open_clip_mdc.register()
    return open_clip.get_tokenizer({"CoCa": f"coca_{size}"}.get(name, f"MDC-{size}"))(captions)


def random_images(number: int, size: int = 224) -> Tensor:
    return torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(0))


def count_flops(step: Callable[[], object]) -> int:
    """Count the floating-point operations of the matrix products of a step, two per multiplication."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()
