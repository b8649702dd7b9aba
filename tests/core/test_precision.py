"""Claims about autocast: the decoder's blocks follow it, logits are float32, and captions and scores stay close."""
import copy

import pytest
import torch
from conftest import VOCAB, captions, images, tiny_captioner

from open_clip_mdc.decoding.attention_maps import word_maps
from open_clip_mdc.likelihood import log_likelihood as scoring
from open_clip_mdc.models.precision import with_cast_blocks
from open_clip_mdc.text.packing import pack_tokens
from open_clip_mdc.text.special_tokens import valid_tokens

PRECISIONS = [(torch.bfloat16, 0.02), (torch.float16, 0.003)]  # nats a token by which rounding may move a score


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


def with_and_without(dtype, call, *args, **options):
    """Return what a call returns without autocast and with it."""
    for enabled in (False, True):
        with torch.autocast("cpu", dtype, enabled):
            yield call(*args, **options)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("objective, method", [("mdc", "heuristic"), ("mdc", "monte_carlo"), ("arc", "autoregressive")])
def test_scores_under_autocast_are_those_of_float32(objective, method, dtype, tolerance):
    model, image, text = captioner(objective), images(8), captions([4, 6, 8, 10, 12] * 8).view(8, 5, -1)
    expected, found = with_and_without(dtype, scoring.log_likelihood, model, image, text, method, num_samples=64,
                                       return_details=True)
    assert found.log_likelihood.dtype == torch.float32
    tokens = torch.tensor([3, 5, 7, 9, 11])
    assert ((found.log_likelihood - expected.log_likelihood) / tokens).abs().max() < tolerance
    assert not torch.equal(found.log_likelihood, expected.log_likelihood)  # autocast was on
    if method == "heuristic":
        assert (found.order != expected.order).any(-1).sum() <= (8 if dtype == torch.bfloat16 else 1)  # of 40 captions


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("objective, other", [("mdc", 1), ("arc", 0)])
def test_captions_under_autocast_are_the_same_at_the_same_steps(objective, other, dtype, tolerance):
    expected, found = with_and_without(dtype, captioner(objective).generate, images(16), length=8, return_trace=True)
    same = (found.text == expected.text).all(1)
    assert same.sum() >= 16 - other and (found.step != expected.step)[same].any(1).sum() <= other  # of 16 captions
    assert (found.log_prob - expected.log_prob)[same].sum(1).abs().max() < 8 * tolerance


def test_outside_training_the_blocks_follow_autocast_and_the_logits_do_not():
    model, image, text = tiny_captioner(), images(2), captions([4, 5])
    packed = pack_tokens(text, valid_tokens(text, VOCAB), False)
    image_embs = model.encode_image_tokens(image)

    def decode():
        image_kv = model.text.project_image(image_embs)
        hidden = model.text(packed, image_kv)
        return image_kv[0][0], hidden, model.text.output(hidden)

    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            assert [x.dtype for x in decode()] == [torch.bfloat16, torch.float32, torch.float32]
        assert {x.dtype for x in decode()} == {torch.float32}  # copies would keep the gradients for themselves
        model.train()
        for grad in (True, False):  # --accum-freq runs a step without gradients first
            with torch.set_grad_enabled(grad):
                image_kv, hidden, logits = decode()
                assert image_kv.dtype == logits.dtype == torch.bfloat16
        with torch.inference_mode():  # scoring leaves the model in its mode
            assert model.text.output(torch.randn(3, 32)).dtype == torch.float32


def test_maps_of_attention_are_float32_whatever_autocast_says():
    model, image = tiny_captioner(), images(2)
    found = model.generate(image, length=3, return_trace=True)
    plain, low = with_and_without(torch.bfloat16, word_maps, model, image, found)
    for a, b in zip(low, plain, strict=True):
        assert a.attention.dtype == torch.float32
        torch.testing.assert_close(a.attention, b.attention, atol=0.01, rtol=0.05)  # the image was encoded in 8 bits


@torch.no_grad()
def test_blocks_are_cast_once_and_again_when_their_weights_have_changed():
    model, image = tiny_captioner(), images(2)

    def cast():
        with torch.autocast("cpu", torch.bfloat16):
            model.generate(image, length=3)
            return with_cast_blocks(model.text, torch.bfloat16).blocks[1].self_qkv.weight

    first, names, weight = cast(), list(model.state_dict()), model.text.blocks[1].self_qkv.weight
    assert cast() is first and first.dtype == torch.bfloat16
    weight.mul_(2)
    second = cast()
    assert torch.equal(second, 2 * first)
    model.load_state_dict(tiny_captioner(seed=1).state_dict())
    third = cast()
    assert not torch.equal(third, second)
    model.train()
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], 0.1, fused=True).step()  # it raises no version
    assert not torch.equal(cast(), third)
    assert list(model.state_dict()) == names and all(p.dtype == torch.float32 for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(copy.deepcopy(model).generate(image, length=3), model.generate(image, length=3))


def test_float32_products_may_be_tf32_where_autocast_is_on_and_there_alone(monkeypatch):
    model, seen = tiny_captioner(), []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args, linear=torch.nn.functional.linear: seen.append(
        torch.backends.cuda.matmul.allow_tf32) or linear(*args))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.text.output(torch.randn(3, 32))
    model.text.output(torch.randn(3, 32))
    assert seen == [True, False] and not torch.backends.cuda.matmul.allow_tf32
