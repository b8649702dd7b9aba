"""Everything that is mathematics of the forward process and the loss: an objective a function, a file a family.

    mdc    each token is masked with probability t, t in (t_min, t_max]; weight 1/t (Eq. 5) or 1 (Table 4)
    BERT   mdc with t_min = t_max: Eq. 1 but for its normaliser. Eq. 1 divides by the number of masked tokens of a
           caption or batch, which is random. Here the divisor is the number of target tokens, and the weight 1/t makes
           up for it on average only
    parallel decoding      mdc with t_min = t_max = 1
    arc    nothing is masked, the decoder is causal, every token has weight 1 (the negative of Eq. 7)
    cappa  CapPa's mix: 75 % of the samples in parallel, 25 % autoregressive (Tschannen et al. 2023, Sec. 3)
    mcd    mask-and-replace diffusion in 100 steps, MC-Diffusion's (replace_process.py); a row per schedule
    complementary  two views of each caption: what one hides, the other shows, as in LaViDa, so that every token is
           learnt once a step; two-views is its control, the same two rates with independent masks

The continuous-time bound and its weight are those of MDLM (Sahoo et al. 2024) and MD4 (Shi et al. 2024).

Valid tokens are SOT to EOT, target tokens those after SOT, asked tokens those whose logits are wanted now. SOT is
given. EOT is a token like any other. Padding is nowhere.
"""
from . import autoregressive, masked, replace  # noqa: F401  each registers its rows
from .base import CaptionCfg
from .registry import OBJECTIVES, Objective, register_objective

__all__ = ["OBJECTIVES", "CaptionCfg", "Objective", "register_objective"]
