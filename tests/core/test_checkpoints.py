"""Claims about checkpoints: which load, and what tells two models apart.    pytest tests/core/test_checkpoints.py"""
import copy
import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, captions, images, tiny_captioner

from open_clip_mdc import checkpoints
from open_clip_mdc.checkpoints import fingerprint
from open_clip_mdc.model import Captioner

OLD_WEIGHTS = json.loads((Path(__file__).parent / "fixtures" / "weights_0.1.json").read_text())


@pytest.mark.parametrize("name", ["MDC-ViT-Ti-8", "ARC-ViT-Ti-8"])
def test_a_run_of_version_0_1_loads_whole(name, tmp_path):
    """Names and shapes of its weights are a fixture; every one of them arrives."""
    generator = torch.Generator().manual_seed(0)
    weights = {k: torch.randn(shape, generator=generator) for k, shape in OLD_WEIGHTS.items()}
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": {f"module.{k}": v for k, v in weights.items()}}, tmp_path / "checkpoints" / "epoch_1.pt")
    (tmp_path / "params.txt").write_text(f"model: {name}\nforce_image_size: None\nimage_mean: None\n")
    model, _, _ = checkpoints.load(str(tmp_path))
    loaded = model.state_dict()
    assert all(torch.equal(loaded[k], v) for k, v in weights.items())
    assert {k for k in loaded if not k.startswith("length_head.")} == weights.keys()


def with_other_setting(change) -> Captioner:
    model = tiny_captioner()
    change(model)
    return model


def test_a_fingerprint_is_of_weights_and_settings():
    """The weights of a ViT fit its quickgelu twin, and those of an MDC model an ARC one."""
    model = tiny_captioner()
    expected = fingerprint(model)
    assert fingerprint(copy.deepcopy(model).train()) == expected
    config = (64, dict(image_size=32, patch_size=8, width=64, head_width=32, layers=2),
              dict(context_length=12, vocab_size=VOCAB, width=32, heads=2, layers=2))
    twin = Captioner(*config, dict(objective="mdc"), quick_gelu=True)
    no_head = Captioner(*config, dict(objective="mdc", length_head=False))
    causal = Captioner(*config, dict(objective="arc"))
    for other in (twin, no_head, causal):
        other.load_state_dict(model.state_dict(), strict=False)
    def dimmer(x):
        x.visual.image_mean = (0.4, 0.4, 0.4)

    def trained(x):
        x.text.positional_embedding.data[0, 0] += 1
    others = [twin.eval(), no_head.eval(), causal.eval(), with_other_setting(dimmer), with_other_setting(trained)]
    assert len({expected, *map(fingerprint, others)}) == 1 + len(others)


def test_using_a_model_leaves_its_fingerprint():
    model = tiny_captioner()
    expected = fingerprint(model)
    model.generate(images(2), length=3)
    model.log_likelihood(images(2), captions([4, 5]))
    model.seed_t(5)
    model.set_grad_checkpointing(True)
    model(images(2), captions([4, 5]))
    model.set_grad_checkpointing(False)
    assert fingerprint(model) == expected
