"""Claims about autocast: it decides neither the order in which tokens are revealed nor what a caption's score is."""
import pytest
import torch
from conftest import VOCAB, captions, images, tiny_captioner

from open_clip_mdc.decoding.attention_maps import word_maps
from open_clip_mdc.likelihood import log_likelihood as scoring
from open_clip_mdc.text.packing import pack_tokens
from open_clip_mdc.text.special_tokens import valid_tokens

PRECISIONS = [(torch.bfloat16, 0.05), (torch.float16, 0.01)]  # nats by which the hidden states' rounding moves a score


def captioner(objective):
    """All logits of a place have a large part in common: softmax does not see it, but it takes up a 16-bit number.

    The places differ, and context and image matter to them, but less than in an untrained model.
    """
    model = tiny_captioner(objective)
    with torch.no_grad():
        torch.nn.init.normal_(model.text.positional_embedding)
        model.text.output.weight[:, 0] += 64
        model.text.ln_final.bias[0] = 2
        for block in model.text.blocks:
            for linear in (block.self_out, block.cross_out, block.mlp.c_proj):
                linear.weight *= 0.3
    return model


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("objective, method", [("mdc", "heuristic"), ("mdc", "monte_carlo"), ("arc", "autoregressive")])
def test_scores_under_autocast_are_those_of_float32(objective, method, dtype, tolerance):
    model, image, text = captioner(objective), images(8), captions([4, 6, 8, 10, 12] * 8).view(8, 5, -1)
    expected = scoring.log_likelihood(model, image, text, method, num_samples=64, return_details=True)
    with torch.autocast("cpu", dtype):
        found = scoring.log_likelihood(model, image, text, method, num_samples=64, return_details=True)
    assert found.log_likelihood.dtype == torch.float32
    assert (found.log_likelihood - expected.log_likelihood).abs().max() < tolerance
    assert not torch.equal(found.log_likelihood, expected.log_likelihood)  # autocast was on
    if method == "heuristic":
        assert (found.order != expected.order).any(-1).sum() <= 1  # of 40 captions


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_unmasking_under_autocast_reveals_the_same_tokens_at_the_same_steps(dtype, tolerance):
    model, image = captioner("mdc"), images(16)
    expected = model.generate(image, length=8, return_trace=True)
    with torch.autocast("cpu", dtype):
        found = model.generate(image, length=8, return_trace=True)
    assert torch.equal(found.text, expected.text)
    assert (found.step != expected.step).any(1).sum() <= 1  # of 16 captions
    assert (found.log_prob - expected.log_prob).sum(1).abs().max() < tolerance


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_beam_search_under_autocast_finds_the_same_captions(dtype, tolerance):
    model, image = captioner("arc"), images(16)
    expected = model.generate(image, length=8, return_trace=True)
    with torch.autocast("cpu", dtype):
        found = model.generate(image, length=8, return_trace=True)
    assert torch.equal(found.text, expected.text)
    assert (found.log_prob - expected.log_prob).sum(1).abs().max() < tolerance


def test_only_training_steps_run_the_decoder_in_low_precision():
    model, image, text = tiny_captioner(), images(2), captions([4, 5])
    with torch.autocast("cpu", torch.bfloat16):
        image_embs = model.encode_image_tokens(image)
        found = model.generate(image, length=3, return_trace=True)
        maps = word_maps(model, image, found)

        def decode():
            image_kv = model.text.project_image(image_embs)
            hidden = model.text(pack_tokens(text, valid_tokens(text, VOCAB), False), image_kv)
            return image_embs, image_kv[0][0], model.text.blocks[0].self_out(hidden), model.text.output(hidden)

        assert [x.dtype for x in decode()] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
        model.train()
        for grad in (True, False):  # --accum-freq runs a step without gradients first
            with torch.set_grad_enabled(grad):
                assert {x.dtype for x in decode()} == {torch.bfloat16}
        with torch.inference_mode():  # scoring leaves the model in its mode
            assert model.text.output(torch.randn(3, 32)).dtype == torch.float32
        for a, b in zip(maps, word_maps(model, image, found), strict=True):  # and so do maps
            assert torch.equal(a.attention, b.attention)
