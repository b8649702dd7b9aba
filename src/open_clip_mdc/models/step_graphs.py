"""The decoder in a step of denoising as a CUDA graph, which is one launch instead of 184.

Up to about 300 images at a time, the kernels of a step take longer to launch than to run. A graph runs the same kernels
on the same memory again. So its inputs are copied into buffers, but only if they have changed since the last call: the
keys and values of the images once a batch (4.8 MB an image of B/16), the text at each step. Logits and the choice of
tokens are not in the graph, because fewer tokens are masked at each step. Logits of all positions at each step would
cost 19 % more multiplications and save 24 more launches.

torch.compile(mode="reduce-overhead") would copy keys and values at each step, and compile each size for a minute.
"""
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from ..text.packing import Packed
from .decoder import TextDecoder
from .interface import ImageKV
from .precision import autocast_dtype, with_cast_blocks
from .towers import patch_tokens

MAX_GRAPHS = 64  # inputs of further sizes run without a graph


class StepGraphs:
    """`TextDecoder.forward` without gradients, with a graph for each size of its inputs.

    The first call with a size runs without a graph, which sets up CUDA's libraries. The second is captured.
    """

    def __init__(self):
        self.graphs, self.buffers, self.weights = {}, {}, None

    def __reduce__(self) -> tuple:
        return StepGraphs, ()  # a copy of the model has weights of its own

    def of(self, decoder: TextDecoder) -> Callable:
        """Return the decoder's forward. Call this again after its weights have changed."""
        self.device = decoder.output.weight.device
        body = with_cast_blocks(decoder, autocast_dtype(self.device.type))
        weights = body, [x.data_ptr() for x in body.parameters()]
        if weights != self.weights:  # a graph reads the memory that they were in
            self.graphs, self.weights = {}, weights
            with torch.cuda.device(self.device):
                self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        return partial(self.forward, decoder)

    def forward(self, decoder: TextDecoder, packed: Packed, image_kv: ImageKV, time: Tensor | None = None) -> Tensor:
        """Return hidden states [N, W]. The next call overwrites them."""
        # All that the graph reads, flat: packed fields, the step, then key and value of each layer.
        inputs = (*packed, time, *chain(*image_kv))
        size = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in inputs)
        if size not in self.graphs:
            # The first call sets up CUDA's libraries, which a capture must not do.
            if len(self.graphs) < MAX_GRAPHS:
                self.graphs[size] = None
            return decoder(packed, image_kv, time)
        inputs = [self.held(i, x) if isinstance(x, Tensor) else x for i, x in enumerate(inputs)]
        if self.graphs[size] is None:
            self.graphs[size] = self.capture(decoder, inputs)
        graph, hidden = self.graphs[size]
        graph.replay()
        return hidden

    def held(self, number: int, x: Tensor) -> Tensor:
        """Copy an input into its buffer and return that. Graphs share it if their input `number` has the same shape."""
        name = number, x.shape, x.dtype
        if name not in self.buffers:
            with torch.inference_mode(False):  # else it could only be written in inference mode
                self.buffers[name] = torch.empty_like(x), None
        buffer, source = self.buffers[name]
        # Keys and values of the images come in again at each step. They are copied once a batch.
        if source is None or source() is not x:
            self.buffers[name] = buffer.copy_(x), weakref.ref(x)
        return buffer

    def capture(self, decoder: TextDecoder, inputs: list) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return a graph and the hidden states that it writes."""
        graph, (*packed, time) = torch.cuda.CUDAGraph(), inputs[:len(Packed._fields) + 1]
        keys, values = (inputs[len(packed) + 1 + i::2] for i in (0, 1))
        # Graphs run one after another, so they share temporary memory. A loader's thread may pin memory meanwhile.
        with torch.cuda.device(self.device), torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            hidden = decoder(Packed(*packed), list(zip(keys, values, strict=True)), time)
        return graph, hidden


def compile_for_captions(model: nn.Module) -> None:
    """Compile a `Captioner`'s image encoder, and let `generate` run its decoder as CUDA graphs. It must be on CUDA."""
    model.patch_tokens, model.step_graphs = torch.compile(patch_tokens, dynamic=True), StepGraphs()
