"""Controls the decoder's precision: autocast in training, and outside training float32 logits and pre-cast blocks."""
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps

import torch
from torch import nn


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return autocast's dtype on this kind of device, or None if autocast is off."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def emulated(device: str, dtype: torch.dtype | None) -> bool:
    """Return True if this machine multiplies matrices of a 16-bit type without instructions for it.

    oneDNN then computes about 50 times slower than in float32 (512 x 512, EPYC with AVX2: 35 times).
    """
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    if torch.device(device).type != "cpu" or kind is None or not torch.backends.mkldnn.is_available():
        return False
    return not getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")()


def without_autocast(device: str) -> AbstractContextManager:
    """Return a context that turns autocast off. It does nothing on a device without autocast (meta)."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def in_training_step(module: nn.Module) -> bool:
    # Not told by gradients, as OpenCLIP runs the first pass of --accum-freq without them. Scoring and decoding use eval
    # mode or inference mode. Only training compiles a captioner, and asking for inference mode would break its graph.
    return module.training and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Return a context in which the model is in eval mode. Each of its modules gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    if any(mode for _, mode in modes):
        model.eval()
    try:
        yield
    finally:
        if modes[0][1]:
            model.train()  # for what modules do at that moment
        for module, mode in modes:
            module.training = mode


@contextmanager
def in_float32(device: str) -> Iterator[None]:
    """Return a context without autocast, for logits outside a training step.

    In bfloat16, 8 bits of a logit would decide which token is revealed next. Under autocast, TF32 (11 bits) is allowed.
    """
    # Autocast is off, but a run that asked for it may still round products to TF32.
    matmul, wanted = torch.backends.cuda.matmul, autocast_dtype(device) is not None
    tf32, matmul.allow_tf32 = matmul.allow_tf32, matmul.allow_tf32 or wanted
    try:
        with without_autocast(device):
            yield
    finally:
        matmul.allow_tf32 = tf32


def in_chosen_precision(method: Callable) -> Callable:
    """Decorate a decoder's method to run in autocast's precision with blocks that are cast once, not at each step.

    Autocast itself casts weights and activations at every product, which launches more kernels than the products do. In
    a training step nothing changes. With gradients on, the original blocks run, as gradients of copies would be lost.
    """
    @wraps(method)
    def outside_autocast(self: nn.Module, *args, **kwargs):
        if in_training_step(self):
            return method(self, *args, **kwargs)
        device = next(self.parameters()).device.type
        # A gradient to a copy would be lost.
        body = self if torch.is_grad_enabled() else with_cast_blocks(self, autocast_dtype(device))
        with without_autocast(device):
            return method(body, *args, **kwargs)

    return outside_autocast


def with_cast_blocks(decoder: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return the decoder with a lower-precision copy of its blocks, made again after a change in place or `train()`.

    A change through `.data` or by a fused optimizer is not seen. After one in eval mode, delete the attribute `cast`.
    """
    parameters = list(decoder.blocks.parameters())
    if dtype is None or parameters[0].dtype != torch.float32:
        return decoder
    state = dtype, [(p.data_ptr(), p._version) for p in parameters]
    if decoder.__dict__.get("cast", (None,))[0] != state:
        with torch.inference_mode(False), torch.no_grad():
            body = copy.copy(decoder)
            body._modules = {**decoder._modules, "blocks": copy.deepcopy(decoder.blocks).to(dtype)}
            body.__dict__.pop("cast", None)
        decoder.cast = state, body  # a tuple keeps the copy out of the decoder's modules and state_dict
    return decoder.cast[1]
