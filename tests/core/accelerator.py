"""Imitate an asynchronous device on a CPU, to count when the host has to wait for it.

The device is named cpu:0. Tensors that are made there, moved there or computed from tensors there are marked. A marked
tensor may be combined with one of the CPU only where PyTorch allows it for a GPU: if that one is a single number.
"""
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu", 0)
READS = {getattr(Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "__bool__",
                                            "__int__", "__float__", "__index__", "is_nonzero", "equal")} | {
    torch.nonzero, torch.masked_select, torch.equal, torch.is_nonzero}
NEW = {torch.tensor, torch.as_tensor}


def tensors(x):
    """All tensors in arguments, those of a slice too."""
    for leaf in tree_leaves(x):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, slice):
            yield from tensors((leaf.start, leaf.stop, leaf.step))


def is_there(x: Tensor) -> bool:
    return getattr(x, "is_there", False)


def mark(*found: Tensor) -> None:
    for x in found:
        x.is_there = True


class Accelerator(TorchFunctionMode):
    """Count in `waits` how often the host waits for the device, by the reason. Modules can be moved to it."""

    def __init__(self, *modules: torch.nn.Module):
        super().__init__()
        self.waits = []
        for module in modules:
            mark(*module.parameters(), *module.buffers())

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = list(tensors((args, kwargs)))
            there = [x for x in given if is_there(x)]
            name = getattr(function, "__name__", "")
            if name == "__get__" and function.__self__ is Tensor.device:
                return DEVICE if there else function(*args, **kwargs)
            places = [x for x in (*args, kwargs.get("device")) if isinstance(x, (torch.device, str))]
            if name == "__set__" or not there and DEVICE not in places:
                return function(*args, **kwargs)
            result = function(*args, **kwargs)
            if name == "__iter__":  # rows one after another
                mark(*(result := list(result)))
                return iter(result)
            to = torch.device("cpu") if function is Tensor.cpu else None
            if function is Tensor.to and places:
                to = torch.device(places[0])
            moves = to is not None and bool(there) != (to == DEVICE)
            if function in (Tensor.__getitem__, Tensor.__setitem__):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                reads = any(is_there(x) and (x.dtype == torch.bool or isinstance(part, slice))
                            for part in index for x in tensors(part))
                moves = any(not is_there(x) and x.ndim for part in index for x in tensors(part)) or any(
                    isinstance(part, list) for part in index)
            else:
                reads = function in READS
                if there and function is not Tensor.to:
                    strangers = [x for x in given if not is_there(x) and x.ndim]
                    assert not strangers, f"{name} of tensors on two devices: {[x.shape for x in strangers]}"
            if reads or (moves or function in NEW) and not kwargs.get("non_blocking"):
                self.waits.append(name)
            result_is_here = reads or to is not None and to != DEVICE
            if result_is_here and isinstance(result, Tensor):
                result = result.clone()
                result.is_there = False
            elif not result_is_here:
                mark(*tensors(result))
            return result
