"""Claims about the maps of words over images."""
import numpy as np
import pytest
import torch
from conftest import images, seeded, tiny_captioner
from likelihoods import naive_decoder
from sklearn.decomposition import PCA

from open_clip_mdc.decoding.attention_maps import principal_components, word_maps
from open_clip_mdc.text.special_tokens import mask_id, sot_id


@pytest.mark.parametrize("objective, options", [
    ("mdc", dict(length=4, tokens_per_step=2)), ("arc", dict(length=4)),
    ("mdc", dict(text=torch.tensor([[sot_id(60), 5, mask_id(60), 7, mask_id(60), 59]])))])  # given ones have no map
@torch.no_grad()
def test_attention_is_softmax_of_queries_and_keys_when_the_word_appeared(objective, options):
    model, image = tiny_captioner(objective), images(2)
    found = model.generate(image, return_trace=True, **options)
    for b, maps in enumerate(word_maps(model, image, found)):
        step, text = found.step[b], found.text[b]
        assert maps.position.tolist() == [i for i, s in enumerate(step.tolist()) if s >= 0]
        assert len(maps.attention) == len(maps.position)
        assert torch.allclose(maps.attention.sum(-1), torch.ones(maps.attention.shape[:-1]), atol=1e-6)
        length = int((text == model.vocab_size - 1).nonzero()[0]) + 1
        for t, p in enumerate(maps.position.tolist()):
            then = text[:length].clone()
            if not model.causal:
                then[step[:length] >= step[p]] = mask_id(model.vocab_size)
            patches = model.encode_image_tokens(image[b:b + 1])[0]
            expected = naive_decoder(model.text, then, patches, model.causal)[1][:, :, p - int(model.causal)]
            assert torch.allclose(maps.attention[t], expected, atol=1e-5)
    assert not any(block.cross_q._forward_hooks for block in model.text.blocks)


def test_principal_components_are_scikit_learns_up_to_sign():
    tokens = torch.randn(3, 16, 8, generator=seeded(0)) * torch.linspace(1, 3, 8)
    found = principal_components(tokens).flatten(0, 1).numpy()
    expected = PCA(3, whiten=True).fit_transform(tokens.flatten(0, 1).numpy())
    expected *= (48 / 47) ** 0.5  # it divides by N - 1
    assert np.allclose(np.abs(found), np.abs(expected), atol=1e-4)
    assert np.allclose(found, principal_components(tokens.clone()).flatten(0, 1).numpy())
