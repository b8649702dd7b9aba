"""Training objectives: the forward process and the loss (Eqs. 1 to 7). Each file has one family of objectives.

    mdc    Masked diffusion. Tokens are masked with probability t, with t in (t_min, t_max]. A masked token has weight
           1/t (Eq. 5) or 1 (Table 4).
    BERT   mdc with t_min = t_max. Eq. 1 divides by the number of masked tokens, here 1/t does so on average.
    parallel decoding      mdc with t_min = t_max = 1.
    arc    Autoregressive. Nothing is masked, the decoder is causal, every token has weight 1 (the negative of Eq. 7).
    cappa  CapPa's mix: 75 % of the captions in parallel, 25 % autoregressive (Tschannen et al. 2023, Sec. 3).
    block-diffusion        masked diffusion within blocks of tokens, which are read in order (blocks.py).
    mix    ARC's rows and MDC's in one decoder (mix.py).
    bicap, prefix          VirTex's two directions and SimVLM's prefix (orders.py)
    concept       masked diffusion of the words that name what is seen, after ICMLM (concept.py).
    visual MDC that weighs a word by what the image tells of it (visual.py)
    mcd    MC-Diffusion's mask-and-replace diffusion in 100 steps (replace_process.py), a row per schedule.

The continuous-time bound and its weight are those of MDLM (Sahoo et al. 2024) and MD4 (Shi et al. 2024).
"""
from . import autoregressive, blocks, concept, masked, mix, orders, replace, visual  # noqa: F401  each registers its objectives
from .config import CaptionCfg
from .registry import OBJECTIVES, Objective, register_objective

__all__ = ["OBJECTIVES", "CaptionCfg", "Objective", "register_objective"]
