"""Claims about masked image features in training (MC-Diffusion, Algorithm 1)."""
import math

import pytest
import torch
from conftest import TEXT, VISION, captions, images, seeded, tiny_captioner
from training import holds

from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.objectives.times import mask_condition

MASKED = dict(condition_drop=0.5, condition_mask=0.3)
ZEROS = dict(condition_drop=0.5, condition_mask=1.0, condition_zeros=True)


def test_images_are_chosen_and_of_these_features():
    masked = mask_condition((20000, 16), 0.3, 0.2, seeded(0))
    share = masked.float().mean(1)
    chosen = 0.3 * (1 - 0.8 ** 16)  # and at least one feature masked
    assert abs((share > 0).float().mean() - chosen) < 5 * math.sqrt(chosen * (1 - chosen) / 20000)
    assert abs(masked.float().mean() - 0.06) < 5 * math.sqrt((0.3 * (0.2 * 0.8 / 16 + 0.04) - 0.0036) / 20000)
    assert mask_condition((5, 16), 1.0, 1.0).all() and not mask_condition((5, 16), 0.0, 1.0).any()


def test_a_masked_feature_is_the_learnt_vector_or_zeros_after_the_tower():
    image, masked = images(3), torch.rand(3, 16, generator=seeded(0)) < 0.4
    for cfg, stands in ((MASKED, 7.0), (ZEROS, 0.0)):
        model = tiny_captioner("mcd", t_min=0.0, **cfg)
        if not model.caption_cfg.condition_zeros:
            model.no_patch.data.fill_(stands)
        plain, got = model.encode_image_tokens(image), model.encode_image_tokens(image, masked)
        assert torch.equal(got[~masked], plain[~masked])
        assert torch.equal(model.encode_image_tokens(None, masked, plain), got)  # the tower does not run again
        assert (got[masked] == stands).all() and masked.any() and not masked.all()


def test_masks_are_drawn_in_training_only_and_change_no_other_random_number():
    text = captions([5, 9, 12, 7] * 8)
    model, plain = tiny_captioner("mdc", **MASKED), tiny_captioner("mdc")
    own, other = model.state_dict(), plain.state_dict()
    assert holds(own, other) and own.keys() - other.keys() == {"no_patch"}  # zeros at first
    prepared = []
    for captioner in (model.train(), plain.train()):
        captioner.seed_t(0)
        torch.manual_seed(0)
        prepared.append(captioner.prepare(text))
    assert torch.equal(prepared[0].packed.token, prepared[1].packed.token) and prepared[1].masked is None
    assert prepared[0].masked.shape == (32, 16) and 0 < prepared[0].masked.float().mean() < 0.3
    assert model.eval().prepare(text).masked is None


@pytest.mark.parametrize("cfg", [MASKED, ZEROS], ids=["mcs", "cfg"])
def test_the_decoder_does_not_see_what_is_masked_and_its_vector_learns(cfg):
    model = tiny_captioner("mcd", t_min=0.0, **cfg).train()
    text, image = captions([5, 9, 12, 7]), images(4)
    prepared = model.prepare(text)
    blind = prepared._replace(masked=torch.ones(4, 16, dtype=torch.bool))
    assert torch.equal(model(image, blind)["token_nll"], model(images(4, seed=1), blind)["token_nll"])
    for masked in (blind.masked, torch.zeros_like(blind.masked)):
        model.zero_grad()
        CaptionLoss()(**model(image, prepared._replace(masked=masked))).backward()
        assert all(p.grad is not None for p in model.parameters())  # DDP waits for each, masked or not
        if not model.caption_cfg.condition_zeros:
            assert model.no_patch.grad.any() == masked.any()
    plain = tiny_captioner("mcd", t_min=0.0).train()
    unmasked = prepared._replace(masked=torch.zeros_like(blind.masked))
    assert torch.equal(model(image, unmasked)["token_nll"], plain(image, unmasked._replace(masked=None))["token_nll"])


def test_patches_that_are_dropped_in_training_are_not_missed():
    model = Captioner(64, VISION | dict(patch_dropout=0.5), TEXT, dict(objective="mdc", **MASKED)).train()
    CaptionLoss()(**model(images(2), captions([5, 9]))).backward()
    assert model.no_patch.grad is not None
