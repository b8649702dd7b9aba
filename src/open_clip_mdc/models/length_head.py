"""The length of an image's caption, p(N | image), which the loss of masked diffusion never learns (Sec. 3.2).

A masked diffusion captioner models captions given their length, so that nothing it says about captions of different
length compares. A classifier of the length stands beside it, as in DDCap (Zhu et al. 2022): one linear layer on the
mean and the maximum of the patch tokens, detached, so that encoder and decoder are bit for bit what they would be
without it. (From the mean alone, which is probed, the number of things is harder to tell.)

Adam moves every weight by the learning rate at each step, so that a logit moves by the sum of all features times it. In
training the features are therefore divided by about their number. Checkpoints hold the weights of SCALE times the
features, whatever the width.

Dimensions: B images, P patches, L positions, D image width, N tokens of a caption between SOT and EOT, S lengths (N = 0
to S - 1).
"""
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import without_autocast

SCALE = 10.0  # of the features, for which a checkpoint's weights are
WIDTH = 24  # D at which training sees them so, too: twice it learns faster, but jumps where features are far from 0


class LengthHead(nn.Linear):
    """Logits of N. Begins with zeros, that is p(N) uniform, and draws no random numbers."""

    def __init__(self, width: int, context_length: int):
        super().__init__(2 * width, context_length - 1)
        for parameter in self.parameters():
            parameter.unclipped = True  # --grad-clip-norm would shorten the others' steps on its account

    @property
    def narrowing(self) -> float:
        """The divisor of features in training. A power of two, so that checkpoints give back the very weights."""
        return 2.0 ** max(0, math.ceil(math.log2(self.in_features / 2 / WIDTH)))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, image_embs: Tensor) -> Tensor:
        """Return float32 [B, S] whatever autocast says, from patch tokens [B, P, D], to which no gradient passes."""
        image_embs = image_embs.detach().float()
        features = SCALE / self.narrowing * torch.cat((image_embs.mean(1), image_embs.amax(1)), 1)
        with without_autocast(image_embs.device.type):
            return F.linear(features, self.weight.float(), self.bias.float())

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] / self.narrowing

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        fill_missing_from_init(self, state_dict, prefix)
        weight = state_dict[f"{prefix}weight"] * self.narrowing
        super()._load_from_state_dict({**state_dict, f"{prefix}weight": weight}, prefix, *args)

    def log_prob(self, image_embs: Tensor) -> Tensor:
        """Return log p(N | image) of captions with at least one token, float32 [B, S], -inf for N = 0.

        Raises ValueError if the head was never trained.
        """
        if not self.weight.any():
            raise ValueError("a length that the model chooses needs one that has learnt how long captions are; this "
                             "one's length head was never trained (older checkpoints have none): give a number")
        empty = torch.zeros(self.out_features, dtype=torch.bool, device=image_embs.device)
        empty[0] = True
        return self(image_embs).masked_fill(empty, -torch.inf).log_softmax(1)


def fill_missing_from_init(head: LengthHead, state_dict: dict, prefix: str, *_) -> None:
    """Keep the head as it is where a checkpoint has none, or one for another context length."""
    for name, own in head.state_dict().items():
        if prefix + name not in state_dict or state_dict[prefix + name].shape != own.shape:
            state_dict[prefix + name] = own


def length_nll(logits: Tensor, num_target: Tensor) -> Tensor:
    """Return -log p(N | image), float32 [B], from logits [B, S] and N + 1 [B], as EOT counts."""
    return F.cross_entropy(logits, num_target.long() - 1, reduction="none")
