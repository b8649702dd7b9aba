"""Estimates log p(caption | image): autoregressive (Eq. 7), heuristic (Sec. 4.2), Monte Carlo (Eq. 8), MC-Diffusion."""
