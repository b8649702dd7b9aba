"""Validation during training: the negative evidence lower bound (NELBO) of held-out captions (Eq. 5 with t in (0, 1]).

The NELBO is taken over the whole interval (0, 1], whatever interval the model is trained on, and always with the same t
and the same masks. So epochs and models can be compared. For a causal model it is the exact NLL (Eq. 7).

Dimensions: B images, H and W pixels, L positions.
"""
import logging
import math

import torch
from open_clip import get_input_dtype
from open_clip_train.precision import get_autocast

from ..models.captioner import Captioner
from ..objectives.replace_process import prior_kl
from ..objectives.times import golden_ratio_points
from ..text.packing import pack
from ..text.special_tokens import target_tokens
from .prefetch import pair

NOISE_SEED = 0


@torch.inference_mode()
def nelbo(model: Captioner, dataloader, device: str, precision: str = "fp32",
          limit: int | None = None) -> dict[str, float]:
    """Return the NELBO in nats per token (counting EOT but not SOT) and per caption, and the number of samples.

    Each caption gets one draw of the NELBO, with weight 1/t. Its t depends on its index in the data and its masks come
    from a fixed seed, so that neither the batch size nor the epoch changes the result. `dataloader` yields image
    [B, 3, H, W] and text [B, L] in a fixed order, and the first `limit` count. Raises ValueError if it is empty.
    """
    device = torch.device(device)
    autocast = get_autocast(precision, device_type=device.type)
    generator = torch.Generator().manual_seed(NOISE_SEED)
    total, num_tokens, num_samples = 0.0, 0.0, 0
    model.eval()
    for i, (image, text) in enumerate(map(pair, dataloader)):
        if limit:
            image, text = image[:limit - num_samples], text[:limit - num_samples]
        image = image.to(device=device, dtype=get_input_dtype(precision), non_blocking=True)
        corrupted = model.corrupt_nelbo(text, golden_ratio_points(num_samples, len(text)), generator)
        captions = pack(text, corrupted, model.vocab_size).to(device, non_blocking=True)
        with autocast():
            out = model(image, captions)
        rows = len(corrupted.text) // len(text)  # an objective may read a caption in several rows, each a draw
        total += (out["token_weight"] * out["token_nll"]).sum().double() / rows
        num_tokens += int(target_tokens(text, model.vocab_size).sum())  # without what fills up a block
        num_samples += len(text)
        if i % 100 == 0:
            logging.info(f"Validation: {num_samples} captions, NELBO {float(total / num_tokens):.4f} nats per token")
        if num_samples == limit:
            break
    if not num_samples:
        raise ValueError("the validation data has no samples: check --val-data")
    schedule = model.objective.schedule
    prior = prior_kl(schedule(model.vocab_size, torch.device("cpu"))) if schedule else 0.0
    per_token = float(total / num_tokens) + prior
    return {
        "nelbo_per_token": per_token,
        "perplexity_bound": math.exp(min(per_token, 700.0)),
        "nelbo_per_caption": per_token * num_tokens / num_samples,
        "num_samples": num_samples,
    }
