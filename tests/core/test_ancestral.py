"""Claims about ancestral sampling and guidance by masked features.

The exact distribution of the samples is computed with dense matrices.
"""
import itertools
import math

import pytest
import torch
from conftest import VOCAB, images, seeded, tiny_captioner
from likelihoods import network
from scipy.stats import chisquare
from test_mask_replace import T, V, dense, much_replacement, product, true_posteriors  # noqa: F401

from open_clip_mdc.decoding.ancestral import denoise, times
from open_clip_mdc.decoding.generate import generate
from open_clip_mdc.decoding.sampling import Sampling
from open_clip_mdc.likelihood.log_likelihood import mean_image
from open_clip_mdc.objectives.replace_process import make_schedule
from open_clip_mdc.text.special_tokens import valid_tokens

SOT, EOT, MASK = VOCAB - 2, VOCAB - 1, VOCAB
DRAWS = 20000
MCS = dict(condition_drop=0.1, condition_mask=0.4)
CFG = dict(condition_drop=0.1, condition_mask=1.0, condition_zeros=True)


def drawing(seed: int = 0, **options) -> Sampling:
    return Sampling(**{"temperature": 1.0, **options}, generator=seeded(seed))


def one_token_network(table: torch.Tensor):
    """log p(x_0 | x_t) of a token by itself: table [V + 1, T + 1, V]."""
    def token_logits(text, predicted, time):
        return table[text.take(predicted), time[predicted // text.shape[1]]].float()
    return lambda lengths: token_logits


def draw(table: torch.Tensor, schedule, steps: int, sampling: Sampling) -> torch.Tensor:
    """Return how often each id is drawn, [V], from captions of one token."""
    text = torch.full((DRAWS, 1), V)
    drawn = denoise(one_token_network(table), text, torch.ones_like(text, dtype=torch.bool), schedule, steps,
                    sampling=sampling).text
    return drawn.flatten().bincount(minlength=V)


def law(table: torch.Tensor, schedule, steps: int) -> torch.Tensor:
    """Return the distribution at the end of the reverse chain, [V], by products of matrices."""
    matrices, mask = dense(schedule), float(schedule.mask[-1])
    state = torch.full((V + 1,), (1 - mask) / V, dtype=torch.float64)
    state[V] = mask
    for t, s in itertools.pairwise(times(steps, T)):
        rows = []
        for k in range(V + 1):
            given, reach = true_posteriors(matrices, k, s, t)
            rows.append(table[k, t].softmax(0) @ given if (reach > 0).all() else torch.eye(V + 1).double()[k])
        state = state @ torch.stack(rows)
    assert state[V] == pytest.approx(0, abs=1e-12)
    return state[:V]


@pytest.mark.parametrize("preset", ["absorbing", "replace", "half"])
@pytest.mark.parametrize("steps", [5, 2, 1])
def test_tokens_are_drawn_by_the_law_of_the_reverse_chain(preset, steps):
    schedule = make_schedule(V, T, preset)
    table = torch.randn(V + 1, T + 1, V, dtype=torch.float64, generator=seeded(0))
    assert chisquare(draw(table, schedule, steps, drawing()), DRAWS * law(table, schedule, steps)).pvalue > 0.001


def test_what_is_cut_is_cut_from_p_of_x_0():
    """From p = (.5, .3, .15, .05) top_p = .7 leaves two ids, however much is replaced on the way. Greedy leaves one."""
    table = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log().expand(V + 1, T + 1, V)
    for preset in ("absorbing", "half"):
        schedule = make_schedule(V, T, preset)
        counts = draw(table, schedule, 5, drawing(top_p=0.7))
        cut = table.clone()
        cut[..., 2:] = -torch.inf
        assert not counts[2:].any() and chisquare(counts[:2], DRAWS * law(cut, schedule, 5)[:2]).pvalue > 0.001
        assert draw(table, schedule, 5, drawing(temperature=0.0))[0] == DRAWS


@pytest.mark.parametrize("objective", ["mcd-absorbing", "mcd", "mcd-replace"])
@torch.no_grad()
def test_given_tokens_stay_no_mask_is_left_and_logits_are_those_that_are_read(objective):
    """An EOT drawn as a replacement neither ends a caption nor changes what is padding."""
    model, seen = tiny_captioner(objective, t_min=0.0), []  # of the texts, the asked places and the steps
    reader = network(model, images(2))
    schedule = model.objective.schedule(VOCAB, torch.device("cpu"))
    text = torch.tensor([[SOT, MASK, 7, MASK, MASK, MASK, EOT, 0], [SOT, MASK, MASK, EOT, 0, 0, 0, 0]])
    text = text.repeat_interleave(40, 0)
    given = text != MASK
    decoded = denoise(lambda lengths: lambda *read: seen.append(read) or reader(lengths)(*read), text,
                      valid_tokens(text, VOCAB), schedule, forbidden=(SOT, EOT), sampling=drawing())
    assert torch.equal(decoded.text[given], text[given]) and (decoded.text[~given] < SOT).all()
    assert torch.equal(decoded.step >= 0, ~given) and torch.equal(decoded.log_prob < 0, ~given)
    free = ~given[:, :7].flatten()
    for (before, predicted, time), (after, *_) in itertools.pairwise([*seen, (decoded.text[:, :7],)]):
        assert (time == time[0]).all() and free[predicted].all()
        kept = torch.ones_like(free).index_fill(0, predicted, False)
        assert torch.equal(before.flatten()[kept], after.flatten()[kept])
        drawn = (before == MASK).flatten() & (after != MASK).flatten() if schedule.absorbing else \
            free & (after != MASK).flatten()
        assert torch.equal(predicted, drawn.nonzero()[:, 0])
    replaced = torch.stack([before for before, *_ in seen])[:, ~given[:, :7]]
    assert (replaced == EOT).any() == (objective == "mcd-replace") and len(seen) <= 100


@pytest.mark.parametrize("objective", ["mdc", "mcd", "mcd-absorbing", "mcd-replace"])
def test_generate_draws_captions_of_the_length_asked_for_and_repeats_them(objective):
    model, image = tiny_captioner(objective), images(3)
    options = dict(length=6, sampler="ancestral", return_trace=True)
    first, again, other = (generate(model, image, **options, sampling=drawing(seed)) for seed in (0, 0, 1))
    assert all(map(torch.equal, first, again)) and not torch.equal(first.text, other.text)
    assert first.text.shape == (3, 8) and (first.text[:, 7] == EOT).all() and (first.text[:, 1:7] < SOT).all()
    assert not torch.equal(first.text, generate(model, image, **options, steps=3, sampling=drawing()).text)
    template = torch.tensor([[SOT, MASK, 7, MASK, EOT]])
    filled = generate(model, image, text=template, sampler="ancestral", sampling=drawing(temperature=0.0))
    assert (filled[:, 2] == 7).all() and (filled < MASK).all()


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
@pytest.mark.parametrize("cfg, weak", [(dict(), "null_image"), (MCS, "masked_image"), (MCS, "null_image"),
                                       (CFG, "masked_image"), (CFG, "null_image")])
def test_scale_one_is_the_model_bit_for_bit_in_one_pass_and_scale_zero_is_the_weak_one(sampler, cfg, weak):
    model, image = tiny_captioner("mcd-absorbing", t_min=0.0, **cfg), 3 * images(4)
    if cfg is MCS:
        torch.nn.init.normal_(model.no_patch)
    blind, passes, towers = mean_image(model, [image]), [], []
    model.text.ln_final.register_forward_hook(lambda *_: passes.append(1))
    model.visual.register_forward_hook(lambda *_: towers.append(1))

    def captions(**options):
        passes.clear(), towers.clear()
        return generate(model, image, length=8, sampler=sampler, return_trace=True, sampling=drawing(temperature=0.0),
                        **options)
    plain = captions()
    calls = len(passes)
    one = captions(guidance_scale=1.0, blind=blind)
    assert all(map(torch.equal, plain, one)) and len(passes) == calls and len(towers) == 1
    three = captions(guidance_scale=3.0, uncond=weak, blind=blind)
    assert not torch.equal(plain.text, three.text) and len(passes) == 2 * (three.step.max() + 1)
    assert len(towers) == 1  # the image is read once
    zero = captions(guidance_scale=0.0, uncond=weak, blind=blind)
    with torch.no_grad():
        patches = model.encode_image_tokens(image)
        if weak == "masked_image" and not model.caption_cfg.condition_zeros:
            rand = seeded(0)
            torch.rand(4, 1, generator=rand)
            patches = torch.where((torch.rand(4, 16, generator=rand) < 0.4)[..., None], model.no_patch, patches)
        else:
            patches = torch.zeros_like(patches) if cfg is CFG else blind.expand_as(patches)
    if sampler == "confidence":  # the other draws after the masks are drawn
        model.encode_image_tokens = lambda *_: patches
        alone = captions()
        assert torch.equal(zero.text, alone.text)
        torch.testing.assert_close(zero.log_prob, alone.log_prob, atol=1e-4, rtol=1e-4)


def test_all_features_masked_by_zeros_is_classifier_free_guidance_and_what_a_model_is_guided_by_without_a_word():
    image = 3 * images(4)
    options = dict(length=8, guidance_scale=3.0)
    for cfg, weak in ((CFG, "masked_image"), (CFG, "null_image"), (MCS, "masked_image")):
        model = tiny_captioner("mcd", t_min=0.0, **cfg)
        by_default = generate(model, image, **options, sampling=drawing(temperature=0.0))
        assert torch.equal(by_default, generate(model, image, **options, uncond=weak,
                                                sampling=drawing(temperature=0.0)))


def test_times_are_the_nearest_steps_worked_out_by_hand():
    assert times(7, 100) == [100, 86, 71, 57, 43, 29, 14, 0]
    assert times(3, 3) == [3, 2, 1, 0] and times(1, 100) == [100, 0]


def test_a_token_that_is_drawn_as_it_stood_by_chance_has_its_step_and_its_probability():
    """The only draw is of id 0, which a third of the visible tokens are by chance when the chain begins."""
    schedule = make_schedule(3, 10, "replace")
    table = torch.zeros(4, 11, 3, dtype=torch.float64)
    table[..., 0] = 1.0
    text = torch.full((400, 1), 3)
    drawn = denoise(one_token_network(table), text, torch.ones_like(text, dtype=torch.bool), schedule, 1)
    assert (drawn.text == 0).all() and (drawn.step == 0).all()
    assert drawn.log_prob.flatten().tolist() == pytest.approx([1 - math.log(math.e + 2)] * 400)
