"""The training objective: forward process, time, loss weights and loss (Eqs. 1, 4, 5 and Algorithm 1).

Every objective of the paper is one call of `corrupt`, which says what the decoder reads, which tokens are scored and
with what weight:

    mdc    each token is masked with probability t, t in (t_min, t_max]; weight 1/t (Eq. 5) or 1 (Table 4)
    BERT   mdc with t_min = t_max (Eq. 1, which divides by the masked count; here by the valid count, a constant factor)
    parallel decoding      mdc with t_min = t_max = 1
    arc    nothing is masked, the decoder is causal, every token has weight 1 (the negative of Eq. 7)
    cappa  CapPa's mix: 75 % of the samples in parallel, 25 % autoregressive (Tschannen et al. 2023, Sec. 3)

Dimensions: B captions of one process, L positions. SOT is given; EOT is a token like any other; padding is nowhere.
"""
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .tokens import mask_id, target_tokens

CAPPA_AUTOREGRESSIVE_FRACTION = 0.25


class Corrupted(NamedTuple):
    """What the decoder reads and what it is asked."""

    text: Tensor  # long [B, L], mask_id where a token is hidden
    token_weight: Tensor  # float [B, L], 0 where a token is not scored
    token_target: Tensor  # bool [B, L], the tokens that a caption's loss is about: after SOT, up to EOT
    causal: bool | Tensor  # whether a caption is read left to right; bool [B] where captions of a batch differ


def alpha(t: Tensor) -> Tensor:
    """Linear schedule: the probability that a token is still visible at time t (Sec. 3.2)."""
    return 1 - t


def loss_weight(t: Tensor, kind: str = "inverse_t") -> Tensor:
    """Weight of a masked token: -alpha'_t / (1 - alpha_t) = 1/t (Eqs. 4, 5), or 1 for "none" (Table 4)."""
    return 1 / (1 - alpha(t)) if kind == "inverse_t" else torch.ones_like(t)


def sample_t(batch_size: int, t_min: float, t_max: float, u0: float, rank: int = 0, world_size: int = 1) -> Tensor:
    """One t per sample by systematic sampling over the global batch: one sample in each of its equal strata.

    Sample i of rank r takes stratum i * world_size + r, so that every rank alone covers the interval too. The interval
    is open at t_min: t = 0 has no masked token and an infinite weight.

    Args:
        u0: the one random number, uniform on [0, 1), equal on all ranks.

    Returns:
        float32 [B] in (t_min, t_max].
    """
    stratum = torch.arange(batch_size, dtype=torch.float64) * world_size + rank
    u = (stratum + (1 - u0)) / (batch_size * world_size)  # in (0, 1], also after rounding
    return (t_min + (t_max - t_min) * u).float()


def forward_process(
        text: Tensor,
        maskable: Tensor,
        t: Tensor,
        vocab_size: int,
        generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """q(x_t | x_0): hides each maskable token with probability 1 - alpha_t (Eq. 2 from r = 0; Algorithm 1).

    Args:
        text: long [B, L].
        maskable: bool [B, L].
        t: float [B], one per sample.
        generator: of the text's device; the global one if None.

    Returns:
        the text with mask_id where hidden, long [B, L], and where that is, bool [B, L].
    """
    u = torch.rand(text.shape, device=text.device, generator=generator)
    masked = maskable & (u < (1 - alpha(t))[:, None])
    return text.masked_fill(masked, mask_id(vocab_size)), masked


def corrupt(
        text: Tensor,
        vocab_size: int,
        t: Tensor,
        objective: str = "mdc",
        weight_kind: str = "inverse_t",
        generator: torch.Generator | None = None,
) -> Corrupted:
    """One training (or validation) example per caption, for the objective named.

    Args:
        text: long [B, L] from SOT to EOT, then padding.
        t: float [B] in (0, 1]. "arc" ignores it; "cappa" reads it as the uniform number that picks the sample's half.
        objective: "mdc" | "arc" | "cappa".
        weight_kind: see `loss_weight`.
    """
    valid = target_tokens(text, vocab_size)
    if objective == "arc":
        return Corrupted(text, valid.float(), valid, causal=True)
    causal: bool | Tensor = False
    if objective == "cappa":
        causal = t <= CAPPA_AUTOREGRESSIVE_FRACTION
        t = torch.ones_like(t)
    maskable = valid if causal is False else valid & ~causal[:, None]
    noisy, masked = forward_process(text, maskable, t, vocab_size, generator)
    token_weight = masked * loss_weight(t, weight_kind)[:, None]
    if causal is not False:
        token_weight = torch.where(causal[:, None], valid.float(), token_weight)
    return Corrupted(noisy, token_weight, valid, causal)


class CaptionLoss(nn.Module):
    """sum(token_weight * token_nll) / sum(token_target): stands where OpenCLIP has its contrastive loss.

    Divided by valid, not by masked tokens: the gradient of a token then does not depend on how many others were
    masked, and micro-batches of an accumulated step add up to the step (the paper leaves the normaliser open).
    """

    def forward(
            self,
            token_nll: Tensor,
            token_weight: Tensor,
            token_target: Tensor,
            logit_scale: Tensor | None = None,
            length_nll: Tensor | None = None,
            output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or with `output_dict` its terms, which upstream adds up and logs.

        Args: token_* [B, L] and length_nll [B] as `Captioner.forward` returns them; logit_scale is only there for
            upstream's log.
        """
        losses = {"caption_loss": (token_weight * token_nll).sum() / token_target.sum()}
        if length_nll is not None:
            losses["length_loss"] = length_nll.mean()
        return losses if output_dict else sum(losses.values())
