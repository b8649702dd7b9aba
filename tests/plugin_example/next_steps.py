"""Twelve next steps that papers suggest, as objectives from outside the package. Each is as short as it can be.

    pytest tests/core/test_plugins.py

A test trains one step with each. The table in docs/extend.md names their papers.

Dimensions: B captions, L positions, M predicted tokens, V vocabulary.
"""
import copy
import math
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from open_clip_mdc.decoding.confidence import fully_masked, unmask_by_confidence
from open_clip_mdc.decoding.options import Sampling, Unmasking
from open_clip_mdc.objectives import register_objective
from open_clip_mdc.objectives.masked import forward_process, loss_weight, masked_diffusion, sample_t
from open_clip_mdc.text.packing import NoisedCaptions, Predicted, Sight, pack
from open_clip_mdc.text.special_tokens import caption_lengths, eot_id, mask_id, target_tokens, valid_tokens

UNREAD = {"scorers": ()}  # nothing here decodes or scores captions in this order, so the encoder is what it trains


@register_objective("step-schedule")
def schedule(text, vocab_size, cfg, u, generator=None):
    """Draw times by another schedule (MDLM)."""
    return masked_diffusion(text, vocab_size, cfg, (u * math.pi / 2).sin(), generator)


@register_objective("step-rates")
def rates(text, vocab_size, cfg, u, generator=None):
    """Mask each token at a rate of its own, here rarer for small ids (GenMD4, Bitton et al. 2021)."""
    target = target_tokens(text, vocab_size)
    t = sample_t(u, cfg.t_min, cfg.t_max)[:, None] ** (1 + (text < vocab_size // 2).float())  # [B, L]
    masked = target & (torch.rand(text.shape, generator=generator) < t)
    return NoisedCaptions(text.masked_fill(masked, mask_id(vocab_size)), masked, torch.where(masked, 1 / t, 0), target,
                          False, u.float())


@register_objective("step-views")
def views(text, vocab_size, cfg, u, generator=None):
    """Give each caption two rows that mask opposite tokens (LaViDa)."""
    target = target_tokens(text, vocab_size)
    first = forward_process(text, target, 0.5 + 0 * u.float(), vocab_size, generator)[1]
    masked = torch.stack((first, target & ~first), 1).flatten(0, 1)  # [2B, L]
    text, target = text.repeat_interleave(2, 0), target.repeat_interleave(2, 0)
    return NoisedCaptions(text.masked_fill(masked, mask_id(vocab_size)), masked, 2.0 * masked, target, False,
                          torch.full((len(text),), 0.5))


def focal(logits, predicted: Predicted):
    """Weigh a token by how wrong the model is about it (Lin et al. 2017)."""
    nll = F.cross_entropy(logits.float(), predicted.token, reduction="none")
    return nll * (1 - (-nll).exp()) ** 2


register_objective("step-loss", token_loss=focal)(masked_diffusion)


@register_objective("step-backwards", **UNREAD)
def backwards(text, vocab_size, cfg, u, generator=None):
    """Read from right to left: each token is asked for the one before it (VirTex)."""
    target = target_tokens(text, vocab_size)
    position = torch.arange(text.shape[1])
    from_end = (caption_lengths(text, vocab_size)[:, None] - 1 - position).clamp(min=0)
    return NoisedCaptions(text, target, target.float(), target, False, 0 * u.float(), text.roll(1, 1),
                          sight=Sight(from_end, torch.zeros_like(target)))


@register_objective("step-prefix", **UNREAD)
def prefix(text, vocab_size, cfg, u, generator=None):
    """See the first half whole, and predict the rest from left to right (SimVLM)."""
    target = target_tokens(text, vocab_size)
    last = target.sum(1, keepdim=True) // 2
    position = torch.arange(text.shape[1])
    asked = target.roll(-1, 1) & (position >= last)
    return NoisedCaptions(text, asked, asked.float(), asked, False, 0 * u.float(), text.roll(-1, 1),
                          sight=Sight((position - last).clamp(min=0), torch.zeros_like(asked)))


def beside_clean(text, vocab_size, masked, block):
    """Return rows of a noisy stream [B, L] and a clean one at the same positions, [B, 2L], with padding last."""
    valid = valid_tokens(text, vocab_size)
    order = torch.cat((valid, valid), 1).int().argsort(dim=1, descending=True, stable=True)  # padding goes to the end

    def both(noisy, clean):
        return torch.cat((noisy, clean), 1).gather(1, order)

    position = torch.arange(text.shape[1]).expand_as(text)
    nothing = torch.zeros_like(masked)
    asked = both(masked, nothing)
    return NoisedCaptions(both(text.masked_fill(masked, mask_id(vocab_size)), text), asked, asked.float(), asked, False,
                          torch.ones(len(text)), both(text, text), both(position, position), both(valid, valid),
                          Sight(both(block, block), both(~nothing, nothing)))


@register_objective("step-blocks", **UNREAD)
def blocks(text, vocab_size, cfg, u, generator=None):
    """Predict blocks of 3 tokens after clean ones (BD3-LM). `objectives/blocks.py` has it whole."""
    block = (torch.arange(text.shape[1]) // 3).expand_as(text)
    return beside_clean(text, vocab_size, target_tokens(text, vocab_size), block)


@register_objective("step-any-order", **UNREAD)
def any_order(text, vocab_size, cfg, u, generator=None):
    """Predict tokens in an order that is drawn for each caption (XLNet, sigma-GPT)."""
    target = target_tokens(text, vocab_size)
    drawn = torch.rand(text.shape, generator=generator).masked_fill(~target, -1.0)
    return beside_clean(text, vocab_size, target, drawn.argsort(1).argsort(1))


def twice(model, image_embs, captions):
    """Let the second pass read what the first one predicts at the masks (ProSeCo)."""
    with torch.no_grad():
        guess = model.text.output(model.hidden(image_embs, captions)).argmax(1)  # [M]
    packed = captions.packed
    token = packed.token.index_copy(0, captions.predicted.index, guess)
    captions = captions._replace(packed=packed._replace(token=token))
    return model.token_nll(image_embs, captions), captions


register_objective("step-two-passes", forward=twice)(masked_diffusion)

TEACHERS: WeakKeyDictionary = WeakKeyDictionary()  # an average of each model's decoder


def from_teacher(model, image_embs, captions):
    """Learn from an average of the decoder's weights (mean teacher, self-distillation)."""
    teacher = TEACHERS.setdefault(model, copy.deepcopy(model.text).eval().requires_grad_(False))
    hidden = model.hidden(image_embs, captions)
    with torch.no_grad():
        for average, weight in zip(teacher.parameters(), model.text.parameters(), strict=True):
            average.lerp_(weight, 0.01)
        target = teacher.output(teacher(captions.packed, teacher.project_image(image_embs)).index_select(
            0, captions.predicted.index)).softmax(1)
    return F.cross_entropy(model.text.output(hidden).float(), target, reduction="none"), captions


register_objective("step-teacher", forward=from_teacher)(masked_diffusion)


def reward(text):
    """Return a reward of captions [R, L]: here the share of different tokens. CIDEr would stand here."""
    return torch.tensor([len(set(row.tolist())) / len(row) for row in text])


def rewarded(model, image_embs, captions):
    """Draw two captions an image, and make the better one more likely than the other (SCST)."""
    size, rows = model.vocab_size, 2 * len(image_embs)
    with torch.no_grad():
        network = partial(model.token_logits, model.text.project_image(image_embs))
        text = fully_masked(torch.full((rows,), 6), size)
        text = unmask_by_confidence(network, text, size, Unmasking(sampling=Sampling(1.0)), (size - 2, size - 1)).text
    better = reward(text).view(-1, 2)
    advantage = (better - better.mean(1, keepdim=True)).flatten()
    drawn = pack(text, masked_diffusion(text, size, model.caption_cfg, torch.ones(rows)), size)
    return model.token_nll(image_embs, drawn) * advantage[drawn.predicted.row], drawn


register_objective("step-reward", forward=rewarded)(masked_diffusion)


@register_objective("step-eos-padded", **UNREAD)
def eos_padded(text, vocab_size, cfg, u, generator=None):
    """Fill captions with EOT to the whole context, so that EOT decides their length (LLaDA)."""
    text = text.masked_fill(~valid_tokens(text, vocab_size), eot_id(vocab_size))
    target = torch.arange(text.shape[1]).expand_as(text) > 0
    t = sample_t(u, cfg.t_min, cfg.t_max)
    noisy, masked = forward_process(text, target, t, vocab_size, generator)
    weight = torch.where(masked, loss_weight(t)[:, None], 0)
    return NoisedCaptions(noisy, masked, weight, target, False, t, text, valid=torch.ones_like(target))


@register_objective("step-task-word", **UNREAD)
def task_word(text, vocab_size, cfg, u, generator=None):
    """Put a word in front that is given and never asked for (LocCa, Dimple). Here it is the token 7."""
    inner = masked_diffusion(text[:, :-1], vocab_size, cfg, u, generator)

    def behind(x, first):
        return torch.cat((x[:, :1], torch.full_like(x[:, :1], first), x[:, 1:]), 1)

    word = behind(text[:, :-1], 7)
    return NoisedCaptions(behind(inner.text, 7), behind(inner.loss_mask, False), behind(inner.weight, 0),
                          behind(inner.target, False), False, inner.t, word, valid=valid_tokens(word, vocab_size))
