"""Claims about Eq. 8 by Monte Carlo: it is unbiased, its standard error is right, and so is early stopping."""
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import images
from likelihoods import EOT, MASK, SOT, V, caption, log_probs, random_captions, read
from scipy.special import stdtrit

from open_clip_mdc.likelihood import draws as drawing
from open_clip_mdc.likelihood import log_likelihood as scoring
from open_clip_mdc.likelihood import monte_carlo
from open_clip_mdc.likelihood import race as racing


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
    """Return the sum over n of the mean over all masks of n tokens. Over some counts only, it is N times their mean."""
    num_tokens = max(map(len, values))
    counts = counts or range(1, num_tokens + 1)
    return num_tokens * np.mean([np.mean([v for hidden, v in values.items() if len(hidden) == n]) for n in counts])


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 6])
def test_monte_carlo_with_a_budget_for_every_mask_is_eq_8_exactly(mdc, num_tokens):
    image, text = images(1), random_captions(2, [num_tokens - 1], seed=num_tokens)
    found = scoring.log_likelihood(mdc, image, text[None], "monte_carlo", num_samples=1024, return_details=True)
    for c, row in enumerate(text):
        assert found.log_likelihood[0, c].item() == pytest.approx(eq_8(mask_values(mdc, image[0], row)), rel=1e-5)
    assert (found.standard_error == 0).all()
    assert (found.draws == 2 ** num_tokens - 1).all()


def estimates(values, num_samples, seeds, interval=None):
    """Score and standard error for many seeds, [seeds, 2], from the values of all masks."""
    found = []
    for seed in range(seeds):
        draws = drawing.draw_masks(max(map(len, values)), num_samples, seed, interval)
        drawn = np.array([[values[tuple(hidden.nonzero()[0] + 1)] for hidden in draws.hidden]])
        found.append(np.concatenate(drawing.estimate(drawn, draws)))
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
    score, error = estimates(six_tokens, num_samples, seeds=1500).T
    stated, true = math.sqrt((error ** 2).mean()), math.sqrt(((score - eq_8(six_tokens)) ** 2).mean())
    assert stated > 0.93 * true  # 1500 seeds tell a standard deviation to about 2 %
    if num_samples >= 12:  # two draws of each count
        assert stated < 1.07 * true


def test_the_standard_error_is_honest_where_masks_are_too_many_to_run_out():
    score, covered = [], []
    for seed in range(500):
        draws = drawing.draw_masks(40, 160, seed)
        noise = np.random.default_rng([seed, 1]).normal(scale=5, size=len(draws.stratum))
        noise[np.isfinite(draws.population[draws.stratum])] = 0  # they would need noise that is the mask's own
        trend = draws.hidden.sum(1)
        found, error = drawing.estimate((trend + noise)[None], draws)
        score.append(found[0])
        covered.append(abs(found[0] - 40 * 20.5) < stdtrit(len(trend) - 40, 0.975) * error[0])
    assert np.mean(score) == pytest.approx(40 * 20.5, abs=4 * np.std(score) / math.sqrt(500))
    assert 0.91 < np.mean(covered) < 0.98  # 0.95 within 4 standard deviations of 500 coin tosses


def test_a_single_draw_does_not_claim_to_know_its_error(mdc):
    found = scoring.log_likelihood(mdc, images(1), random_captions(1), "monte_carlo", 1, return_details=True)
    assert found.standard_error.isinf().all() and (found.draws == 1).all()


@pytest.mark.parametrize("size, draws", [(8, 16), (24, 16), (40, 16), (12, 8), (10, 16), (77, 16), (3, 7), (14, 1024)])
def test_every_mask_count_is_expected_equally_often(size, draws):
    samples = [np.bincount(drawing.systematic_sample(size, draws, k), minlength=size) for k in range(size)]
    assert (sum(samples) == draws).all()
    assert all(sample.max() - sample.min() <= 1 for sample in samples)


