"""Mathematics of the forward process and the loss: an objective is a function, a file is a family.

    mdc    each token is masked with probability t, t in (t_min, t_max]; weight 1/t (Eq. 5) or 1 (Table 4)
    BERT   mdc with t_min = t_max: Eq. 1, whose divisor, the random number of masked tokens, 1/t replaces on average
    parallel decoding      mdc with t_min = t_max = 1
    arc    nothing is masked, the decoder is causal, every token has weight 1 (the negative of Eq. 7)
    cappa  CapPa's mix: 75 % of the samples in parallel, 25 % autoregressive (Tschannen et al. 2023, Sec. 3)
    mcd    mask-and-replace diffusion in 100 steps, MC-Diffusion's (replace_process.py); a row per schedule
    complementary  two views of each caption: what one hides, the other shows, as in LaViDa, so that every token is
           learnt once a step; two-views is its control, the same two rates with independent masks

The continuous-time bound and its weight are those of MDLM (Sahoo et al. 2024) and MD4 (Shi et al. 2024).
"""
from . import autoregressive, masked, replace  # noqa: F401  each registers its rows
from .base import CaptionCfg
from .registry import OBJECTIVES, Objective, register_objective

__all__ = ["OBJECTIVES", "CaptionCfg", "Objective", "register_objective"]
