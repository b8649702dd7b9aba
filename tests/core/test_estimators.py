"""Claims about Eq. 7 and the heuristic: likelihoods equal those of a naive loop, and of tables written by hand."""
import pytest
import torch
from conftest import images
from likelihoods import MASK, caption, log_probs, random_captions, read, reveal

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
    assert found.token_log_likelihood.shape == found.order.shape == (1, 3, 12) and found.draws is None
    for c, row in enumerate(text):
        row, valid = read(row)
        places, expected = zip(*reveal(row, MASK, lambda noisy, valid=valid: log_probs(
            mdc, image[0], noisy[None], valid)[0]), strict=True)
        assert found.order[0, c, list(places)].tolist() == list(range(len(row) - 1))
        assert found.token_log_likelihood[0, c, list(places)].tolist() == pytest.approx(expected, abs=1e-4)
        assert found.log_likelihood[0, c].item() == pytest.approx(sum(expected), abs=1e-4)
        assert found.order[0, c, 0] == -1 and (found.order[0, c, len(row):] == -1).all()


def test_finished_rows_leave_the_batch(mdc):
    network = mdc.network(mdc.encode_image_tokens(images(1)))
    seen = []  # how many tokens are read, and how many are asked for

    def count(lengths):
        return lambda text, predicted: seen.append((sum(lengths), len(predicted))) or network(lengths)(text, predicted)

    text = torch.tensor([caption(1, 2), caption(1, 2, 3, 4)])  # 4 and 6 tokens with SOT
    with torch.no_grad():
        estimators.heuristic(scoring.Call(mdc, count, text, 1, 24, "cpu"), None)
    assert seen == [(10, 8), (10, 6), (10, 4), (7, 2), (7, 1)]
