"""Claims about captions that the model's context cannot hold."""
import pytest
import torch
from conftest import LENGTH, VOCAB, captions, images, refused, tiny_captioner

from open_clip_mdc.text.special_tokens import mask_id


@pytest.mark.parametrize("objective, enter", [
    ("mdc", lambda model, image, text: model(image, text)),
    ("mdc", lambda model, image, text: model.logits(image, text)),
    ("mdc", lambda model, image, text: model.log_likelihood(image, text)),
    ("arc", lambda model, image, text: model.log_likelihood(image, text)),
    ("mdc", lambda model, image, text: model.generate(
        image, text=text.index_fill(1, torch.tensor([2]), mask_id(VOCAB)))),
])
def test_a_caption_longer_than_the_context_is_one_clear_line_wherever_it_enters(objective, enter):
    model, image = tiny_captioner(objective), images(2)
    said = refused(ValueError, enter, model, image, captions([5, LENGTH + 1], width=LENGTH + 1))
    assert "13 tokens" in said and "context of 12" in said
    enter(model, image, captions([5, LENGTH]))


def test_padding_beyond_the_context_is_no_caption():
    model, image, text = tiny_captioner(), images(2), captions([5, 9])
    wide = torch.nn.functional.pad(text, (0, 20))
    assert torch.equal(model.log_likelihood(image, wide), model.log_likelihood(image, text))
    masked = text.masked_fill(text == text[0, 2], mask_id(VOCAB))
    assert torch.equal(model.generate(image, text=torch.nn.functional.pad(masked, (0, 20))),
                       model.generate(image, text=masked))
