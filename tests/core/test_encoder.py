"""Claims about image towers.    pytest tests/core/test_encoder.py"""
import open_clip
import pytest
import torch
from conftest import VOCAB, captions, images

import open_clip_mdc
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.objectives.loss import CaptionLoss

NATIVE = dict(image_size=32, patch_size=8, width=64, head_width=32, layers=2)
DECODER = dict(context_length=12, vocab_size=VOCAB, width=32, heads=2, layers=1)


def assert_normalised(tokens: torch.Tensor) -> None:
    """Before training, the last norm leaves mean 0 and variance 1 over the width."""
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(tokens.shape[:2]), atol=1e-2, rtol=0)
    torch.testing.assert_close(tokens.var(-1, unbiased=False), torch.ones(tokens.shape[:2]), atol=2e-2, rtol=0)


def assert_trains_whole(model: Captioner, image: torch.Tensor) -> None:
    """A parameter without a gradient stops DDP."""
    CaptionLoss()(**model(image, captions([8, 12]))).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize("base", ["ViT-B-16-SigLIP", "EVA02-B-16", "PE-Core-T-16-384", "ViTamin-S",
                                  "vit_relpos_medium_patch16_cls_224"])
def test_a_timm_tower_gives_all_its_patch_tokens_normalised_and_trains_whole(base):
    open_clip_mdc.register()
    config = open_clip.get_model_config("MDC-" + base)
    config.pop("custom_text")
    torch.manual_seed(0)
    model = Captioner(**config | dict(text_cfg=DECODER))
    image = images(2, model.visual.image_size[0])
    tokens = model.encode_image_tokens(image)
    assert tokens.shape[:2] == (2, (model.visual.image_size[0] // 16) ** 2)
    assert_normalised(tokens)
    assert_trains_whole(model, image)


@pytest.mark.parametrize("options", [
    dict(), dict(final_ln_after_pool=True), dict(final_ln_after_pool=True, no_ln_pre=True), dict(attentional_pool=True),
    dict(pool_type="tok"), dict(pool_type="none")])
def test_whatever_pools_for_clip_the_patch_tokens_are_normalised(options):
    """`final_ln_after_pool` (all CLIPA configs) would leave them without the last norm, and that norm without use."""
    torch.manual_seed(0)
    model = Captioner(64, NATIVE | options, DECODER, dict(objective="mdc"))
    assert_normalised(model.encode_image_tokens(images(2)))
    assert_trains_whole(model, images(2))


def test_patch_tokens_are_contiguous():
    """Else each of the decoder's layers copies them."""
    model = Captioner(64, NATIVE, DECODER, dict(objective="mdc"))
    assert model.encode_image_tokens(images(2)).is_contiguous()


@pytest.mark.parametrize("vision_cfg, said", [
    (dict(timm_model_name="resnet18", image_size=32), "resnet18"),
    (dict(layers=[1, 1, 1, 1], width=16, image_size=32), "ResNet")])
def test_a_tower_without_patch_tokens_is_refused(vision_cfg, said):
    with pytest.raises(ValueError, match=said) as error:
        Captioner(None, vision_cfg, DECODER, dict(objective="mdc"))
    assert "\n" not in str(error.value)


def test_lock_image_tower_counts_groups_from_the_last_that_a_captioner_has():
    """The last block with the norm after it, the one before, the rest: upstream's projection, of CLIP, is none."""
    model = Captioner(64, NATIVE, DECODER, dict(objective="mdc"))
    names = {n for n, _ in model.visual.named_parameters()}
    blocks = [set(), {n for n in names if "resblocks.1." in n or "ln_post" in n}]
    blocks += [blocks[1] | {n for n in names if "resblocks.0." in n}, names]
    for groups, expected in enumerate(blocks):
        model.lock_image_tower(unlocked_groups=groups)
        assert {n for n, p in model.visual.named_parameters() if p.requires_grad} == expected
        assert model.visual.proj is None


@pytest.mark.parametrize("base", ["ViT-B-16-SigLIP", "EVA02-B-16", "PE-Core-T-16-384", "ViTamin-S"])
def test_one_unlocked_group_of_a_timm_tower_has_something_to_train(base):
    open_clip_mdc.register()
    config = open_clip.get_model_config("MDC-" + base)
    config.pop("custom_text")
    model = Captioner(**config | dict(text_cfg=DECODER))
    counts = []
    for groups in (0, 1, 2):
        for parameter in model.visual.parameters():
            parameter.requires_grad = True
        model.lock_image_tower(unlocked_groups=groups)
        counts.append(sum(p.requires_grad for p in model.visual.parameters()))
    assert counts[0] == 0 < counts[1] < counts[2]


@pytest.mark.parametrize("vision_cfg, position", [
    (NATIVE, "visual.positional_embedding"),
    (dict(timm_model_name="vit_tiny_patch16_224", image_size=224), "visual.trunk.pos_embed")])
def test_positions_are_exempt_from_weight_decay_by_their_full_names(vision_cfg, position):
    model = Captioner(None, vision_cfg, DECODER, dict(objective="mdc"))
    exempt = model.no_weight_decay() & {name for name, _ in model.named_parameters()}
    assert {position, "text.positional_embedding"} <= exempt
