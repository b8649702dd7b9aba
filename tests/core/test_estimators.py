"""Claims about Eq. 7 and the heuristic: likelihoods equal those of a naive loop, and of tables written by hand."""
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import images
from likelihoods import MASK, SOT, V, caption, log_probs, random_captions, read

from open_clip_mdc.likelihood import exact as estimators
from open_clip_mdc.likelihood import log_likelihood as scoring


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
    def token_logits(text, predicted):
        places = [divmod(place, text.shape[1]) for place in predicted.tolist()]
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
    found = estimators.heuristic(even, torch.tensor([[2, 1, 0, 1, 3, 0], [2, 0, 3, 0, 0, 0]]), vocab_size=4)
    assert found.order.tolist() == [[-1, 0, 1, 2, 3, -1], [-1, 0, 1, -1, -1, -1]]
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
        return lambda text, predicted: tokens.append(sum(lengths)) or asked_for.append(len(predicted)) or \
            token_logits(text, predicted)

    with torch.no_grad():
        estimators.heuristic(count, torch.tensor([caption(1, 2), caption(1, 2, 3, 4)]), V)  # 4 and 6 tokens with SOT
    assert tokens == [10, 10, 10, 7, 7]
    assert asked_for == [8, 6, 4, 2, 1]
