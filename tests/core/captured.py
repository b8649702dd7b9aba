"""CUDA graphs on a CPU, as far as one can show them: operators and the very tensors that they had.

A capture computes nothing, and refuses what CUDA refuses. A replay runs the operators on the same tensors again, and no
line of Python.
"""
from contextlib import nullcontext

import torch
from accelerator import tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Waits, or copies from the CPU.
REFUSED = ("nonzero", "_local_scalar_dense", "masked_select", "is_nonzero", "equal", "lift_fresh")


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Graph:
    made = []

    def __init__(self):
        self.calls, self.reads, self.replays = [], {}, 0
        Graph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            for function, args, kwargs, written in self.calls:
                for old, new in zip(written, tensors(function(*args, **kwargs)), strict=bool(written)):
                    old.copy_(new)


class Capture(TorchDispatchMode):
    def __init__(self, graph: Graph, pool, stream, capture_error_mode: str):
        super().__init__()
        assert pool == stream == "there"
        self.graph, self.own = graph, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.overloadpacket.__name__ in REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        given = {memory(x): x for x in tensors((args, kwargs))}
        self.graph.reads |= {place: x for place, x in given.items() if place not in self.own}
        out = function(*args, **kwargs)
        written = [x for x in tensors(out) if memory(x) not in given]
        if written or function._schema.is_mutable:
            self.graph.calls.append((function, args, kwargs, written))
        for x in written:
            self.own.add(memory(x))
            x.fill_(float("nan") if x.is_floating_point() else 0)
        return out


def emulate(monkeypatch) -> list[Graph]:
    """Put graphs that run on a CPU in the place of CUDA's. Returns the list of those that are made."""
    Graph.made = []
    for name, replacement in {"CUDAGraph": Graph, "graph": Capture, "Stream": lambda: "there",
                              "graph_pool_handle": lambda: "there", "device": lambda device: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return Graph.made
