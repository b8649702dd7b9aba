"""The precision that the decoder computes in, in training and outside it."""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps

import torch
from torch import nn


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return what autocast computes in on this kind of device; None where it is off."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def without_autocast(device: str) -> AbstractContextManager:
    """Return a context without autocast; a device that knows none (meta) needs nothing."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def in_training_step(module: nn.Module) -> bool:
    # With gradients, or in the first pass of --accum-freq, which OpenCLIP runs without. All that scores or decodes puts
    # the model in eval mode, or runs in inference mode. Compiled code is a captioner's whole forward, whose graph the
    # question for inference mode would break.
    return module.training and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())


def in_float32(method: Callable) -> Callable:
    """Take a decoder's method out of autocast, but in a training step.

    Confidences are compared with one another, and log-probabilities added up over a caption, where 8 bits decide which
    token is revealed next. The encoder, most of the work, follows autocast. On CUDA
    `torch.set_float32_matmul_precision("high")` buys back most of the speed, at 11 bits.
    """
    @wraps(method)
    def outside_autocast(self: nn.Module, *args, **kwargs):
        if in_training_step(self):
            return method(self, *args, **kwargs)
        with without_autocast(next(self.parameters()).device.type):
            return method(self, *args, **kwargs)

    return outside_autocast
