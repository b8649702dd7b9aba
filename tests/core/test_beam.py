"""Claims about autoregressive decoding: the search, the cache, the scores."""
import copy
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import seeded, untrained_captioner
from scipy.stats import chisquare

from open_clip_mdc.decoding.beam import beam_search, next_log_probs, sample
from open_clip_mdc.decoding.generate import cached_step_logits, generate
from open_clip_mdc.decoding.sampling import Sampling, sample_tokens
from open_clip_mdc.likelihood import log_likelihood as scoring

SOT, EOT = 58, 59


@pytest.fixture(scope="module")
def model():
    model = untrained_captioner("arc")
    torch.nn.init.normal_(model.text.output.weight, std=0.3)  # peaked, so that captions differ and some end early
    torch.nn.init.normal_(model.text.positional_embedding, std=0.3)
    return model


def search(*args, **options):
    """The captions that `beam_search` finds, and their log-likelihoods."""
    found = beam_search(*args, **options)
    return found.text, found.log_prob.sum(1)


def random_table(seed, vocab_size):
    """Logits that depend on all that stands before, in no pattern."""
    def step_logits(text, parent):
        rows = []
        for ids in text.tolist():
            prefix = sum(token * 31 ** i for i, token in enumerate(ids))
            rows.append(2 * torch.randn(vocab_size, generator=seeded(1000 * seed + prefix)))
        return torch.stack(rows)

    return step_logits


def log_probs(step_logits, tokens, vocab_size):
    """log p by hand, one call per token: tokens are those between SOT and EOT, which comes last."""
    ids = [vocab_size - 2, *tokens, vocab_size - 1]
    return [step_logits(torch.tensor([ids[:i]]), None)[0].log_softmax(0)[ids[i]].item() for i in range(1, len(ids))]


def all_captions(vocab_size, max_length):
    return [c for n in range(max_length + 1) for c in itertools.product(range(vocab_size - 2), repeat=n)]


def words(text):
    """Tokens between SOT and EOT of one row."""
    ids = text.tolist()
    return tuple(ids[1:ids.index(max(ids))])


