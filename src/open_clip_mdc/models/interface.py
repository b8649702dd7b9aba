"""The network as decoding and likelihood know it, so that neither imports the model.

The algorithms (decoding/confidence.py, beam.py; likelihood/exact.py, monte_carlo.py) take a function from tokens to
logits and can be run on a table written by hand. The drivers (generate.py, log_likelihood.py) take a `Captioner`.

Dimensions: B or I images, R captions (rows), L positions, M asked tokens, n tokens so far, P patches, D width, H heads,
V vocabulary.
"""
from collections.abc import Callable

from torch import Tensor

ImageKV = list[tuple[Tensor, Tensor]]  # per layer: keys and values of the image, [I, H, P, D/H] each

# (text [R, L], asked, long [M] into R*L, step, long [R]) -> float32 logits [M, V] of the tokens at the asked places.
# The step, of diffusion in steps, is left out by an algorithm that knows none; the network then finds it or needs none.
TokenLogits = Callable[..., Tensor]

# The numbers of tokens of R captions, the longest of which is L -> their `TokenLogits`; as `Captioner.token_logits`
# with the keys and values of I images, of which each has R/I consecutive rows. The lengths are on the CPU, and so is
# the number M of asked tokens, so that no step of an algorithm waits for the device. A second argument, long [I], says
# of which images the rows are, where they are not of all.
Network = Callable[..., TokenLogits]

# (text [R, n], parent [R]) -> [R, V]; row r continues row parent[r] of the call before, so that a cache can follow.
StepLogits = Callable[[Tensor, Tensor], Tensor]
