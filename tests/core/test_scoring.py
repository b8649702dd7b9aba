"""Claims about likelihoods: what each estimator computes, how certain it is of it, and what it does not depend on."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import stdtrit

from open_clip_mdc import estimators, monte_carlo, scoring
from open_clip_mdc.model import Captioner
from open_clip_mdc.tokens import eot_id, mask_id, sot_id

V = 60
SOT, EOT, MASK = sot_id(V), eot_id(V), mask_id(V)


def captioner(objective="mdc", seed=0, scale=4.0):
    """A tiny model with large weights, so that tokens, places and the image all matter to its predictions."""
    torch.manual_seed(seed)
    model = Captioner(64, dict(image_size=32, patch_size=8, width=64, head_width=32, layers=2),
                      dict(context_length=12, vocab_size=V, width=32, heads=2, layers=2), dict(objective=objective))
    with torch.no_grad():
        for parameter in model.text.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model.eval()


@pytest.fixture(scope="module")
def mdc():
    return captioner()


@pytest.fixture(scope="module")
def arc():
    return captioner("arc")


def caption(*words, length=12, padding=0):
    return [SOT, *words, EOT] + [padding] * (length - len(words) - 2)


def random_captions(count, lengths=range(2, 10), seed=0, length=12):
    """Distinct captions of random words; the lengths take turns."""
    rng = np.random.default_rng(seed)
    lengths = itertools.cycle(lengths)
    return torch.tensor([caption(*rng.integers(1, V - 2, size=next(lengths)), length=length) for _ in range(count)])


def images(count, seed=0):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def log_probs(model, image, text, valid):
    """[R, L, V] of captions [R, L] of one image, by the plain path."""
    with torch.no_grad():
        logits = model.logits(image.expand(len(text), -1, -1, -1), text, valid.expand(len(text), -1))
    return logits.double().log_softmax(-1)


def read(text):
    """The caption without padding and what a model may attend to."""
    length = text.tolist().index(EOT) + 1
    return text[:length], torch.ones(length, dtype=torch.bool)


def mask_values(model, image, text):
    """{hidden positions: what Eq. 8 averages} for every mask there is: 1/n times the sum over the n hidden tokens."""
    text, valid = read(text)
    masks = [m for n in range(1, len(text)) for m in itertools.combinations(range(1, len(text)), n)]
    noisy = text.repeat(len(masks), 1)
    for row, hidden in zip(noisy, masks, strict=True):
        row[list(hidden)] = MASK
    found = log_probs(model, image, noisy, valid)
    return {hidden: sum(logp[i, text[i]].item() for i in hidden) / len(hidden)
            for hidden, logp in zip(masks, found, strict=True)}


def eq_8(values, counts=None):
    """The sum over n of the mean over all masks of n tokens; over some counts only, N times their mean."""
    num_tokens = max(map(len, values))
    counts = counts or range(1, num_tokens + 1)
    return num_tokens * np.mean([np.mean([v for hidden, v in values.items() if len(hidden) == n]) for n in counts])


# ---- Eq. 7 and the heuristic

def test_autoregressive_equals_a_naive_loop_over_logits(arc):
    image, text = images(1), random_captions(3)
    found = scoring.log_likelihood(arc, image, text[None], return_details=True)
    for c, row in enumerate(text):
        row, valid = read(row)
        expected = [log_probs(arc, image[0], row[None, :i], valid[:i])[0, i - 1, row[i]].item()
                    for i in range(1, len(row))]
        assert found.log_likelihood[0, c].item() == pytest.approx(sum(expected), abs=1e-4)
        assert found.token_log_likelihood[0, c, 1:len(row)].tolist() == pytest.approx(expected, abs=1e-4)
        assert found.token_log_likelihood[0, c, 0] == 0 and not found.token_log_likelihood[0, c, len(row):].any()


def test_heuristic_equals_a_naive_loop_over_logits(mdc):
    image, text = images(1), random_captions(3)
    found = scoring.log_likelihood(mdc, image, text[None], "heuristic", return_details=True)
    for c, row in enumerate(text):
        row, valid = read(row)
        noisy = torch.tensor([SOT] + [MASK] * (len(row) - 1))
        total = 0.0
        for step in range(len(row) - 1):
            logp = log_probs(mdc, image[0], noisy[None], valid)[0]
            place = max((i for i in range(1, len(row)) if noisy[i] == MASK), key=lambda i, p=logp: p[i].max())
            expected = logp[place, row[place]].item()
            total += expected
            assert found.order[0, c, place] == step
            assert found.token_log_likelihood[0, c, place].item() == pytest.approx(expected, abs=1e-4)
            noisy[place] = row[place]
        assert found.log_likelihood[0, c].item() == pytest.approx(total, abs=1e-4)
        assert found.order[0, c, 0] == -1 and (found.order[0, c, len(row):] == -1).all()


def table_of(probabilities):
    """A network from a function (visible words of a row, position) -> probabilities of the ids."""
    def token_logits(text, asked):
        places = [divmod(place, text.shape[1]) for place in asked.tolist()]
        rows = [torch.tensor(probabilities(tuple(text[r].tolist()), i)) for r, i in places]
        return torch.stack(rows).log() + 7.0  # logits are log-probabilities up to a constant
    return lambda lengths: token_logits


def test_the_heuristic_score_and_order_of_a_table_are_those_computed_by_hand():
    # Ids: words 0 and 1, SOT 2, EOT 3, MASK 4. The caption is "1 0" between SOT and EOT.
    def probabilities(text, position):
        if text == (2, 4, 4, 4):
            return {1: [.3, .2, .1, .4], 2: [.1, .1, .1, .7], 3: [.2, .2, .2, .4]}[position]  # 2 is first, truth .1
        if text == (2, 4, 0, 4):
            return {1: [.3, .3, .2, .2], 3: [.1, .1, .3, .5]}[position]  # then of 3, truth .5
        if text == (2, 4, 0, 3):
            return {1: [.6, .25, .1, .05]}[position]  # truth .25
        raise AssertionError(f"no step of the heuristic shows {text}")

    found = estimators.heuristic(table_of(probabilities), torch.tensor([[2, 1, 0, 3]]), vocab_size=4)
    assert found.order.tolist() == [[-1, 2, 0, 1]]
    assert found.token_log_likelihood[0].tolist() == pytest.approx([0, math.log(.25), math.log(.1), math.log(.5)])
    assert found.log_likelihood.item() == pytest.approx(math.log(.25 * .1 * .5))


def test_equally_confident_positions_are_revealed_from_the_left():
    even = table_of(lambda text, position: [.2, .5, .1, .2])
    found = estimators.heuristic(even, torch.tensor([[2, 1, 0, 1, 3], [2, 0, 3, 0, 0]]), vocab_size=4)
    assert found.order.tolist() == [[-1, 0, 1, 2, 3], [-1, 0, 1, -1, -1]]
    assert found.log_likelihood.tolist() == pytest.approx([math.log(.5 * .2 * .5 * .2), math.log(.2 * .2)])


def test_the_heuristic_is_a_likelihood_the_captions_of_a_length_add_up_to_1():
    # Words 0 to 3, SOT 4, EOT 5, which is certain at the end and impossible before. The rest is random per context.
    def probabilities(text, position):
        if position == 4:
            return [0., 0., 0., 0., 0., 1.]
        rng = np.random.default_rng([*text, position])
        return [*(rng.dirichlet([0.5] * 4).tolist()), 0., 0.]

    text = torch.tensor([[4, *words, 5] for words in itertools.product(range(4), repeat=3)])
    found = estimators.heuristic(table_of(probabilities), text, vocab_size=6)
    assert found.log_likelihood.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert len(found.order.unique(dim=0)) > 1  # though captions are revealed in different orders


def test_finished_rows_leave_the_batch(mdc):
    image_kv = mdc.text.project_image(mdc.encode_image_tokens(images(1)))
    tokens, asked_for = [], []

    def count(lengths):
        token_logits = mdc.token_logits(image_kv, lengths)
        return lambda text, asked: tokens.append(sum(lengths)) or asked_for.append(len(asked)) or \
            token_logits(text, asked)

    with torch.no_grad():
        estimators.heuristic(count, torch.tensor([caption(1, 2), caption(1, 2, 3, 4)]), V)  # 4 and 6 tokens with SOT
    assert tokens == [10, 10, 10, 7, 7]
    assert asked_for == [8, 6, 4, 2, 1]


# ---- Eq. 8

@pytest.mark.parametrize("num_tokens", [3, 4, 5, 6])
def test_monte_carlo_with_a_budget_for_every_mask_is_eq_8_exactly(mdc, num_tokens):
    image, text = images(1), random_captions(2, [num_tokens - 1], seed=num_tokens)
    found = scoring.log_likelihood(mdc, image, text[None], "monte_carlo", num_samples=1024, return_details=True)
    for c, row in enumerate(text):
        assert found.log_likelihood[0, c].item() == pytest.approx(eq_8(mask_values(mdc, image[0], row)), rel=1e-5)
    assert (found.standard_error == 0).all()
    assert (found.draws == 2 ** num_tokens - 1).all()


def estimates(values, num_samples, seeds, interval=None):
    """Score, standard error and its degrees of freedom for many seeds, [seeds, 3], from the values of all masks."""
    found = []
    for seed in range(seeds):
        draws = monte_carlo.draw_masks(max(map(len, values)), num_samples, seed, interval)
        drawn = np.array([[values[tuple(hidden.nonzero()[0] + 1)] for hidden in draws.hidden]])
        found.append(np.concatenate(monte_carlo.estimate(drawn, draws)))
    return np.array(found)


@pytest.fixture(scope="module")
def six_tokens(mdc):
    return mask_values(mdc, images(1)[0], random_captions(1, [5], seed=3)[0])


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 20, 31])
def test_monte_carlo_is_unbiased_at_every_number_of_draws(six_tokens, num_samples):
    found = estimates(six_tokens, num_samples, seeds=1500)[:, 0]
    assert abs(found.mean() - eq_8(six_tokens)) < 4 * found.std() / math.sqrt(len(found))  # by chance once in 16,000
    assert found.std() > 0


@pytest.mark.parametrize("num_samples", [2, 4, 6, 9, 12, 15, 24, 36])
def test_the_standard_error_is_honest(six_tokens, num_samples):
    score, error, freedom = estimates(six_tokens, num_samples, seeds=1500).T
    stated, true = math.sqrt((error ** 2).mean()), math.sqrt(((score - eq_8(six_tokens)) ** 2).mean())
    assert stated > 0.93 * true  # 1500 seeds tell a standard deviation to about 2 %
    if num_samples >= 12:  # two draws of each count
        assert stated < 1.07 * true
    covered = np.abs(score - eq_8(six_tokens)) < stdtrit(np.minimum(freedom, 1e6), 0.975) * error
    assert covered.mean() > 0.92


def test_the_standard_error_is_honest_where_masks_are_too_many_to_run_out():
    score, covered = [], []
    for seed in range(500):
        draws = monte_carlo.draw_masks(40, 160, seed)
        noise = np.random.default_rng([seed, 1]).normal(scale=5, size=len(draws.stratum))
        noise[np.isfinite(draws.population[draws.stratum])] = 0  # they would need noise that is the mask's own
        trend = draws.hidden.sum(1)
        found, error, freedom = monte_carlo.estimate((trend + noise)[None], draws)
        score.append(found[0])
        covered.append(abs(found[0] - 40 * 20.5) < stdtrit(freedom[0], 0.975) * error[0])
    assert np.mean(score) == pytest.approx(40 * 20.5, abs=4 * np.std(score) / math.sqrt(500))
    assert 0.91 < np.mean(covered) < 0.98  # 0.95 within 4 standard deviations of 500 coin tosses


def test_a_single_draw_does_not_claim_to_know_its_error(mdc):
    found = scoring.log_likelihood(mdc, images(1), random_captions(1), "monte_carlo", 1, return_details=True)
    assert found.standard_error.isinf().all() and (found.draws == 1).all()


@pytest.mark.parametrize("size, draws", [(8, 16), (24, 16), (40, 16), (12, 8), (10, 16), (77, 16), (3, 7), (14, 1024)])
def test_every_mask_count_is_expected_equally_often(size, draws):
    samples = [np.bincount(monte_carlo.systematic_sample(size, draws, k), minlength=size) for k in range(size)]
    assert (sum(samples) == draws).all()
    assert all(sample.max() - sample.min() <= 1 for sample in samples)


@pytest.mark.parametrize("num_tokens, num_samples", [(7, 1024), (12, 1024), (20, 1024), (20, 50), (77, 64)])
def test_draws_are_within_budget_and_prefixes_of_them_are_balanced(num_tokens, num_samples):
    draws = monte_carlo.draw_masks(num_tokens, num_samples)
    counts = draws.hidden.sum(1)
    assert len(counts) <= num_samples and (draws.stratum == counts - 1).all()
    for repeat in range(draws.repeat[-1]):
        sizes = np.bincount(counts[draws.repeat <= repeat], minlength=num_tokens + 1)[1:]
        assert (sizes <= repeat + 1).all()
    for n in range(1, num_tokens + 1):
        of_count = draws.hidden[counts == n]
        if math.comb(num_tokens, n) <= 16 * len(of_count):
            assert len(np.unique(of_count, axis=0)) == len(of_count)  # without replacement


@pytest.mark.parametrize("interval, counts", [((0.5, 1.0), (3, 4, 5, 6)), ((0.3, 0.6), (2, 3)), ((0.55, 0.6), (4,)),
                                              ((0.0, 0.2), (1,)), ((0.0, 1.0), (1, 2, 3, 4, 5, 6))])
def test_an_interval_draws_its_mask_counts_only_and_averages_them(mdc, six_tokens, interval, counts):
    found = scoring.log_likelihood(mdc, images(1), random_captions(1, [5], seed=3), "monte_carlo", interval=interval)
    assert found.item() == pytest.approx(eq_8(six_tokens, counts), rel=1e-5)
    rough = estimates(six_tokens, 5, seeds=1500, interval=interval)[:, 0]
    assert abs(rough.mean() - eq_8(six_tokens, counts)) <= 4 * rough.std() / math.sqrt(1500) + 1e-9


def test_candidates_of_equal_length_share_their_masks(mdc):
    image_kv = mdc.text.project_image(mdc.encode_image_tokens(images(1)))
    seen = []

    def record(lengths):
        token_logits = mdc.token_logits(image_kv, lengths)
        return lambda text, asked: seen.append(text == MASK) or token_logits(text, asked)

    with torch.no_grad():
        monte_carlo.monte_carlo(record, random_captions(3, [6]), V, num_samples=20, seed=5)
    first, second, third = torch.cat(seen).split(len(monte_carlo.draw_masks(7, 20, 5).hidden))
    assert (first == second).all() and (first == third).all()
    assert not np.array_equal(monte_carlo.draw_masks(7, 20, 5).hidden, monte_carlo.draw_masks(7, 20, 6).hidden)


def test_masks_of_different_lengths_are_independent():
    counts = [[monte_carlo.draw_masks(n, 1, seed).hidden.sum() for n in (40, 41)] for seed in range(300)]
    assert abs(np.corrcoef(np.array(counts).T)[0, 1]) < 4 / math.sqrt(300)


def test_early_stopping_decides_as_all_draws_do_with_a_fifth_of_them(mdc):
    image, text = images(20), random_captions(40, [7]).view(20, 2, 12)
    full = scoring.log_likelihood(mdc, image, text, "monte_carlo", 512, return_details=True)
    early = scoring.log_likelihood(mdc, image, text, "monte_carlo", 512, stop_confidence=0.999, return_details=True)
    assert (full.log_likelihood.argmax(1) == early.log_likelihood.argmax(1)).all()
    assert early.draws.sum() * 5 < 512 * 40
    unstopped = (early.draws == full.draws).all(1)
    assert torch.equal(early.log_likelihood[unstopped], full.log_likelihood[unstopped])


def test_early_stopping_drops_the_hopeless_and_goes_on_with_the_others(mdc):
    image, text = images(1), random_captions(40, [5, 6, 7], seed=2)[None]
    full = scoring.log_likelihood(mdc, image, text, "monte_carlo", 256, return_details=True)
    early = scoring.log_likelihood(mdc, image, text, "monte_carlo", 256, stop_confidence=0.99, return_details=True)
    assert full.log_likelihood.argmax() == early.log_likelihood.argmax()
    leader = early.log_likelihood.argmax()
    assert early.draws[0, leader] == early.draws.max() > early.draws.median()
    error = (early.standard_error ** 2 + full.standard_error ** 2).sqrt()
    assert ((early.log_likelihood - full.log_likelihood).abs() < 8 * error + 1e-4).all()


def test_early_stopping_of_equal_captions_never_claims_a_winner(mdc):
    text = random_captions(1, [6]).repeat(2, 1)[None]
    found = scoring.log_likelihood(mdc, images(1), text, "monte_carlo", 64, stop_confidence=0.9, return_details=True)
    assert found.log_likelihood[0, 0] == found.log_likelihood[0, 1]
    assert (found.draws == len(monte_carlo.draw_masks(7, 64).hidden)).all()


@pytest.mark.parametrize("lengths", [(8, 8, 8), (8, 8, 8, 8, 8), (8, 8, 6, 7)])
def test_the_winner_of_the_race_has_the_highest_score(lengths):
    # A mask moves the scores of all captions by much more than captions differ: the first masks may be lucky ones. The
    # first two are hard to tell apart and need more draws than the others, which are clearly worse and drop out early.
    text = torch.tensor([caption(*[word] * n, length=10) for word, n in enumerate(lengths, 1)])
    offset = torch.tensor([0.0, 0.01, *(4 - 33.5 / n for n in lengths[2:])])  # of a word: 1.5 nats worse, all in all
    early = 0
    for seed in range(40):
        of_mask = torch.from_numpy(np.random.default_rng(seed).uniform(-2, 2, 512))

        def token_logits(text, asked, of_mask=of_mask):
            code = ((text == MASK)[:, 1:] * 2 ** torch.arange(text.shape[1] - 1)).sum(1)
            value = (of_mask[code] - 4)[:, None] + offset + 0.3 * torch.sin(code[:, None] * torch.arange(len(offset)))
            logp = torch.full((len(text), V), -torch.inf)
            logp[:, 1:1 + len(lengths)] = value.float()
            logp[:, EOT] = -4
            logp[:, 0] = (1 - logp.exp().sum(1)).log()  # a word that no caption has takes the rest
            return logp[asked // text.shape[1]]

        found = monte_carlo.monte_carlo(lambda lengths: token_logits, text, V, 256, seed, stop_confidence=0.999)
        all_masks = monte_carlo.monte_carlo(lambda lengths: token_logits, text, V, 1024, seed)
        truth = all_masks.log_likelihood
        assert truth[found.log_likelihood.argmax()] > truth.max() - 0.5  # one of the two, which may be confused
        error = found.standard_error
        assert ((found.log_likelihood - truth).abs() < 6 * error + 1e-3).all()
        early += int(found.draws[2:].max() < found.draws.max())
    assert early > 10


def test_certainty_is_wrong_no_more_often_than_promised():
    # Each mask has its own difference between "1 1 ... 1" and "2 2 ... 2": mostly one value, seldom a much larger one,
    # as with swapped words. They are nearly balanced, so that early looks may well be deceived.
    stopped = wrong = 0
    text = torch.tensor([[SOT] + [word] * 8 + [EOT] for word in (1, 2)])
    codes = np.arange(1, 512)
    num_hidden = np.array([bin(code).count("1") for code in codes])
    for seed in range(200):
        rng = np.random.default_rng(seed)
        of_mask = rng.exponential(4, 512) * (rng.random(512) < 0.15) - 0.55

        def token_logits(text, asked, of_mask=of_mask):
            code = ((text == MASK)[:, 1:] * 2 ** torch.arange(9)).sum(1)
            logits = torch.zeros(len(asked), V)
            logits[:, 2] = torch.from_numpy(of_mask)[code].float()[asked // text.shape[1]]
            return logits

        # The last token is EOT for both and says nothing, so a mask of n tokens counts by its share of words.
        share = (num_hidden - (codes >= 256)) / num_hidden
        gap = sum((share * of_mask[1:])[num_hidden == n].mean() for n in range(1, 10))
        found = monte_carlo.monte_carlo(lambda lengths: token_logits, text, V, 256, seed, stop_confidence=0.95)
        if found.draws.max() < len(monte_carlo.draw_masks(9, 256, seed).hidden):
            stopped += 1
            wrong += int(found.log_likelihood.argmax() != int(gap > 0))
    assert stopped > 20
    assert wrong / 200 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


# ---- what scores do not depend on

ALL = [("mdc", "heuristic", {}), ("mdc", "monte_carlo", dict(num_samples=24)), ("arc", "autoregressive", {})]


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("objective, method, options", ALL)
def test_scores_depend_on_the_image_and_the_caption_alone(objective, method, options, mdc, arc):
    model = mdc if objective == "mdc" else arc
    image, text = images(3), random_captions(12).view(3, 4, 12)

    def score(image, text, **more):
        return scoring.log_likelihood(model, image, text, method, **options, **more)

    expected = score(image, text)
    assert expected.shape == (3, 4) and expected.dtype == torch.float32 and not close(expected, expected.flip(1))
    for b, c in itertools.product(range(3), range(4)):  # alone, as text [B, L]
        assert close(score(image[b:b + 1], text[b:b + 1, c]), expected[b, c])
    assert close(score(image.flip(0), text.flip(0, 1)).flip(0, 1), expected)  # other mates, other order
    assert not close(score(image.flip(0), text), expected)  # the image is looked at
    beyond = torch.cat([text, torch.zeros(3, 4, 5, dtype=torch.long)], dim=2)
    is_padding = torch.arange(17) >= (text == EOT).int().argmax(2)[..., None] + 1
    junk = torch.randint(0, V, beyond.shape, generator=torch.Generator().manual_seed(0))
    assert close(score(image, torch.where(is_padding, junk, beyond)), expected)  # any padding, beyond the context, too


@pytest.mark.parametrize("num_images, candidates", [(2, 40), (80, 1)])
@pytest.mark.parametrize("objective, method, options", ALL)
def test_decoder_calls_stay_within_the_budget_and_change_no_score(objective, method, options, num_images, candidates,
                                                                  mdc, arc, monkeypatch):
    model = mdc if objective == "mdc" else arc
    image, text = images(num_images), random_captions(80, range(3, 10)).view(num_images, candidates, 12)
    plain = scoring.log_likelihood(model, image, text, method, **options, memory_mib=512)
    calls = []
    original = Captioner.token_logits

    def record(self, image_kv, lengths):
        token_logits = original(self, image_kv, lengths)
        return lambda text, asked: calls.append((len(image_kv[0][0]), text.numel())) or token_logits(text, asked)

    monkeypatch.setattr(Captioner, "token_logits", record)
    image_bytes, token_bytes = 2 * 2 * 16 * 32 * 4, V * 12 + 16 * 32 * 4  # keys and values; logits and hidden states
    budget = 160_000
    monkeypatch.setattr(scoring, "MIB", budget)
    chunked = scoring.log_likelihood(model, image, text, method, **options, memory_mib=1)
    assert close(chunked, plain)
    used = [images * image_bytes + tokens * token_bytes for images, tokens in calls]
    assert budget / 2 < max(used) <= budget and len(calls) > 4


@pytest.mark.parametrize("objective, method, options", ALL)
def test_an_image_is_encoded_and_projected_once(objective, method, options, mdc, arc, monkeypatch):
    model = mdc if objective == "mdc" else arc
    encoded, projected = [], []
    encode, project = Captioner.encode_image_tokens, type(model.text).project_image
    monkeypatch.setattr(Captioner, "encode_image_tokens", lambda self, x: encoded.extend(x) or encode(self, x))
    monkeypatch.setattr(type(model.text), "project_image", lambda self, x: projected.extend(x) or project(self, x))
    scoring.log_likelihood(model, images(3), random_captions(60).view(3, 20, 12), method, **options, memory_mib=1)
    assert len(encoded) == len(projected) == 3


@pytest.mark.parametrize("objective, method, options", ALL)
def test_equal_candidates_get_equal_scores_and_are_scored_once(objective, method, options, mdc, arc, monkeypatch):
    model = mdc if objective == "mdc" else arc
    text = random_captions(5)[torch.tensor([[3, 1, 3, 0, 3, 1]])]
    text[0, 5, text[0, 5].tolist().index(EOT) + 1:] = 7  # other padding, same caption
    asked_for = []
    original = Captioner.token_logits

    def record(self, image_kv, lengths):
        token_logits = original(self, image_kv, lengths)
        return lambda text, asked: asked_for.append(len(asked)) or token_logits(text, asked)

    monkeypatch.setattr(Captioner, "token_logits", record)
    found = scoring.log_likelihood(model, images(1), text, method, **options, return_details=True)
    work = sum(asked_for)
    for field in found:
        if field is not None:
            assert torch.equal(field[:, 0], field[:, 2]) and torch.equal(field[:, 0], field[:, 4])
            assert torch.equal(field[:, 1], field[:, 5])
    assert found.log_likelihood.unique().numel() == 3
    asked_for.clear()
    scoring.log_likelihood(model, images(1), text[:, [0, 1, 3]], method, **options)
    assert sum(asked_for) == work


def test_details_have_the_shape_of_the_text(mdc, arc):
    text = random_captions(6, length=15).view(2, 3, 15)[:, :, :15]
    text = torch.where(torch.arange(15) < 12, text, 0)
    found = scoring.log_likelihood(mdc, images(2), text, return_details=True)  # heuristic by default
    assert found.token_log_likelihood.shape == found.order.shape == (2, 3, 15) and found.draws is None
    assert close(found.token_log_likelihood.sum(2), found.log_likelihood)
    assert torch.equal(found.order >= 0, found.token_log_likelihood != 0)
    found = scoring.log_likelihood(mdc, images(2), text[:, 0], "monte_carlo", 8, return_details=True)
    assert found.log_likelihood.shape == found.standard_error.shape == found.draws.shape == (2,)
    assert found.order is None and found.token_log_likelihood is None
    found = scoring.log_likelihood(arc, images(2), text[:, 0], return_details=True)  # autoregressive by default
    assert found.token_log_likelihood.shape == (2, 15) and found.order is None


def test_scoring_leaves_the_model_in_its_mode_and_builds_no_graph(mdc):
    mdc.train()
    found = scoring.log_likelihood(mdc, images(1), random_captions(1))
    assert mdc.training and not found.requires_grad
    mdc.eval()


# ---- blind

def test_the_blind_score_is_that_of_the_mean_image_whatever_the_image(mdc):
    seen, text = images(8), random_captions(6).view(2, 3, 12)
    blind = scoring.mean_image(mdc, seen.split(3))
    assert blind.shape == (16, 64)
    with torch.no_grad():
        assert torch.allclose(blind, mdc.encode_image_tokens(seen).mean(0), atol=1e-5)
    prior = scoring.log_likelihood(mdc, None, text, blind=blind)
    assert torch.equal(prior, scoring.log_likelihood(mdc, images(2), text, blind=blind))
    one = scoring.mean_image(mdc, [seen[:1]])  # the mean of one image is that image
    assert close(scoring.log_likelihood(mdc, None, text, blind=one),
                 scoring.log_likelihood(mdc, seen[:1].expand(2, -1, -1, -1), text))


def test_a_blind_score_is_no_race(mdc):
    with pytest.raises(ValueError, match="need all draws"):
        scoring.log_likelihood(mdc, None, random_captions(3)[None], "monte_carlo", stop_confidence=0.9,
                               blind=torch.zeros(16, 64))


def test_a_mean_of_no_images_is_refused(mdc):
    with pytest.raises(ValueError, match="at least one image"):
        scoring.mean_image(mdc, [])


# ---- refusals

@pytest.mark.parametrize("objective, options, message", [
    ("mdc", dict(method="autoregressive"), "choose 'heuristic' or 'monte_carlo'"),
    ("arc", dict(method="monte_carlo"), "choose 'autoregressive'"),
    ("arc", dict(method="heuristic"), "choose 'autoregressive'"),
    ("mdc", dict(method="exact"), "'exact' does not fit"),
    ("mdc", dict(method="heuristic", stop_confidence=0.9), "options of method 'monte_carlo'"),
    ("mdc", dict(method="heuristic", interval=(0.5, 1.0)), "options of method 'monte_carlo'"),
    ("mdc", dict(method="monte_carlo", num_samples=0), "num_samples must be at least 1"),
    ("mdc", dict(method="monte_carlo", interval=(0.6, 0.5)), "t_min <= t_max"),
    ("mdc", dict(method="monte_carlo", stop_confidence=1.0), "between 0 and 1"),
    ("mdc", dict(memory_mib=0), "takes 1 MiB"),
])
def test_options_that_do_not_fit_are_refused_in_one_line(mdc, arc, objective, options, message):
    with pytest.raises(ValueError, match=message) as error:
        scoring.log_likelihood(mdc if objective == "mdc" else arc, images(1), random_captions(1), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("broken", [[SOT, 1, 2, 3], [1, 2, EOT, 0], [0, 0, 0, 0]])
def test_a_caption_that_does_not_run_from_sot_to_eot_is_refused_by_its_place(mdc, broken):
    text = torch.tensor([[[SOT, 1, EOT, 0]] * 2, [[SOT, 2, EOT, 0], broken]])
    with pytest.raises(ValueError, match="candidate 1 of image 1"):
        scoring.log_likelihood(mdc, images(2), text)


def test_as_many_images_as_rows_of_captions(mdc):
    with pytest.raises(ValueError, match="captions of 2 images, but there are 3"):
        scoring.log_likelihood(mdc, images(3), random_captions(2))
