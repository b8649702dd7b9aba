"""The length head: p(N | image), the caption's length, which masked diffusion does not model (Sec. 3.2).

A masked diffusion captioner models captions given their length, so its scores of captions of different lengths are not
comparable. This classifier of the length, as in DDCap (Zhu et al. 2022), makes them so. It is one linear layer on the
mean and the maximum of the patch tokens (from the mean alone it is harder to count objects). The tokens are detached,
so encoder and decoder train bit for bit as they would without it.

A step of Adam moves every weight by about the learning rate, and a logit by that times the sum of all features. So
training divides the features by about their number. Checkpoints hold weights for SCALE times the features at any width.
So `state_dict()` has a copy of these weights: an average that is written into it in place is lost.

Dimensions: B images, P patches, D image width, N tokens of a caption between SOT and EOT, S lengths (N = 0 to S - 1).
"""
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import without_autocast

SCALE = 10.0  # factor of the features that a checkpoint's weights are for
WIDTH = 24  # largest D without a divisor in training. 48 learns faster, but is unstable where features are far from 0


class LengthHead(nn.Linear):
    """Logits of N. Its weights start at zero, so that p(N) is uniform and no random numbers are drawn."""

    def __init__(self, width: int, context_length: int):
        super().__init__(2 * width, context_length - 1)
        for parameter in self.parameters():
            parameter.unclipped = True  # its gradients must not count in --grad-clip-norm

    @property
    def narrowing(self) -> float:
        """Return the divisor of features in training, a power of two, so that saving and loading is exact."""
        return 2.0 ** max(0, math.ceil(math.log2(self.in_features / 2 / WIDTH)))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, image_embs: Tensor) -> Tensor:
        """Return float32 logits [B, S] from patch tokens [B, P, D], without autocast and without a gradient to them."""
        # Detached, so that encoder and decoder train as they would without this head.
        image_embs = image_embs.detach().float()
        # Mean and maximum of the patches: [B, P, D] -> [B, 2D].
        features = SCALE / self.narrowing * torch.cat((image_embs.mean(1), image_embs.amax(1)), 1)
        with without_autocast(image_embs.device.type):
            return F.linear(features, self.weight.float(), self.bias.float())

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # A checkpoint's weights are for the features before they were divided.
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] / self.narrowing

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        fill_missing_from_init(self, state_dict, prefix)
        weight = state_dict[f"{prefix}weight"] * self.narrowing
        super()._load_from_state_dict({**state_dict, f"{prefix}weight": weight}, prefix, *args)

    def log_prob(self, image_embs: Tensor) -> Tensor:
        """Return log p(N | image, N > 0), float32 [B, S], -inf for N = 0.

        Raises ValueError if the head was never trained.
        """
        if not self.weight.any():
            raise ValueError("this model cannot choose a length, as its length head was never trained (older "
                             "checkpoints have none): give a number of tokens")
        logits = self(image_embs)
        logits[:, 0] = -torch.inf  # a caption has at least one token
        return logits.log_softmax(1)


def fill_missing_from_init(head: LengthHead, state_dict: dict, prefix: str, *_) -> None:
    """Keep the initial weights where a checkpoint has none, or has them for another context length."""
    for name, own in head.state_dict().items():
        if prefix + name not in state_dict or state_dict[prefix + name].shape != own.shape:
            state_dict[prefix + name] = own


def length_nll(logits: Tensor, num_target: Tensor) -> Tensor:
    """Return -log p(N | image), float32 [B], from logits [B, S] and `num_target` [B], which is N + 1 with EOT."""
    return F.cross_entropy(logits, num_target.long() - 1, reduction="none")
