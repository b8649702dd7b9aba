"""Claims about the parallel score: one pass for all captions of a length."""
import pytest
import torch
from conftest import captions, images, refused, tiny_captioner
from likelihoods import MASK, SOT, log_probs, random_captions, read

from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.likelihood.log_likelihood import decoder_passes, log_likelihood


def naive(model: Captioner, image: torch.Tensor, caption: torch.Tensor) -> torch.Tensor:
    """log p of each token of one caption [L], all of them masked, from logits at every position: [L]."""
    text, valid = read(caption)
    table = log_probs(model, image, torch.tensor([[SOT] + [MASK] * (len(text) - 1)]), valid)[0]
    found = torch.zeros(len(caption))
    for place in range(1, len(text)):
        found[place] = table[place, text[place]]
    return found


@pytest.mark.parametrize("objective", ["mdc", "mcd-replace"])
def test_the_score_is_that_of_each_caption_alone_with_all_tokens_masked(objective):
    model, image = tiny_captioner(objective), images(3)
    text = torch.stack([captions([5, 9, 5, 12, 2, 9], seed=b) for b in range(3)])
    found = log_likelihood(model, image, text, "parallel", return_details=True)
    expected = torch.stack([naive(model, image[b], row) for b in range(3) for row in text[b]]).view_as(text)
    assert torch.allclose(found.token_log_likelihood, expected, atol=2e-5)
    assert torch.allclose(found.log_likelihood, expected.sum(2), atol=5e-5)


def test_a_pass_serves_all_captions_of_an_image_and_a_length(monkeypatch):
    seen, original = [], Captioner.token_logits

    def record(self, image_kv, lengths):
        logits = original(self, image_kv, lengths)
        return lambda text, places: seen.append(int((text == MASK).sum())) or logits(text, places)

    monkeypatch.setattr(Captioner, "token_logits", record)
    text = random_captions(300, range(3, 10))  # N of 4 to 10, with EOT
    found = log_likelihood(tiny_captioner("mdc"), images(4), text.expand(4, -1, -1), "parallel")
    assert found.shape == (4, 300) and sum(seen) == 4 * sum(range(4, 11))
    passes = decoder_passes(tiny_captioner("mdc"), text, "parallel")
    assert passes.sum() == 7 and passes.max() == 1


@pytest.mark.parametrize("method", ["heuristic", "monte_carlo"])
def test_a_pass_serves_all_blocks_of_a_caption(method):
    model, calls = tiny_captioner("block-diffusion"), []
    model.text.register_forward_hook(lambda *_: calls.append(model))
    for n in range(2, 13):
        calls.clear()
        log_likelihood(model, images(1), captions([n]), method)
        assert decoder_passes(model, captions([n]), method) == len(calls), n


@pytest.mark.parametrize("objective", ["arc", "block-diffusion"])
def test_models_that_read_in_order_have_no_parallel_score(objective):
    said = refused(ValueError, log_likelihood, tiny_captioner(objective), images(1), captions([5]), "parallel")
    assert "'parallel' does not fit: this model reads captions" in said
