"""Claims about image towers."""
import json
import re

import open_clip
import pytest
import torch
from conftest import TEXT, VISION, captions, images
from open_clip.model import CLIPVisionCfg

import open_clip_mdc
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.models import towers
from open_clip_mdc.models.towers import tower
from open_clip_mdc.objectives.loss import CaptionLoss

DECODER = TEXT | dict(layers=1)


@pytest.mark.parametrize("options", [
    dict(), dict(final_ln_after_pool=True), dict(final_ln_after_pool=True, no_ln_pre=True), dict(attentional_pool=True),
    dict(pool_type="tok"), dict(pool_type="none")])
def test_whatever_pools_for_clip_the_patch_tokens_are_normalised(options):
    """`final_ln_after_pool` (all CLIPA configs) would leave them without the last norm, and that norm without use."""
    torch.manual_seed(0)
    model = Captioner(64, VISION | options, DECODER, dict(objective="mdc"))
    tokens = model.encode_image_tokens(images(2))
    # Before training, the last norm leaves mean 0 and variance 1 over the width.
    assert tokens.mean(-1).abs().max() < 1e-2 and (tokens.var(-1, unbiased=False) - 1).abs().max() < 2e-2
    CaptionLoss()(**model(images(2), captions([8, 12]))).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]  # it would stop DDP


def test_every_image_tower_of_openclip_gives_tokens_and_has_no_parameter_too_much():
    """On tensors without data. A tower of timm is looked at once, whatever its size and that of its images."""
    open_clip_mdc.register()
    found = {}
    for base in open_clip.list_models():
        config = open_clip.get_model_config("MDC-" + base)
        if config is not None:
            vision_cfg = config["vision_cfg"]
            name = vision_cfg.get("timm_model_name") or json.dumps(vision_cfg, sort_keys=True)
            found.setdefault(re.sub(r"_(\d+$|patch\d+|tiny|small|base|x*large2?|so400m)", "", name), vision_cfg)
    kinds = set()
    for name, vision_cfg in found.items():
        with torch.device("meta"):
            visual = towers.build(CLIPVisionCfg(**vision_cfg))  # which ends where a tower gives no tokens
        kind = type(getattr(visual, "trunk", visual))
        if kind in kinds:
            continue
        kinds.add(kind)
        size = visual.image_size if isinstance(visual.image_size, tuple) else (visual.image_size,) * 2
        tokens = towers.patch_tokens(visual, torch.empty(1, 3, *size, device="meta"))
        assert tokens.shape == (1, tower(visual).num_patches, tower(visual).width), name
        tokens.sum().backward()
        assert not [n for n, p in visual.named_parameters() if p.grad is None], name
    assert len(found) > 55 and len(kinds) > 7


@pytest.mark.parametrize("name, size, grid", [
    ("test_vit", (64, 96), (4, 6)), ("test_convnext", (64, 96), (2, 3)),
    ("swin_tiny_patch4_window7_224", (64, 96), (2, 3))])
def test_tokens_go_row_by_row_over_an_image_of_another_size_that_is_no_square(name, size, grid):
    """The pixels that move a token most, by the gradient, are those of its own place, for every place."""
    torch.manual_seed(0)
    visual = towers.build(CLIPVisionCfg(timm_model_name=name, image_size=size)).eval()
    image = torch.randn(1, 3, *size, requires_grad=True)
    tokens = towers.patch_tokens(visual, image)[0]
    assert tower(visual).grid == grid and len(tokens) == grid[0] * grid[1]
    direction = torch.randn(tokens.shape[1])  # a plain sum is the same whatever a normalised token is
    found = [torch.autograd.grad(token @ direction, image, retain_graph=True)[0].square().sum(1) for token in tokens]
    cells = torch.nn.functional.adaptive_avg_pool2d(torch.cat(found), grid).flatten(1)
    assert cells.argmax(1).tolist() == list(range(len(tokens)))


@pytest.mark.parametrize("base", ["ViT-B-16-SigLIP", "EVA02-B-16", "PE-Core-T-16-384", "ViTamin-S"])
def test_one_unlocked_group_of_a_timm_tower_has_something_to_train(base):
    open_clip_mdc.register()
    config = open_clip.get_model_config("MDC-" + base)
    config.pop("custom_text")
    with torch.device("meta"):
        model = Captioner(**config | dict(text_cfg=DECODER))
    counts = []
    for groups in (0, 1, 2):
        for parameter in model.visual.parameters():
            parameter.requires_grad = True
        model.lock_image_tower(unlocked_groups=groups)
        counts.append(sum(p.requires_grad for p in model.visual.parameters()))
    assert counts[0] == 0 < counts[1] < counts[2]


def test_batch_norm_keeps_its_statistics_where_its_group_is_locked():
    model = Captioner(None, dict(timm_model_name="test_resnet", image_size=64), DECODER, dict(objective="mdc"))
    model.lock_image_tower(unlocked_groups=1)
    before = {name: buffer.clone() for name, buffer in model.visual.named_buffers() if name.endswith("running_mean")}
    model.train().visual(torch.randn(4, 3, 64, 64))
    kept = {name for name, buffer in before.items() if torch.equal(model.visual.get_buffer(name), buffer)}
    free = {name.removesuffix("weight") for name, p in model.visual.named_parameters() if p.requires_grad}
    assert kept == {name for name in before if name.removesuffix("running_mean") not in free}
    assert 0 < len(kept) < len(before)
