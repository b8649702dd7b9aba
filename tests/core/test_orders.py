"""Claims about both directions, prefixes and weights by the image.    pytest tests/core/test_orders.py"""
import pytest
import torch
from conftest import VOCAB, captions, images, tiny_captioner
from likelihoods import naive_decoder

from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.text.packing import NoisedCaptions, pack
from open_clip_mdc.text.special_tokens import sot_id

U = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)


def test_rows_of_both_directions_are_arc_and_its_mirror():
    """The mirror is a causal model that reads the caption from its end, with the positions turned as well."""
    model, arc = tiny_captioner("bicap"), tiny_captioner("arc")
    arc.load_state_dict(model.state_dict())
    text, image = captions([5, 9, 12]), images(3)
    with torch.no_grad():
        packed = pack(text, model.corrupt(text, U), VOCAB)
        found = model(image, packed)["token_nll"].split([4, 4, 8, 8, 11, 11])
        rightwards = arc(image, text)["token_nll"].split([4, 8, 11])
        for b, n in enumerate((5, 9, 12)):
            assert torch.allclose(found[2 * b], rightwards[b], atol=2e-6)
            mirror = tiny_captioner("bicap")
            mirror.text.positional_embedding[:n] = model.text.positional_embedding[:n].flip(0)
            ids = text[b, :n].flip(0)
            hidden, _ = naive_decoder(mirror.text, ids, model.encode_image_tokens(image[b:b + 1])[0], True)
            answers = ids[1:]
            expected = -model.text.output(hidden)[:-1].log_softmax(1).gather(1, answers[:, None])[:, 0]
            assert answers[-1] == sot_id(VOCAB) and torch.allclose(found[2 * b + 1].flip(0), expected, atol=2e-6)
    assert packed.num_target.tolist() == [4, 4, 8, 8, 11, 11]


def test_a_prefix_is_seen_whole_and_what_follows_is_read_from_left_to_right():
    model, text, image = tiny_captioner("prefix"), captions([5, 9, 12]), images(3)
    noised = model.corrupt(text, U)
    lasts = [int((1 - u) * n) for u, n in zip(U.tolist(), (4, 8, 11), strict=True)]  # 0, 4, 8
    assert noised.loss_mask.int().argmax(1).tolist() == lasts
    with torch.no_grad():
        found = model(image, pack(text, noised, VOCAB))["token_nll"].split([4, 4, 3])
        for b, (n, last) in enumerate(zip((5, 9, 12), lasts, strict=True)):
            relation = torch.tensor([[q >= k or max(q, k) <= last for k in range(n)] for q in range(n)])
            true = torch.ones(1, n, dtype=torch.bool)
            row = NoisedCaptions(text[b:b + 1, :n], true, true.float(), true, False, torch.zeros(1),
                                 text[b:b + 1, :n].roll(-1, 1), valid=true, sight=relation[None])
            each = model(image[b:b + 1], pack(text[b:b + 1, :n], row, VOCAB))["token_nll"]
            assert torch.allclose(found[b], each[last:n - 1], atol=2e-6)
    empty = model.corrupt(text, torch.ones(3, dtype=torch.float64))
    arc = tiny_captioner("arc")
    arc.load_state_dict(model.state_dict())
    assert torch.allclose(model(image, pack(text, empty, VOCAB))["token_nll"], arc(image, text)["token_nll"], atol=2e-6)


def test_a_word_weighs_what_the_image_tells_of_it_in_training_alone():
    model, text, image = tiny_captioner("visual"), captions([5, 9, 12]), images(3)
    prepared = model.prepare(text)
    embs = model.encode_image_tokens(image)
    blind = (-model.token_nll(embs.mean(0).expand_as(embs), prepared)).exp()
    assert torch.equal(model(image, prepared)["token_weight"], prepared.predicted.weight)
    found = model.train()(image, prepared)
    assert torch.allclose(found["token_weight"], prepared.predicted.weight * (1 - blind), atol=1e-6)
    assert not found["token_weight"].requires_grad
    CaptionLoss()(**found).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("objective", ["bicap", "prefix"])
def test_they_caption_and_score_as_arc_does(objective):
    model, arc, image = tiny_captioner(objective), tiny_captioner("arc"), images(3)
    arc.load_state_dict(model.state_dict())
    assert torch.equal(model.generate(image), arc.generate(image))
    text = captions([5, 9, 12])
    assert torch.equal(model.log_likelihood(image, text), arc.log_likelihood(image, text))
