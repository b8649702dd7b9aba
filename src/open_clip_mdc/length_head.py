"""How long an image's caption is, p(N | image), which the loss of masked diffusion never learns (Sec. 3.2).

A masked diffusion captioner models captions given their length, so that nothing it says about captions of different
length compares. A classifier of the length stands beside it, as in DDCap (Zhu et al. 2022): one linear layer on the
mean and the maximum of the patch tokens, detached, so that encoder and decoder are bit for bit what they would be
without it. (From the mean alone, which is probed, the number of things is harder to tell.)

Dimensions: B images, P patches, L positions, D image width, N tokens of a caption between SOT and EOT, S lengths (N = 0
to S - 1).
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .decoder import without_autocast

SCALE = 10.0  # of the features: at the common learning rate the weights would grow too slowly


class LengthHead(nn.Linear):
    """Logits of N. It begins with zeros, that is p(N) uniform, and draws no random numbers."""

    def __init__(self, width: int, context_length: int):
        super().__init__(2 * width, context_length - 1)
        self.register_load_state_dict_pre_hook(begin_anew)
        for parameter in self.parameters():
            parameter.unclipped = True  # --grad-clip-norm would shorten the others' steps on its account

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, image_embs: Tensor) -> Tensor:
        """Float32 [B, S] whatever autocast says, from patch tokens [B, P, D], to which no gradient passes."""
        image_embs = image_embs.detach().float()
        features = SCALE * torch.cat((image_embs.mean(1), image_embs.amax(1)), 1)
        with without_autocast(image_embs.device.type):
            return F.linear(features, self.weight.float(), self.bias.float())

    def log_prob(self, image_embs: Tensor) -> Tensor:
        """log p(N | image) of captions with at least one token, float32 [B, S], -inf for N = 0; as `forward`.

        Raises:
            ValueError: the head was never trained.
        """
        if not self.weight.any():
            raise ValueError("a length that the model chooses needs one that has learnt how long captions are; this "
                             "one's length head was never trained (older checkpoints have none): give a number")
        empty = torch.zeros(self.out_features, dtype=torch.bool, device=image_embs.device)
        empty[0] = True
        return self(image_embs).masked_fill(empty, -torch.inf).log_softmax(1)


def begin_anew(head: LengthHead, state_dict: dict, prefix: str, *_) -> None:
    """Lets a checkpoint load that has no head or one for another context length: the head stays as it is."""
    for name, own in head.state_dict().items():
        if prefix + name not in state_dict or state_dict[prefix + name].shape != own.shape:
            state_dict[prefix + name] = own


def length_nll(logits: Tensor, num_target: Tensor) -> Tensor:
    """-log p(N | image) of the captions' own lengths, float32 [B], from logits [B, S] and N + 1 [B], as EOT counts."""
    return F.cross_entropy(logits, num_target.long() - 1, reduction="none")
