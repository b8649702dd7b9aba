"""Claims about likelihoods of many candidates: they do not depend on the batch, and bad inputs are refused."""
import itertools
from functools import partial

import pytest
import torch
from conftest import captions, images, tiny_captioner
from likelihoods import EOT, SOT, V, random_captions

from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.likelihood import log_likelihood as scoring
from open_clip_mdc.likelihood import monte_carlo
from open_clip_mdc.likelihood import replace_bound as bound

ALL = [("mdc", "heuristic", {}), ("mdc", "monte_carlo", dict(num_samples=24)), ("arc", "autoregressive", {})]


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("objective, method, estimator", [("mdc", "monte_carlo", monte_carlo.monte_carlo),
                                                          ("mcd-replace", "bound", bound.bound)])
def test_options_reach_the_estimator(objective, method, estimator):
    model, image, text = tiny_captioner(objective), images(1), captions([7, 9])
    network = partial(model.token_logits, model.text.project_image(model.encode_image_tokens(image)))
    fixed = {"schedule": model.objective.schedule} if method == "bound" else {}
    cases = [dict(num_samples=9), dict(num_samples=9, seed=5)] + [
        dict(num_samples=9, interval=(0.5, 0.5))] * (not fixed)
    found = [scoring.log_likelihood(model, image, text[None], method, **case) for case in cases]
    with torch.no_grad():
        for case, scores in zip(cases, found, strict=True):
            assert close(scores[0], estimator(network, text, V, **case, **fixed).log_likelihood)
    assert len({tuple(scores[0].tolist()) for scores in found}) == len(cases)


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
        return lambda text, places: calls.append((len(image_kv[0][0]), text.numel())) or token_logits(text, places)

    monkeypatch.setattr(Captioner, "token_logits", record)
    image_bytes, token_bytes = 2 * 2 * 16 * 32 * 4, V * 12 + 16 * 32 * 4  # keys and values, then logits and states
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
        return lambda text, predicted: asked_for.append(len(predicted)) or token_logits(text, predicted)

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


def test_the_mean_of_many_images_is_of_float32():
    class Half:
        def encode_image_tokens(self, image):
            return torch.full((len(image), 2, 3), 300.0, dtype=torch.float16)

    assert (scoring.mean_image(Half(), [images(2)] * 200) == 300).all()  # their sum is beyond float16


# ---- refusals


@pytest.mark.parametrize("broken", [[SOT, 1, 2, 3], [1, 2, EOT, 0], [0, 0, 0, 0]])
def test_a_caption_that_does_not_run_from_sot_to_eot_is_refused_by_its_place(mdc, broken):
    text = torch.tensor([[[SOT, 1, EOT, 0]] * 2, [[SOT, 2, EOT, 0], broken]])
    with pytest.raises(ValueError, match="candidate 1 of image 1"):
        scoring.log_likelihood(mdc, images(2), text)
