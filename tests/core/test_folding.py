"""Claims about integration/folding.py: BatchNorm is part of convolutions, tokens stay, and training is as before."""
import pickle

import pytest
import torch
from open_clip.model import CLIPVisionCfg
from torch import nn
from training import holds

from open_clip_mdc import load
from open_clip_mdc.integration.folding import MANY, folded, read_only_tokens
from open_clip_mdc.models import towers
from open_clip_mdc.models.towers import patch_tokens


def tower(name: str) -> nn.Module:
    """Return a tower whose BatchNorms have statistics of their own."""
    torch.manual_seed(0)
    visual = towers.build(CLIPVisionCfg(timm_model_name=name, image_size=64)).eval()
    for norm in norms(visual):
        norm.running_mean.normal_(std=0.1)
        norm.running_var.uniform_(0.5, 2)
    return visual


def norms(visual: nn.Module) -> list[nn.Module]:
    return [module for module in visual.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet10t", "mobilenetv3_small_050"])
def test_tokens_of_a_folded_tower_are_those_of_the_tower(name):
    visual, image = tower(name), torch.randn(2, 3, 64, 64)
    found = folded(visual)
    assert len(norms(found)) == (name == "resnet10t") < len(norms(visual))  # behind a stem of three convolutions
    with torch.inference_mode():
        before, kept = patch_tokens(visual, image), {}
        torch.testing.assert_close(read_only_tokens(kept, visual, image), before, rtol=1e-4, atol=2e-4)
    assert kept["tower"] is not visual


def test_gradients_and_new_weights_are_read_from_the_tower_itself():
    visual, image, kept = tower("resnet10t"), torch.randn(2, 3, 64, 64), {}
    assert read_only_tokens(kept, visual, image).requires_grad and not kept
    with torch.no_grad():
        read_only_tokens(kept, visual, image)
        other = {name: 2 * x for name, x in tower("resnet10t").state_dict().items()}
        for change in (lambda: norms(visual)[0].weight.mul_(3), lambda: visual.load_state_dict(other, assign=True)):
            change()
            torch.testing.assert_close(read_only_tokens(kept, visual, image), patch_tokens(visual, image), rtol=1e-4,
                                       atol=2e-4)


def test_a_tower_whose_norm_does_not_follow_its_neighbour_is_not_folded():
    visual, kept = tower("tf_efficientnet_lite0"), {}
    visual.trunk.bn1.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))  # something between the two
    with torch.inference_mode():
        read_only_tokens(kept, visual, torch.randn(2, 3, 64, 64))
    assert kept["tower"] is visual


def test_a_loaded_captioner_reads_many_images_by_the_copy_and_few_by_the_tower():
    loaded, image = load("photo", device="cpu", precision="fp32"), torch.randn(MANY, 3, 224, 224)
    model = loaded.model
    with torch.inference_mode():
        many, few, plain = model.encode_image(image), model.encode_image(image[1:]), patch_tokens(model.visual, image)
        assert not torch.equal(many, plain.mean(1)) and torch.equal(few, patch_tokens(model.visual, image[1:]).mean(1))
        torch.testing.assert_close(many, plain.mean(1), rtol=1e-3, atol=1e-3)
    before = {name: x.clone() for name, x in pickle.loads(pickle.dumps(model)).train().named_buffers()}
    model.train()
    model.text.eval()
    assert not loaded.features(image[0]).is_inference() and loaded.score(image[0], "a dog .").isfinite()
    assert model.training and not model.text.training
    assert holds(before, dict(model.named_buffers()))
