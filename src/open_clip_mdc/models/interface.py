"""Types of the functions by which decoding and likelihood call the network.

The algorithms (in decoding/confidence.py and beam.py, likelihood/exact.py and monte_carlo.py) take or hold a function
from tokens to logits, so tests can run them on a table written by hand. generate.py and log_likelihood.py make that
function from a `Captioner`.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, M predicted tokens, n tokens so far,
P patches, W decoder width, H heads, V vocabulary.
"""
from collections.abc import Callable

from torch import Tensor

ImageKV = list[tuple[Tensor, Tensor]]  # per layer: keys and values of the images, [B, H, P, W/H] each

# (text [R, L], predicted, long [M] into R*L, step, long [R]) -> float32 logits [M, V] of the tokens at `predicted`.
# Only diffusion in steps gives the step. Without it, a network that reads the step infers it from the text.
TokenLogits = Callable[..., Tensor]

# (number of tokens of each of R captions, the longest of which is L) -> their `TokenLogits`, such as
# `Captioner.token_logits` with the keys and values of B images. The lengths and the number M of predicted tokens are
# known on the CPU, so that no step of an algorithm waits for the device. `prefixes.py` adds `position` and `sight`.
Network = Callable[..., TokenLogits]

# (text [R, n], parent [R]) -> logits [R, V]. Row r continues row parent[r] of the last call, for key/value caches.
StepLogits = Callable[[Tensor, Tensor], Tensor]
