"""The training objectives: forward process, time, loss weights and loss (Eqs. 1, 4, 5 and Algorithm 1).

An objective is a row of OBJECTIVES: how it corrupts a caption, what an asked token costs, in which order the model can
read, and which scores fit it. Whoever needs to know asks the row, and nobody asks for an objective's name.

    mdc    each token is masked with probability t, t in (t_min, t_max]; weight 1/t (Eq. 5) or 1 (Table 4)
    BERT   mdc with t_min = t_max: Eq. 1 but for its normaliser. Eq. 1 divides by the number of masked tokens of a
           caption or batch, which is random; here the divisor is the number of target tokens, and the weight 1/t makes
           up for it on average only
    parallel decoding      mdc with t_min = t_max = 1
    arc    nothing is masked, the decoder is causal, every token has weight 1 (the negative of Eq. 7)
    cappa  CapPa's mix: 75 % of the samples in parallel, 25 % autoregressive (Tschannen et al. 2023, Sec. 3)
    mcd    mask-and-replace diffusion in 100 steps, MC-Diffusion's (mask_replace.py); a row per schedule
    complementary  two views of each caption: what one hides, the other shows, as in LaViDa, so that every token is
           learnt once a step; two-views is its control, the same two rates with independent masks

The continuous-time bound and its weight are those of MDLM (Sahoo et al. 2024) and MD4 (Shi et al. 2024).

Valid tokens are SOT to EOT, target tokens those after SOT, asked tokens those whose logits are wanted now. SOT is
given; EOT is a token like any other; padding is nowhere.

Dimensions: B captions of one process, L positions, M asked tokens, V vocabulary.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mask_replace import Schedule, bound_terms, make_schedule, noise
from .packing import Asked, Corrupted
from .tokens import mask_id, target_tokens

CAPPA_AUTOREGRESSIVE_FRACTION = 0.25
GOLDEN_RATIO = (5 ** 0.5 - 1) / 2
STEPS = 100  # of mask-and-replace diffusion, VQ-Diffusion's


class Objective(NamedTuple):
    """A way to train; what follows from it for decoding and scoring."""

    # (text [B, L], V, cfg, u [B], generator) -> Corrupted of B rows, or of as many for each caption, one after another;
    # u is uniform on (0, 1] over a global batch
    corrupt: Callable
    bound: Callable  # the same but for cfg: its weighted loss is the NELBO on average, whatever interval is trained
    token_loss: Callable  # (logits [M, V], Asked, aux_weight where there is a schedule) -> float32 [M]
    order: str  # "any" | "causal": which decoders and estimators fit
    scorers: tuple[str, ...]  # methods of scoring.log_likelihood that fit, the first by default
    schedule: Callable | None = None  # (V, device) -> mask_replace.Schedule of the STEPS steps; None: t is continuous


def alpha(t: Tensor) -> Tensor:
    """Linear schedule: the probability that a token is still visible at time t (Sec. 3.2)."""
    return 1 - t


def loss_weight(t: Tensor, kind: str = "inverse_t") -> Tensor:
    """Weight of a masked token: -alpha'_t / (1 - alpha_t) = 1/t (Eqs. 4, 5), or 1 for "none" (Table 4)."""
    return 1 / (1 - alpha(t)) if kind == "inverse_t" else torch.ones_like(t)


def systematic(batch_size: int, u0: float, rank: int = 0, world_size: int = 1) -> Tensor:
    """Uniform numbers by systematic sampling over the global batch: one sample in each of its equal strata.

    Sample i of rank r takes stratum i * world_size + r, so that every rank alone covers the interval too.

    Args:
        u0: the one random number, uniform on [0, 1), equal on all ranks.

    Returns:
        float64 [B] in (0, 1], also after rounding.
    """
    stratum = torch.arange(batch_size, dtype=torch.float64) * world_size + rank
    return (stratum + (1 - u0)) / (batch_size * world_size)