@pytest.mark.parametrize("num_tokens, num_samples", [(7, 1024), (12, 1024), (20, 1024), (20, 50), (77, 64)])
def test_draws_are_within_budget_and_prefixes_of_them_are_balanced(num_tokens, num_samples):
    draws = drawing.draw_masks(num_tokens, num_samples)
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
        return lambda text, predicted: seen.append(text == MASK) or token_logits(text, predicted)

    with torch.no_grad():
        monte_carlo.monte_carlo(record, random_captions(3, [6]), V, num_samples=20, seed=5)
    first, second, third = torch.cat(seen).split(len(drawing.draw_masks(7, 20, 5).hidden))
    assert (first == second).all() and (first == third).all()
    assert not np.array_equal(drawing.draw_masks(7, 20, 5).hidden, drawing.draw_masks(7, 20, 6).hidden)


def test_masks_of_different_lengths_are_independent():
    counts = [[drawing.draw_masks(n, 1, seed).hidden.sum() for n in (40, 41)] for seed in range(300)]
    assert abs(np.corrcoef(np.array(counts).T)[0, 1]) < 4 / math.sqrt(300)


def test_a_race_that_is_not_stopped_has_the_scores_of_all_draws(mdc):
    image, text = images(20), random_captions(40, [7]).view(20, 2, 12)
    full = scoring.log_likelihood(mdc, image, text, "monte_carlo", 512, return_details=True)
    early = scoring.log_likelihood(mdc, image, text, "monte_carlo", 512, stop_confidence=0.999, return_details=True)
    assert (full.log_likelihood.argmax(1) == early.log_likelihood.argmax(1)).all()
    unstopped = (early.draws == full.draws).all(1)
    assert unstopped.any() and not unstopped.all()
    assert torch.equal(early.log_likelihood[unstopped], full.log_likelihood[unstopped])


def test_early_stopping_drops_the_hopeless_and_goes_on_with_the_others(mdc):
    image, text = images(1), random_captions(40, [5, 6, 7], seed=2)[None]
    full = scoring.log_likelihood(mdc, image, text, "monte_carlo", 256, return_details=True)
    early = scoring.log_likelihood(mdc, image, text, "monte_carlo", 256, stop_confidence=0.99, return_details=True)
    assert full.log_likelihood.argmax() == early.log_likelihood.argmax()
    assert early.draws.sum() < 0.8 * full.draws.sum()
    error = (early.standard_error ** 2 + full.standard_error ** 2).sqrt()
    assert ((early.log_likelihood - full.log_likelihood).abs() < 8 * error + 1e-4).all()


def test_early_stopping_of_equal_captions_never_claims_a_winner(mdc):
    text = random_captions(1, [6]).repeat(2, 1)[None]
    found = scoring.log_likelihood(mdc, images(1), text, "monte_carlo", 64, stop_confidence=0.9, return_details=True)
    assert found.log_likelihood[0, 0] == found.log_likelihood[0, 1]
    assert (found.draws == len(drawing.draw_masks(7, 64).hidden)).all()


