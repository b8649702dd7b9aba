"""A training step without a GPU and without numbers: shape and bytes of every operator, as CUDA's autocast has them.

Fake tensors have a shape, a type and a storage of a size, and no content. PyTorch's autograd engine refuses fake CUDA
devices, so these are fake CPU tensors, and what differs under `amp_bf16` is put right (`cuda_rules`).
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from open_clip_mdc.text.packing import each_tensor

from .captions import MEAN, random_text
from .contestants import contestant, vocab_size

FREE = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh",
        "_unsafe_view"}


class Watch(TorchDispatchMode):
    """Sees every operator of a step, and knows which part of the step it belongs to."""

    part = "start"

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if operator.namespace != "prim":
            self.see(operator, args, kwargs or {}, out)
        return out

    def see(self, operator, args: tuple, kwargs: dict, out) -> None:
        raise NotImplementedError

    @staticmethod
    def is_kernel(operator) -> bool:
        """Whether the operator does work on the device, rather than look at the same bytes in another way."""
        return not operator.is_view and operator._overloadpacket.__name__ not in FREE


def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, **options) -> Tensor:
    """Keeps for backward what fused kernels do: q, k, v, the output, a logarithm per row, and the mask as a bias."""
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=attn_mask)[0]


def layer_norm(x: Tensor, *args, plain: Callable = F.layer_norm, **options) -> Tensor:
    """In float32, as under CUDA's autocast."""
    return plain(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **options)


@contextmanager
def cuda_rules() -> Iterator[None]:
    """bfloat16 autocast as on CUDA."""
    with mock.patch.object(F, "scaled_dot_product_attention", attention), \
            mock.patch.object(F, "layer_norm", layer_norm), torch.autocast("cpu", torch.bfloat16):
        yield


class FakeStep:
    """One training step of a contestant, of any size and batch."""

    def __init__(self, name: str, size: str, batch_size: int, mean_tokens: float = MEAN):
        """Args: mean_tokens: of the captions, SOT and EOT included."""
        self.mode = FakeTensorMode()
        with self.mode, mock.patch.object(nn.Module, "to", lambda module, *args, **options: module):
            self.side = contestant(name, size)  # `to` would swap parameters, which fake ones refuse
            self.image = torch.empty(batch_size, 3, *self.side.model.visual.image_size)
            for parameter in self.side.model.parameters():
                parameter.grad = torch.empty_like(parameter)
        text = self.side.prepare(random_text(batch_size, vocab_size(self.side.model), mean_tokens))
        self.text = each_tensor(text, self.mode.from_tensor)

    def run(self, watch: Watch) -> None:
        """Forward and backward with `watch.part` set; the encoder's backward comes last, as it depends on the rest."""
        def enter(part: str) -> Callable:
            return lambda *_: setattr(watch, "part", part)

        def named(function: Callable, part: str) -> Callable:
            def call(*args, **options):
                watch.part = part
                out = function(*args, **options)
                watch.part = "loss"
                if isinstance(out, Tensor):
                    out.register_hook(enter(f"{part}, backward"))
                return out
            return call

        model = self.side.model
        captioner = hasattr(model, "encode_image_tokens")
        patched = [(model, "encode_image_tokens", "encoder"), (model.text, "project_image", "image keys and values"),
                   (model.text, "forward", "decoder")] if captioner else \
            [(model, "encode_image", "encoder"), (model, "encode_text", "text")]
        for where, name, part in patched:
            setattr(where, name, named(getattr(where, name), part))
        try:
            with self.mode, watch:
                with cuda_rules():
                    loss = self.side.loss(self.image, self.text)
                watch.part = "loss, backward"
                loss.backward()
        finally:
            for where, name, _ in patched:
                delattr(where, name)