def spread(first: int, batch_size: int) -> Tensor:
    """Fixed numbers that cover (0, 1] evenly, one for each index of a data set: float64 [B] from index `first`.

    The golden ratio's multiples modulo 1: any run of them is even, so they depend on neither batches nor their number.
    """
    index = torch.arange(first, first + batch_size, dtype=torch.float64)
    return 1 - (0.5 + index * GOLDEN_RATIO) % 1


def sample_t(u: Tensor, t_min: float, t_max: float) -> Tensor:
    """The time of each sample, float32 [B] in (t_min, t_max]: t = 0 would hide nothing, at an infinite weight."""
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


def mask_condition(shape: tuple[int, int], drop: float, rate: float, generator: torch.Generator | None = None,
                   device: torch.device | str = "cpu") -> Tensor:
    """Features that the decoder does not get to see (MC-Diffusion, Algorithm 1): bool [B, P] of shape (B, P).

    Each image is chosen with probability `drop`, and of a chosen image each feature with probability `rate`.
    """
    def draw(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    return (draw(shape[0], 1) < drop) & (draw(*shape) < rate)


def masked_diffusion(text: Tensor, vocab_size: int, cfg: "CaptionCfg", u: Tensor,
                     generator: torch.Generator | None = None) -> Corrupted:
    """Algorithm 1: a caption's tokens are masked with probability t and weighted by 1/t."""
    target = target_tokens(text, vocab_size)
    t = sample_t(u, cfg.t_min, cfg.t_max).to(text.device)
    noisy, masked = forward_process(text, target, t, vocab_size, generator)
    # Not masked * weight: the weight of t < 2^-25 is infinite in float32, where nothing is masked.
    weight = torch.where(masked, loss_weight(t, cfg.loss_weight)[:, None], 0)
    return Corrupted(noisy, masked, weight, target, False, t)


def two_views(complementary: bool) -> Callable:
    """Masks at the rates t and 1 - t, rows 2b and 2b + 1 of image b, each weighted as in Algorithm 1.

    Both views are unbiased for their own t, and the decoder costs twice as much a step: compare at half the batch.

    Args:
        complementary: whether the second view hides just what the first shows, or draws for itself.
    """
    def corrupt(text: Tensor, vocab_size: int, cfg: "CaptionCfg", u: Tensor,
                generator: torch.Generator | None = None) -> Corrupted:
        target = target_tokens(text, vocab_size)
        t = sample_t(u, cfg.t_min, cfg.t_max).to(text.device)
        first = forward_process(text, target, t, vocab_size, generator)[1]
        second = target & ~first if complementary else forward_process(text, target, 1 - t, vocab_size, generator)[1]
        t, masked = torch.stack((t, 1 - t), 1).flatten(), torch.stack((first, second), 1).flatten(0, 1)
        text, target = text.repeat_interleave(2, 0), target.repeat_interleave(2, 0)
        weight = torch.where(masked, loss_weight(t, cfg.loss_weight)[:, None], 0)
        return Corrupted(text.masked_fill(masked, mask_id(vocab_size)), masked, weight, target, False, t)

    return corrupt


def autoregressive(text: Tensor, vocab_size: int, cfg: "CaptionCfg", u: Tensor,
                   generator: torch.Generator | None = None) -> Corrupted:
    """The negative of Eq. 7: every token is predicted from those before it."""
    target = target_tokens(text, vocab_size)
    return Corrupted(text, target, target.float(), target, True, torch.zeros(len(text), device=text.device))


def captioning_with_parallel(text: Tensor, vocab_size: int, cfg: "CaptionCfg", u: Tensor,
                             generator: torch.Generator | None = None) -> Corrupted:
    """CapPa: u picks the captions that are read left to right; of the others every token is masked."""
    target = target_tokens(text, vocab_size)
    causal = u.to(text.device, torch.float32) <= CAPPA_AUTOREGRESSIVE_FRACTION
    noisy = text.masked_fill(target & ~causal[:, None], mask_id(vocab_size))
    return Corrupted(noisy, target, target.float(), target, causal, (~causal).float())


def whole_interval(text: Tensor, vocab_size: int, u: Tensor, generator: torch.Generator | None = None) -> Corrupted:
    """Eq. 5 with t in (0, 1] and weight 1/t: an unbiased draw of the NELBO."""
    return masked_diffusion(text, vocab_size, CaptionCfg(t_min=0.0, t_max=1.0), u, generator)


def exact(text: Tensor, vocab_size: int, u: Tensor, generator: torch.Generator | None = None) -> Corrupted:
    """A causal model has no noise: its NELBO is its NLL (Eq. 7)."""
    return autoregressive(text, vocab_size, CaptionCfg(), u)


def full_precision(logits: Tensor) -> Tensor:
    """At least float32, as a loss is taken."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, asked: Asked) -> Tensor:
    """-log p(token) of each asked token, float32 [M]."""
    return F.cross_entropy(full_precision(logits), asked.token, reduction="none")


def step_of(t: Tensor) -> Tensor:
    """The step of 1..STEPS that a time t = step / STEPS is, long."""
    return (STEPS * t).round().long()


def auxiliary_factor(step: Tensor) -> Tensor:
    """Of aux_weight at a step: 2 - (t - 1)/T, as VQ-Diffusion's release weighs its auxiliary loss."""
    return 2 - (step - 1) / STEPS


def mask_and_replace(preset: str) -> Objective:
    """Mask-and-replace diffusion by a schedule of mask_replace.py: T times the bound at every token that has one.

    Where nothing is ever replaced those are the masked tokens, and this is "mdc" with t on the grid 1/T, ..., 1. The
    loss lacks the KL of the prior (`mask_replace.prior_kl`), which is constant; validation and scoring add it.

    In training aux_weight * (2 - (t - 1)/T) * -log p(x_0 | x_t) may join the bound's term at every such token (D3PM,
    Eq. 5); T times both is the loss.
    """
    def schedule(vocab_size: int, device: torch.device) -> Schedule:
        return make_schedule(vocab_size, STEPS, preset, device)

    def corrupt(text: Tensor, vocab_size: int, cfg: "CaptionCfg", u: Tensor,
                generator: torch.Generator | None = None) -> Corrupted:
        process = schedule(vocab_size, text.device)
        target = target_tokens(text, vocab_size)
        t = cfg.t_min + (cfg.t_max - cfg.t_min) * u.double()
        step = (STEPS * t - 1e-9).ceil().long().clamp(min=1).to(text.device)
        x_t = noise(text, target, step, process, generator)
        asked = target & (x_t == mask_id(vocab_size)) if process.absorbing else target
        return Corrupted(x_t, asked, STEPS * asked.float(), target, False, step / STEPS)

    def bound(text: Tensor, vocab_size: int, u: Tensor, generator: torch.Generator | None = None) -> Corrupted:
        return corrupt(text, vocab_size, CaptionCfg(t_min=0.0, t_max=1.0), u, generator)

    def token_loss(logits: Tensor, asked: Asked, aux_weight: float = 0.0) -> Tensor:
        log_p, step = full_precision(logits).log_softmax(1), step_of(asked.t)
        loss = bound_terms(log_p, asked.token, asked.read, step, schedule(logits.shape[1], logits.device))
        if not aux_weight:
            return loss
        return loss - aux_weight * auxiliary_factor(step) * log_p.gather(1, asked.token[:, None]).squeeze(1)

    return Objective(corrupt, bound, token_loss, "any", ("bound", "heuristic", "monte_carlo"), schedule)


OBJECTIVES = {
    "mdc": Objective(masked_diffusion, whole_interval, cross_entropy, "any", ("heuristic", "monte_carlo")),
    "complementary": Objective(two_views(True), whole_interval, cross_entropy, "any", ("heuristic", "monte_carlo")),
    "two-views": Objective(two_views(False), whole_interval, cross_entropy, "any", ("heuristic", "monte_carlo")),
    "arc": Objective(autoregressive, exact, cross_entropy, "causal", ("autoregressive",)),
    "cappa": Objective(captioning_with_parallel, exact, cross_entropy, "causal", ("autoregressive",)),
    "mcd": mask_and_replace("code"),
    "mcd-absorbing": mask_and_replace("absorbing"),
    "mcd-replace": mask_and_replace("replace"),
}


@dataclass
class CaptionCfg:
    """What makes a model config a captioner: its objective. BERT is t_min == t_max; parallel decoding is 1.0, 1.0.

    Raises:
        ValueError: a value is out of range, or does not go with the objective.
    """

    objective: str = "mdc"  # a key of OBJECTIVES
    t_min: float = 0.5
    t_max: float = 1.0
    loss_weight: str = "inverse_t"  # "inverse_t" | "none"
    regions: int = 1  # g: the image is also seen in g x g tiles (regions.py)
    length_head: bool = True  # learn p(N | image), too; a causal model has none, as it ends its captions itself
    time_embedding: bool = False  # tell the decoder the step; for diffusion in steps
    aux_weight: float = 0.0  # of the auxiliary loss -log p(x_0 | x_t) in training; for diffusion in steps
    condition_drop: float = 0.0  # share of the training images of which features are masked (MC-Diffusion's P_cond)
    condition_mask: float = 0.0  # share of their features that are (P_mask); 1 is classifier-free guidance's training
    condition_zeros: bool = False  # zeros stand for a masked feature; else a vector that is learnt

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise ValueError(f"caption_cfg.objective is {self.objective!r}; it must be one of {', '.join(OBJECTIVES)}")
        if self.loss_weight not in ("inverse_t", "none"):
            raise ValueError(f"caption_cfg.loss_weight is {self.loss_weight!r}; it must be 'inverse_t' or 'none'")
        if not (0 <= self.t_min <= self.t_max <= 1 and self.t_max > 0):
            raise ValueError(f"caption_cfg needs 0 <= t_min <= t_max <= 1, t_max > 0; not {self.t_min}, {self.t_max}")
        if self.aux_weight < 0:
            raise ValueError(f"caption_cfg.aux_weight is {self.aux_weight}; it must be 0 or more")
        if (self.time_embedding or self.aux_weight) and OBJECTIVES[self.objective].schedule is None:
            raise ValueError("caption_cfg.time_embedding and aux_weight are for diffusion in steps, not for "
                             f"{self.objective!r}")
        rates = (self.condition_drop, self.condition_mask)
        if not all(0 <= rate <= 1 for rate in rates) or any(rates) != all(rates) \
                or self.condition_zeros and not any(rates):
            raise ValueError("caption_cfg needs condition_drop and condition_mask of 0 to 1, both or neither of them "
                             f"0, and condition_zeros only with them; not {rates}, {self.condition_zeros}")

    @property
    def weak(self) -> str:
        """What guidance leans away from by default (`generate.unmask_images`): what the model was trained for."""
        return "masked" if self.condition_drop else "blind"


class CaptionLoss(nn.Module):
    """sum(token_weight * token_loss) / sum(num_target): stands where OpenCLIP has its contrastive loss.

    Divided by target, not by asked tokens: the gradient of a token then does not depend on how many others were
    masked, and micro-batches of an accumulated step add up to the step (the paper leaves the normaliser open).
    """

    def forward(
            self,
            token_nll: Tensor,
            token_weight: Tensor,
            num_target: Tensor,
            logit_scale: Tensor | None = None,
            length_nll: Tensor | None = None,
            output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or with `output_dict` its terms, which upstream adds up and logs.

        Args: [M], [M], [B] and [B] as `Captioner.forward` returns them; logit_scale is only there for upstream's log.
        """
        losses = {"caption_loss": (token_weight * token_nll).sum() / num_target.sum()}
        if length_nll is not None:
            losses["length_loss"] = length_nll.mean()
        return losses if output_dict else sum(losses.values())
