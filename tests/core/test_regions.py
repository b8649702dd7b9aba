"""Claims about region features."""
import pytest
import torch
from conftest import TEXT, VISION, captions, images

from open_clip_mdc.extras.regions import RegionTower
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.models import towers
from open_clip_mdc.models.towers import tower
from open_clip_mdc.objectives.loss import CaptionLoss

NATIVE = VISION | dict(image_size=16)
TIMM = dict(timm_model_name="vit_tiny_patch16_224", image_size=32)
DECODER = TEXT | dict(layers=1)
both = pytest.mark.parametrize("vision", [NATIVE, TIMM], ids=["native", "timm"])


def captioner(vision, **caption_cfg) -> Captioner:
    torch.manual_seed(0)
    model = Captioner(None, vision, DECODER, dict(objective="mdc", **caption_cfg)).eval()
    if vision is TIMM:
        model.visual.set_input_size(vision["image_size"])  # as create_model does
    return model


def test_a_grid_of_1_is_the_plain_tower():
    plain, one = captioner(NATIVE), captioner(NATIVE, regions=1)
    assert not isinstance(one.visual, RegionTower) and one.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(one.encode_image_tokens(images(2, 16)), plain.encode_image_tokens(images(2, 16)))


@both
@pytest.mark.parametrize("grid", [2, 3])
def test_tokens_are_those_of_the_same_tower_on_each_region_plus_its_embedding(vision, grid):
    model, side = captioner(vision, regions=grid), vision["image_size"]
    assert tuple(model.visual.image_size) == (grid * side, grid * side)
    image = images(2, grid * side)
    tokens = model.encode_image_tokens(image)
    assert tokens.shape[1] == (1 + grid ** 2) * 4 == tower(model.visual).num_patches
    regions = [region for band in image.split(side, 2) for region in band.split(side, 3)]
    for region, seen in enumerate([torch.nn.functional.interpolate(image, side, mode="area"), *regions]):
        expected = towers.patch_tokens(model.visual.tower, seen) + model.visual.region_embedding[region]
        torch.testing.assert_close(tokens[:, 4 * region:4 * region + 4], expected, rtol=1e-4, atol=1e-4)


@both
def test_a_captioner_of_regions_trains_whole_decodes_and_is_exempt_from_weight_decay_where_upstream_is(vision):
    model, image = captioner(vision, regions=2).train(), images(2, 2 * vision["image_size"])
    model.set_grad_checkpointing()
    CaptionLoss()(**model(image, captions([8, 12]))).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    assert model.generate(image, length=3).shape == (2, 5)
    exempt = model.no_weight_decay() & {name for name, _ in model.named_parameters()}
    position = "visual.tower.positional_embedding" if vision is NATIVE else "visual.tower.trunk.pos_embed"
    assert {"visual.region_embedding", position, "text.positional_embedding"} <= exempt


def test_the_locked_tower_of_regions_is_the_locked_tower():
    model = captioner(NATIVE, regions=2)
    model.lock_image_tower(unlocked_groups=1)
    free = {n for n, p in model.visual.named_parameters() if p.requires_grad}
    assert free == {n for n, _ in model.visual.named_parameters()
                    if "resblocks.1." in n or "ln_post" in n or n == "region_embedding"}