@pytest.mark.parametrize("lengths", [(8, 8, 8), (8, 8, 8, 8, 8), (8, 8, 6, 7)])
def test_the_winner_of_the_race_has_the_highest_score(lengths):
    # A mask moves the scores of all captions by much more than captions differ: the first masks may be lucky ones. The
    # first two are hard to tell apart and need more draws than the others, which are clearly worse and drop out early.
    text = torch.tensor([caption(*[word] * n, length=10) for word, n in enumerate(lengths, 1)])
    offset = torch.tensor([0.0, 0.01, *(4 - 44 / n for n in lengths[2:])])  # of a word: 12 nats worse, all in all
    early = 0
    for seed in range(40):
        of_mask = torch.from_numpy(np.random.default_rng(seed).uniform(-2, 2, 512))

        def token_logits(text, predicted, of_mask=of_mask):
            code = ((text == MASK)[:, 1:] * 2 ** torch.arange(text.shape[1] - 1)).sum(1)
            value = (of_mask[code] - 4)[:, None] + offset + 0.3 * torch.sin(code[:, None] * torch.arange(len(offset)))
            logp = torch.full((len(text), V), -torch.inf)
            logp[:, 1:1 + len(lengths)] = value.float()
            logp[:, EOT] = -4
            logp[:, 0] = (1 - logp.exp().sum(1)).log()  # a word that no caption has takes the rest
            return logp[predicted // text.shape[1]]

        found = monte_carlo.monte_carlo(lambda lengths: token_logits, text, V, 256, seed, stop_confidence=0.999)
        all_masks = monte_carlo.monte_carlo(lambda lengths: token_logits, text, V, 1024, seed)
        truth = all_masks.log_likelihood
        assert truth[found.log_likelihood.argmax()] > truth.max() - 0.5  # one of the two, which may be confused
        error = found.standard_error
        assert ((found.log_likelihood - truth).abs() < 6 * error + 1e-3).all()
        early += int(found.draws[2:].max() < found.draws.max())
    assert early > 10


@pytest.mark.parametrize("kind", ["normal", "rare", "lone", "skewed"])
def test_certainty_is_wrong_no_more_often_than_promised(kind):
    # Caption c is word c eight times; each mask has a loss of its own for each of them, and the first caption is better
    # by 1 or 12 nats. Rare: a mask costs 8 nats more with a probability of 4 %; lone: but for the first caption.
    codes = np.arange(512)
    num_hidden = np.maximum(1, [code.bit_count() for code in codes])
    share = (num_hidden - (codes >= 256)) / num_hidden  # for words. EOT, the ninth token, has the same for all
    wrong, early = 0, {1: [], 12: []}
    for seed, candidates, behind in itertools.product(range(8), (2, 3, 5, 16), early):
        rng = np.random.default_rng([seed, candidates])
        shape = (candidates, 512)
        values = {"normal": -rng.normal(0, 0.5, shape), "skewed": -rng.lognormal(0, 1, shape)}.get(
            kind, -8.0 * (rng.random(shape) < 0.04)) - 4
        values[0] = values[0] if kind != "lone" else -4.3
        values[1:] -= behind / 8
        text = torch.tensor([[SOT] + [word] * 8 + [EOT] for word in range(1, candidates + 1)])

        def token_logits(text, predicted, values=values):
            code = ((text == MASK)[:, 1:] * 2 ** torch.arange(9)).sum(1)
            logp = torch.full((len(text), V), -torch.inf)
            logp[:, 1:1 + len(values)] = torch.from_numpy(values.T)[code].float()
            logp[:, EOT] = -4
            logp[:, 0] = (1 - logp.exp().sum(1)).log()  # a word that no caption has takes the rest
            return logp[predicted // text.shape[1]]

        found = monte_carlo.monte_carlo(lambda lengths: token_logits, text, V, 512, seed, stop_confidence=0.999,
                                        max_tokens=10 ** 6)
        truth = sum((share * values)[:, num_hidden == n][:, n == 1:].mean(1) for n in range(1, 10))
        num_draws = len(drawing.draw_masks(9, 512, seed).hidden)
        wrong += int(found.draws[truth.argmax()] < num_draws and found.log_likelihood.argmax() != truth.argmax())
        early[behind].append(found.draws.double().mean() / num_draws)
    assert wrong == 0  # of 64
    assert np.mean(early[12]) < 0.9 and np.mean(early[12]) < np.mean(early[1])


@pytest.mark.parametrize("lengths", [(5, 5), (12, 12), (12, 9), (5, 12)])
def test_the_mean_wealth_of_bets_on_a_level_race_is_no_more_than_1(lengths):
    # Losses mostly nothing and seldom much, and equal scores. Markov's inequality then keeps
    # the promise, whatever the losses' shape.
    tokens = np.array(lengths)
    rng = np.random.default_rng(0)
    of_mask = [-8.0 * (rng.random(2 ** n) < 0.05) for n in lengths]
    means = [np.mean([v[[c for c in range(1, 2 ** n) if c.bit_count() == k]].mean() for k in range(1, n + 1)])
             for v, n in zip(of_mask, lengths, strict=True)]
    target = min(means * tokens)
    of_mask = [v + (target - n * mean) / n for v, n, mean in zip(of_mask, lengths, means, strict=True)]
    wealth = []
    for seed in range(400):
        draws = [drawing.draw_masks(n, 20 * n, seed) for n in lengths]
        values = [v[d.hidden @ 2 ** np.arange(n)][:8 * n] for v, d, n in zip(of_mask, draws, lengths, strict=True)]
        wealth.append(np.exp(racing.log_evidence(values[0], values[1][None], *draws, worst=9.0)[0]))
    assert np.mean(wealth) < 1 + 4 * np.std(wealth) / 20 + 1e-6
    better = [of_mask[0] + 12 / lengths[0], of_mask[1]]
    values = [v[d.hidden @ 2 ** np.arange(n)] for v, d, n in zip(better, draws, lengths, strict=True)]
    assert racing.log_evidence(values[0], values[1][None], *draws, worst=9.0)[0] > math.log(1000)


def test_wealth_is_the_bet_times_the_score_where_all_masks_are_drawn_and_a_product_over_draws_elsewhere():
    values, bet = np.random.default_rng(0).normal(size=(2, 400)), np.array([0.3, 0.1])
    draws = drawing.draw_masks(5, 400)
    score = drawing.estimate(values[:, :31], draws)[0]
    assert racing.log_wealth(5 * values[:, :31], draws, bet) == pytest.approx(bet[:, None] * score)
    draws = drawing.draw_masks(20, 400)
    known = np.isin(draws.hidden.sum(1), (1, 19, 20))  # 20, 20 and 1 masks: all are drawn
    share = 20 * values[:, :len(known)] / 20 / np.bincount(draws.stratum)[draws.stratum]
    expected = [[math.prod(1 + b * x for x in row[~known]) * math.exp(b * row[known].sum()) for row in share]
                for b in bet]
    assert racing.log_wealth(20 * values[:, :len(known)], draws, bet) == pytest.approx(np.log(expected))


def race_alone(read, lengths, draws, *args):
    """One race, that reads (rows, masks) -> values."""
    return racing.run([racing.race(lengths, draws, *args)], lambda requests: [
        read(rows, draws[n].hidden[new]) for _, n, rows, new in requests])[0]


@pytest.mark.parametrize("factor, dropped", [(0.99, 0), (1.01, 4)])
def test_looks_and_rivals_share_the_error_probability(monkeypatch, factor, dropped):
    draws = drawing.draw_masks(20, 400)  # 20 of most counts: looks after 4, 8 and 16, and the last, which decides
    assert draws.repeat[-1] + 1 == 20
    monkeypatch.setattr(racing, "log_evidence",
                        lambda leader, rivals, *args: np.where((rivals == leader).all(1), 0.0, bar))
    bar = math.log(factor * 4 * 3 / 0.01)
    values = -np.arange(5.0)[:, None]
    _, _, used = race_alone(lambda rows, hidden: values[rows].repeat(len(hidden), 1), np.full(5, 20), {20: draws}, 0.99)
    assert (used < len(draws.stratum)).sum() == (5 if dropped else 0)


@pytest.mark.parametrize("guess, worst", [(2.0, 4.0), (9.0, 9.0)])
def test_no_draw_is_taken_to_lose_less_than_a_uniform_guess_or_the_worst_seen(monkeypatch, guess, worst):
    given = []
    monkeypatch.setattr(racing, "log_evidence",
                        lambda leader, rivals, *args: given.append(args[-1]) or np.zeros(len(rivals)))
    values = -np.arange(5.0)[:, None]
    race_alone(lambda rows, hidden: values[rows].repeat(len(hidden), 1), np.full(5, 20),
               {20: drawing.draw_masks(20, 400)}, 0.99, guess)
    assert set(given) == {worst}


def test_a_models_draw_is_taken_to_lose_a_uniform_guess_at_most(monkeypatch):
    given = []
    monkeypatch.setattr(racing, "log_evidence",
                        lambda leader, rivals, *args: given.append(args[-1]) or np.zeros(len(rivals)))
    logits = torch.zeros(V).index_fill(0, torch.tensor([1, 2, EOT]), 3.0)  # no token of the captions loses as much
    text = torch.tensor([caption(*[1] * 7), caption(*[2] * 7)])
    monte_carlo.monte_carlo(lambda lengths: lambda text, asked: logits.expand(len(asked), V), text, V, 400,
                            stop_confidence=0.9)
    assert set(given) == {math.log(V)}


def raced(monkeypatch, values, dropped, draws):
    """The race of rows of values, by draw, of which the looks drop these rows, whatever the evidence."""
    position, remaining, looks = 0, list(range(len(values))), iter(dropped)

    def read(rows, hidden):
        nonlocal position
        position += len(hidden)
        return values[rows, position - len(hidden):position]

    def evidence(leader, rivals, *args):
        lost = next(looks, None)
        found = np.where(np.array(remaining) == lost, math.inf, 0.0)
        if lost is not None:
            remaining.remove(lost)
        return found

    monkeypatch.setattr(racing, "log_evidence", evidence)
    return race_alone(read, np.full(len(values), 20), {20: draws}, 0.99)


@pytest.mark.parametrize("rival", [-2.0, -1.0])
def test_who_dropped_out_stays_as_far_behind_the_leader_as_it_was_however_that_one_goes_on(monkeypatch, rival):
    """The leader loses 1 nat per token in the first 4 draws of each mask count, then 9.

    One rival drops out before that.
    """
    draws = drawing.draw_masks(20, 400)
    early = draws.repeat < 4
    values = np.array([np.where(early, -1.0, -9.0), np.full(len(early), rival), np.where(early, -3.0, -9.5)])
    values = values + np.random.default_rng(0).normal(0, 0.1, len(early))  # of a mask, the same for all
    score, error, used = raced(monkeypatch, values, [1], draws)
    of_count = [values[0, draws.stratum == s].mean() for s in range(20)]
    assert score[0] == pytest.approx(20 * np.mean(of_count)) and score[0] < 20 * rival
    assert score[1] == pytest.approx(score[0] - 20 * (-1 - rival)) and score[1] < score[0]
    assert error[1] == pytest.approx(error[0]) and used.tolist() == [len(early), early.sum(), len(early)]


def test_who_fell_behind_a_leader_that_drops_out_itself_is_behind_both(monkeypatch):
    """Row 0 leads and drops row 2, then falls behind row 1, which continues with row 3. 20 masks have one draw."""
    draws = drawing.draw_masks(20, 400)
    first, second = draws.repeat < 4, draws.repeat < 8
    values = np.array([np.where(first, -1.0, -5.0), np.where(second, -2.0, -9.0), np.full(len(first), -2.5),
                       np.where(second, -4.0, -9.5)])
    score, error, used = raced(monkeypatch, values, [2, 0], draws)
    assert score[1] == pytest.approx(20 * np.mean([values[1, draws.stratum == s].mean() for s in range(20)]))
    assert score[0] == pytest.approx(score[1] - (19 * 1 - 1)) and score[2] == pytest.approx(score[0] - 20 * 1.5)
    assert used.tolist() == [second.sum(), len(first), first.sum(), len(first)]
    assert error[0] > error[1] and error[2] == error[0]  # row 0 was behind by a mean of draws, row 2 by a constant


def test_the_largest_share_of_a_draw_is_of_the_count_with_the_fewest_draws_that_leaves_masks_undrawn():
    stratum, repeat = np.array([0, 1, 2, 0, 1, 0]), np.array([0, 0, 0, 1, 1, 2])
    draws = drawing.Draws(np.zeros((6, 3), dtype=bool), stratum, repeat, np.array([math.inf, math.inf, 1.0]))
    assert [racing.largest_share(draws, n) for n in (6, 4, 3, 2)] == [1 / 3 / 2, 1 / 3, 1 / 3, math.inf]
    assert racing.largest_share(draws._replace(population=np.array([3.0, 2.0, 1.0])), 6) == 0
