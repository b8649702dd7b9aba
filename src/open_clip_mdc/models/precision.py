"""The precision that the decoder computes in, in training and outside it."""
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps

import torch
from torch import nn


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return what autocast computes in on this kind of device. None where it is off."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def without_autocast(device: str) -> AbstractContextManager:
    """Return a context without autocast. A device that knows none (meta) needs nothing."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def in_training_step(module: nn.Module) -> bool:
    # With gradients, or in the first pass of --accum-freq, which OpenCLIP runs without. All that scores or decodes puts
    # the model in eval mode, or runs in inference mode. Compiled code is a captioner's whole forward, whose graph the
    # question for inference mode would break.
    return module.training and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())


def in_float32(method: Callable) -> Callable:
    """Take a module's method out of autocast, but in a training step.

    Of logits, 8 bits would decide which token is revealed next. Where autocast is on, TF32's 11 bits may do.
    """
    @wraps(method)
    def outside_autocast(self: nn.Module, *args, **kwargs):
        if in_training_step(self):
            return method(self, *args, **kwargs)
        device, matmul = next(self.parameters()).device.type, torch.backends.cuda.matmul
        tf32, matmul.allow_tf32 = matmul.allow_tf32, matmul.allow_tf32 or autocast_dtype(device) is not None
        try:
            with without_autocast(device):
                return method(self, *args, **kwargs)
        finally:
            matmul.allow_tf32 = tf32

    return outside_autocast


def in_chosen_precision(method: Callable) -> Callable:
    """Run a decoder's method in the precision of autocast by blocks that are cast once, not anew at each step.

    Autocast itself would cast weights and activations at each product, more kernels than the products. In a training
    step nothing changes, nor where gradients are asked for, which the copies would keep for themselves.
    """
    @wraps(method)
    def outside_autocast(self: nn.Module, *args, **kwargs):
        if in_training_step(self):
            return method(self, *args, **kwargs)
        device = next(self.parameters()).device.type
        body = self if torch.is_grad_enabled() else with_cast_blocks(self, autocast_dtype(device))
        with without_autocast(device):
            return method(body, *args, **kwargs)

    return outside_autocast


def with_cast_blocks(decoder: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return the decoder with a copy of its blocks in a lower precision, made when their weights have changed."""
    parameters = list(decoder.blocks.parameters())
    if dtype is None or parameters[0].dtype != torch.float32:
        return decoder
    state = dtype, [(p.data_ptr(), p._version) for p in parameters]
    if decoder.__dict__.get("cast", (None,))[0] != state:
        with torch.inference_mode(False), torch.no_grad():
            body = copy.copy(decoder)
            body._modules = {**decoder._modules, "blocks": copy.deepcopy(decoder.blocks).to(dtype)}
            body.__dict__.pop("cast", None)
        decoder.cast = state, body  # in a tuple: no module of the decoder's, nor in its state_dict
    return decoder.cast[1]
