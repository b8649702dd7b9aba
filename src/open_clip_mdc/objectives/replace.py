"""MC-Diffusion's objective, mask-and-replace diffusion. The process itself is in replace_process.py.

    mcd            the schedule of VQ-Diffusion's code, which replaces very few tokens
    mcd-absorbing  tokens are masked only, as in "mdc", with t on the grid 1/T, ..., 1
    mcd-replace    the schedule of its paper, which replaces 10 %

Dimensions: B captions, L positions, M predicted tokens, V vocabulary.
"""
from functools import partial

import torch
from torch import Tensor

from ..text.packing import NoisedCaptions, Predicted, of_token
from ..text.special_tokens import mask_id, target_tokens
from .config import CaptionCfg
from .loss import full_precision
from .registry import register_objective

STEPS = 100  # T, as in VQ-Diffusion


def step_of(t: Tensor) -> Tensor:
    """Return steps, long [R] in 1..T, of times t."""
    return (STEPS * t).round().long()


def schedule(preset: str, vocab_size: int, device: torch.device):
    """Return the `Schedule` of a preset."""
    from .replace_process import make_schedule  # a model without steps does not need it
    return make_schedule(vocab_size, STEPS, preset, device)


def mask_and_replace(preset: str, text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
                     generator: torch.Generator | None = None) -> NoisedCaptions:
    """Draw x_t of a caption. A token's loss is T times its term of the bound at step t (`token_loss`)."""
    from .replace_process import noise
    process = schedule(preset, vocab_size, text.device)
    target = target_tokens(text, vocab_size)
    t = cfg.t_min + (cfg.t_max - cfg.t_min) * u.double()
    # The step that t lies in. Rounding of T * t must not lift a time on the grid into the next step.
    step = (STEPS * t - 1e-9).ceil().long().clamp(min=1).to(text.device)  # [B]
    x_t = noise(text, target, step, process, generator)
    # Without replacement only masked tokens have a term, as a visible one is the true one.
    loss_mask = target & (x_t == mask_id(vocab_size)) if process.absorbing else target
    # Some tokens are replaced, so the clean ones are asked for explicitly.
    return NoisedCaptions(x_t, loss_mask, STEPS * loss_mask.float(), target, False, step / STEPS, text)


def token_loss(preset: str, logits: Tensor, predicted: Predicted, aux_weight: float = 0.0) -> Tensor:
    """Return each token's term of the bound, float32 [M]. The constant KL of the prior is left out (`prior_kl`).

    If aux_weight is set, aux_weight * (2 - (t - 1)/T) * -log p(x_0 | x_t) is added, as in D3PM (Eq. 5) and
    VQ-Diffusion's code.
    """
    from .replace_process import bound_terms
    log_p, step = full_precision(logits).log_softmax(1), step_of(predicted.t)  # [M, V], [M]
    process = schedule(preset, logits.shape[1], logits.device)
    loss = bound_terms(log_p, predicted.token, predicted.read, step, process)
    if not aux_weight:
        return loss
    return loss - aux_weight * (2 - (step - 1) / STEPS) * of_token(log_p, predicted.token)


for name, preset in {"mcd": "code", "mcd-absorbing": "absorbing", "mcd-replace": "replace"}.items():
    register_objective(name, token_loss=partial(token_loss, preset), schedule=partial(schedule, preset),
                       scorers=("bound", "heuristic", "monte_carlo", "parallel"))(partial(mask_and_replace, preset))