def test_the_cached_step_computes_what_the_whole_forward_does(model, image):
    rows = torch.randint(0, 58, (6, 9), generator=seeded(2))
    parent = torch.tensor([2, 0, 0, 5, 3, 3])  # rows of image 0 continue rows of image 0, and so on
    with torch.no_grad():
        step_logits = cached_step_logits(model, model.text.project_image(model.encode_image_tokens(image[:2])))
        text = rows[:, :1]
        for n in range(2, 10):
            text = torch.cat((text[parent], rows[:, n - 1:n]), dim=1)
            if n == 2:
                step_logits(rows[:, :1], parent)
            cached = step_logits(text, parent)
            plain = model.logits(image[:2].repeat_interleave(3, 0), text, torch.ones_like(text, dtype=torch.bool))
            torch.testing.assert_close(cached, plain[:, -1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_one_beam_is_greedy_search(model, image):
    expected = torch.zeros(len(image), 10, dtype=torch.long)
    for row, one in zip(expected, image.split(1), strict=True):
        ids = [SOT]
        while ids[-1] != EOT:
            logits = model.logits(one, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool))[0, -1]
            logits[SOT] = -math.inf
            ids.append(EOT if len(ids) == 9 else logits.argmax().item())
        row[:len(ids)] = torch.tensor(ids)
    found = generate(model, image, length=8, num_beams=1)
    assert torch.equal(found, expected[:, :found.shape[1]])
    assert len({words(row) for row in expected}) > 1  # else the images would not matter


def test_of_equally_likely_captions_the_first_to_end_is_kept_whatever_the_other_images_take():
    """Image 0 ends at once or after 0, with 0.5 each. Image 1 ends after 0 and 0, so that the search continues."""
    def table(text, parent):
        after = {(0, ()): [0.5, 0.0, 0.0, 0.5], (0, (0,)): [0.0, 0.0, 0.0, 1.0], (1, ()): [1.0, 0.0, 0.0, 0.0],
                 (1, (0,)): [1.0, 0.0, 0.0, 0.0], (1, (0, 0)): [0.0, 0.0, 0.0, 1.0]}
        rows = text.tolist()
        return torch.tensor([after.get((r * batch // len(rows), tuple(ids[1:])), [0.25] * 4)
                             for r, ids in enumerate(rows)]).log()

    for batch in (1, 2):
        text, score = search(table, batch, 4, max_length=3, num_beams=2)
        assert [words(row) for row in text] == [(), (0, 0)][:batch]
        assert score.exp().tolist() == pytest.approx([0.5, 1.0][:batch])


@pytest.mark.parametrize("options", [{}, {"num_beams": 1}, {"sampling": Sampling(1.0)}], ids=str)
def test_the_trace_has_every_tokens_place_and_log_likelihood_and_costs_one_look_at_the_image(model, image, options):
    looks = []
    hook = model.visual.register_forward_hook(lambda *_: looks.append(1))
    decoded = generate(model, image, length=8, return_trace=True, **options)
    hook.remove()
    assert len(looks) == 1
    scores = scoring.log_likelihood(model, image, decoded.text, return_details=True)
    torch.testing.assert_close(decoded.log_prob, scores.token_log_likelihood, rtol=1e-4, atol=1e-5)
    for ids, step in zip(decoded.text.tolist(), decoded.step.tolist(), strict=True):
        end = ids.index(EOT)
        assert step == [-1, *range(end), *[-1] * (len(ids) - end - 1)]


def test_sampled_captions_come_as_often_as_they_are_likely():
    table = random_table(3, vocab_size=4)

    def without_sot(text, parent):
        unique, inverse = text.unique(dim=0, return_inverse=True)
        return table(unique, None).index_fill(1, torch.tensor([2]), -math.inf)[inverse]

    expected = {caption: log_probs(without_sot, caption, 4) for caption in all_captions(4, max_length=2)}
    shares = np.exp([sum(each[:2]) for each in expected.values()])  # the EOT after two tokens is forced
    assert shares.sum() == pytest.approx(1)
    found = sample(without_sot, 20000, 4, 2, Sampling(1.0, generator=seeded(0)))
    drawn = list(map(words, found.text))
    assert chisquare([drawn.count(caption) for caption in expected], 20000 * shares / shares.sum()).pvalue > 0.001
    assert found.text.tolist() == [[2, *caption, 3, *[0] * (2 - len(caption))] for caption in drawn]
    assert found.log_prob.sum(1).tolist() == pytest.approx([sum(expected[caption]) for caption in drawn], abs=1e-5)


@pytest.mark.parametrize("options, expected", [
    (dict(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
    (dict(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    (dict(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
    (dict(temperature=1.0, top_p=0.6), [4 / 7, 3 / 7, 0, 0]),
    (dict(temperature=1.0, top_p=0.71), [4 / 9, 3 / 9, 2 / 9, 0]),
    (dict(temperature=0.5, top_k=3, top_p=0.8), [16 / 25, 9 / 25, 0, 0]),
    (dict(temperature=1.0, top_p=0.01), [1, 0, 0, 0]),
])
def test_tokens_are_drawn_as_often_as_temperature_top_k_and_top_p_say(options, expected):
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(20000, 4)
    token = sample_tokens(logits, Sampling(**options, generator=seeded(0)))
    counts, expected = token.bincount(minlength=4).numpy(), 20000 * np.array(expected)
    assert not counts[expected == 0].any()
    assert not chisquare(counts[expected > 0], expected[expected > 0]).pvalue < 0.001  # it is NaN if one is possible


@pytest.mark.parametrize("temperature", [1e-6, 1e300])
def test_at_the_bounds_of_temperature_tokens_are_possible_ones(temperature):
    logits = torch.tensor([[-torch.inf, -80.0, -90.0]]).expand(100, 3)
    token = sample_tokens(logits, Sampling(temperature, generator=seeded(0)))
    assert set(token.tolist()) == ({1} if temperature < 1 else {1, 2})


@pytest.mark.parametrize("min_length", range(4))
def test_a_wide_beam_finds_the_most_likely_caption_that_is_long_enough_where_greedy_search_does_not(min_length):
    shorter = greedy_misses = 0
    for seed in range(6):
        table = random_table(seed, vocab_size=5)
        likelihood = {c: sum(log_probs(table, c, 5)) for c in all_captions(5, max_length=3)}
        enough = {c: value for c, value in likelihood.items() if len(c) >= min_length}
        best = max(enough, key=enough.get)
        text, score = search(table, 1, 5, max_length=3, num_beams=27, min_length=min_length)
        assert words(text[0]) == best and score.item() == pytest.approx(enough[best], abs=1e-5)
        shorter += len(max(likelihood, key=likelihood.get)) < min_length
        greedy, score = search(table, 1, 5, max_length=3, num_beams=1, min_length=min_length)
        assert score.item() == pytest.approx(enough[words(greedy[0])], abs=1e-5)
        greedy_misses += words(greedy[0]) != best
    assert greedy_misses and (shorter or not min_length)


@pytest.mark.parametrize("options", [{}, {"num_beams": 1}, {"sampling": Sampling(1.0)}], ids=str)
def test_searched_and_drawn_captions_are_as_long_as_asked(model, image, options):
    hasty = copy.deepcopy(model)
    hasty.text.ln_final.bias.data.fill_(1.0)
    hasty.text.output.weight.data[EOT] += 0.2  # times 32 ones: EOT's logit rises by 6.4
    assert min(len(words(row)) for row in generate(hasty, image, length=8, **options)) < 5
    text = generate(hasty, image, length=8, min_length=5, **options)
    lengths = {len(words(row)) for row in text}
    assert lengths <= {5, 6, 7, 8} and 5 in lengths and text.shape[1] == max(lengths) + 2
    with pytest.raises(ValueError, match="min_length 9 is more than length 8"):
        generate(hasty, image, length=8, min_length=9, **options)


def test_probabilities_are_of_float32_where_logits_are_not():
    logits = torch.randn(3, 60, generator=seeded(0)).bfloat16()
    found = next_log_probs(lambda *args: logits, torch.full((3, 2), 1), torch.arange(3), 60, 0, 9)
    kept = torch.arange(60) != SOT
    expected = logits.double().log_softmax(1)
    assert (found[:, kept] - expected[:, kept]).abs().max() < 1e-5 and (found[:, SOT] == -torch.inf).all()
