"""MC-Diffusion's objective, mask-and-replace diffusion. The process itself is in replace_process.py.

Dimensions: B captions, L positions, M predicted tokens, V vocabulary.
"""
import torch
from torch import Tensor

from ..text.packing import NoisedCaptions, Predicted
from ..text.special_tokens import mask_id, target_tokens
from .config import CaptionCfg
from .loss import full_precision
from .registry import register_objective
from .replace_process import Schedule, bound_terms, make_schedule, noise

STEPS = 100  # T, as in VQ-Diffusion


def step_of(t: Tensor) -> Tensor:
    return (STEPS * t).round().long()


def mask_and_replace(name: str, preset: str) -> None:
    """Register mask-and-replace diffusion. A token's loss is T times its term of the bound at step t.

    Without replacement only masked tokens have a term, and this is "mdc" with t on the grid 1/T, ..., 1. The constant
    KL of the prior is left out (`prior_kl`). If aux_weight is set, aux_weight * (2 - (t - 1)/T) * -log p(x_0 | x_t) is
    added, as in D3PM (Eq. 5) and VQ-Diffusion's code.
    """
    def schedule(vocab_size: int, device: torch.device) -> Schedule:
        return make_schedule(vocab_size, STEPS, preset, device)

    def corrupt(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
                generator: torch.Generator | None = None) -> NoisedCaptions:
        process = schedule(vocab_size, text.device)
        target = target_tokens(text, vocab_size)
        t = cfg.t_min + (cfg.t_max - cfg.t_min) * u.double()
        step = (STEPS * t - 1e-9).ceil().long().clamp(min=1).to(text.device)
        x_t = noise(text, target, step, process, generator)
        loss_mask = target & (x_t == mask_id(vocab_size)) if process.absorbing else target
        return NoisedCaptions(x_t, loss_mask, STEPS * loss_mask.float(), target, False, step / STEPS)

    def corrupt_full_interval(text: Tensor, vocab_size: int, u: Tensor,
                              generator: torch.Generator | None = None) -> NoisedCaptions:
        return corrupt(text, vocab_size, CaptionCfg(t_min=0.0, t_max=1.0), u, generator)

    def token_loss(logits: Tensor, predicted: Predicted, aux_weight: float = 0.0) -> Tensor:
        log_p, step = full_precision(logits).log_softmax(1), step_of(predicted.t)
        loss = bound_terms(log_p, predicted.token, predicted.read, step, schedule(logits.shape[1], logits.device))
        if not aux_weight:
            return loss
        factor = 2 - (step - 1) / STEPS
        return loss - aux_weight * factor * log_p.gather(1, predicted.token[:, None]).squeeze(1)

    register_objective(name, corrupt_full_interval=corrupt_full_interval, token_loss=token_loss,
                       scorers=("bound", "heuristic", "monte_carlo"), schedule=schedule)(corrupt)


mask_and_replace("mcd", "code")
mask_and_replace("mcd-absorbing", "absorbing")
mask_and_replace("mcd-replace", "replace")
