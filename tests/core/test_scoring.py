"""Claims about likelihoods of many candidates: they do not depend on the batch, and bad inputs are refused."""
from functools import cache

import pytest
import torch
from conftest import images, magnified, refused
from hypothesis import given
from hypothesis import strategies as st
from likelihoods import EOT, SOT, V, caption, random_captions
from strategies import examples

from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.likelihood import log_likelihood as scoring
from open_clip_mdc.models.foreign.base import ForeignCaptioner

every_method = pytest.mark.parametrize("objective, method, options", [
    ("mdc", "heuristic", {}), ("mdc", "parallel", {}), ("mdc", "monte_carlo", dict(num_samples=24)),
    ("arc", "autoregressive", {}), ("mix", "autoregressive", {}), ("mcd-replace", "bound", dict(num_samples=24))])
model_of = cache(magnified)


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-3)


@every_method
@examples(15)
@given(data=st.data())
def test_scores_depend_on_the_image_and_the_caption_alone(objective, method, options, data):
    """Not on the others of the batch, their number and order, the memory, or what stands behind EOT."""
    model, image, text = model_of(objective), images(3), random_captions(12).view(3, 4, 12)

    def score(image, text, **more):
        return scoring.log_likelihood(model, image, text, method, **options, **more)

    expected = score(image, text)
    assert expected.shape == (3, 4) and expected.dtype == torch.float32 and len(expected.unique()) == 12
    rows = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    columns = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    wide = torch.nn.functional.pad(text, (0, 5))[rows][:, columns]
    ended = (wide == EOT).cumsum(2) - (wide == EOT).int()
    wide = torch.where(ended.bool(), torch.randint(0, V, wide.shape), wide)
    found = score(image[rows], wide, memory_mib=data.draw(st.sampled_from((1, 512))))
    assert close(found, expected[rows][:, columns])
    assert close(score(image[rows], wide[:, 0]), expected[rows, columns[0]])  # text [B, L]
    assert not close(score(image[rows].flip(-1), wide), found)  # the image is looked at


@pytest.fixture
def calls(monkeypatch):
    """Images, tokens and predicted tokens of each call of the decoder from now on."""
    seen, original = [], Captioner.token_logits

    def record(self, image_kv, lengths, **reading):
        def token_logits(text, predicted, *time):
            seen.append((len(image_kv[0][0]), text.numel(), len(predicted)))
            return logits(text, predicted, *time)
        logits = original(self, image_kv, lengths, **reading)
        return token_logits

    monkeypatch.setattr(Captioner, "token_logits", record)
    return seen


def predictions(calls) -> int:
    """Forgets the calls that it counts."""
    work = sum(predicted for _, _, predicted in calls)
    calls.clear()
    return work


@pytest.mark.parametrize("num_images, candidates", [(2, 40), (80, 1)])
@every_method
def test_decoder_calls_stay_within_the_budget_and_change_no_score(objective, method, options, num_images, candidates,
                                                                  calls, monkeypatch):
    model, image = model_of(objective), images(num_images)
    text = random_captions(80, range(3, 10)).view(num_images, candidates, 12)
    plain = scoring.log_likelihood(model, image, text, method, **options, memory_mib=512)
    calls.clear()
    image_bytes, token_bytes = 2 * 2 * 16 * 32 * 4, V * 12 + 16 * 32 * 4  # keys and values, then logits and states
    budget = 160_000
    monkeypatch.setattr(scoring, "MIB", budget)
    chunked = scoring.log_likelihood(model, image, text, method, **options, memory_mib=1)
    assert close(chunked, plain)
    used = [images * image_bytes + tokens * token_bytes for images, tokens, _ in calls]
    assert max(used) <= budget and len(calls) > 3
    assert method == "parallel" or budget / 2 < max(used)  # it has few texts to read


@every_method
def test_an_image_is_encoded_and_projected_once(objective, method, options, monkeypatch):
    model = model_of(objective)
    encoded, projected = [], []
    encode, project = Captioner.encode_image_tokens, type(model.text).project_image
    monkeypatch.setattr(Captioner, "encode_image_tokens", lambda self, x: encoded.extend(x) or encode(self, x))
    monkeypatch.setattr(type(model.text), "project_image", lambda self, x: projected.extend(x) or project(self, x))
    scoring.log_likelihood(model, images(3), random_captions(60).view(3, 20, 12), method, **options, memory_mib=1)
    assert len(encoded) == len(projected) == 3


@every_method
def test_equal_candidates_get_equal_scores_and_are_scored_once(objective, method, options, calls):
    text = random_captions(5)[torch.tensor([[3, 1, 3, 0, 3, 1]])]
    text[0, 5, text[0, 5].tolist().index(EOT) + 1:] = 7  # other padding, same caption
    found = scoring.log_likelihood(model_of(objective), images(1), text, method, **options, return_details=True)
    work = predictions(calls)
    for field in filter(torch.is_tensor, found):
        assert torch.equal(field[:, [0, 0, 1]], field[:, [2, 4, 5]])
    assert found.log_likelihood.unique().numel() == 3
    scoring.log_likelihood(model_of(objective), images(1), text[:, [0, 1, 3]], method, **options)
    assert predictions(calls) == work


@pytest.mark.parametrize("objective, method", [("mdc", "heuristic"), ("mdc", "monte_carlo"), ("arc", "autoregressive")])
def test_what_captions_of_an_image_agree_in_is_read_once(objective, method, calls):
    """Ten prompts of an image differ in one word. The other image has prompts of two lengths."""
    model, image = model_of(objective), images(2)
    text = torch.tensor([[caption(1, 2, 3, 4, word, 6) for word in range(10, 20)],
                         [caption(7, word, *[9] * (4 + word % 2), 8, padding=word) for word in range(10, 20)]])
    together = scoring.log_likelihood(model, image, text, method, return_details=True)
    read = predictions(calls)
    alone = [scoring.log_likelihood(model, image, one, method, return_details=True) for one in text.split(1, 1)]
    assert read < 0.7 * predictions(calls)
    for found, own in zip(together, zip(*alone, strict=True), strict=True):
        assert found is None or close(found.double(), torch.cat(own, 1).double())
    assert len(together.log_likelihood.unique()) == 20


def test_a_foreign_decoder_reads_captions_alone():
    class Counts(ForeignCaptioner):
        def logits(self, tokens, text):
            return torch.nn.functional.one_hot(text, V).cumsum(1).float()

    text = torch.tensor([[caption(1, 2, 3, 4, word) for word in range(10, 15)]])
    model, seen = Counts(torch.nn.Linear(1, 1), V, 12, 8), torch.zeros(1, 2, 8)
    alone = [scoring.log_likelihood(model, seen, one) for one in text.split(1, 1)]
    assert close(scoring.log_likelihood(model, seen, text), torch.cat(alone, 1))


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


def test_the_mean_of_many_images_is_of_float32():
    class Half:
        def encode_image_tokens(self, image):
            return torch.full((len(image), 2, 3), 300.0, dtype=torch.float16)

    assert (scoring.mean_image(Half(), [images(2)] * 200) == 300).all()  # their sum is beyond float16


# ---- refusals


@pytest.mark.parametrize("broken", [[SOT, 1, 2, 3], [1, 2, EOT, 0], [0, 0, 0, 0]])
def test_a_caption_that_does_not_run_from_sot_to_eot_is_refused_by_its_place(mdc, broken):
    text = torch.tensor([[[SOT, 1, EOT, 0]] * 2, [[SOT, 2, EOT, 0], broken]])
    assert "candidate 1 of image 1" in refused(ValueError, scoring.log_likelihood, mdc, images(2), text)
