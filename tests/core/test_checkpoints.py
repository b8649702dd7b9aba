"""Claims about checkpoints: which load, and the fingerprint of a model."""
import copy
import math
from pathlib import Path

import open_clip
import pytest
import torch
from benchmark.models import save_clip
from conftest import TEXT, VISION, captions, images, read_json, refused, run, seeded, tiny_captioner, write_run
from training import equal, holds

import open_clip_mdc
from open_clip_mdc.data import weights
from open_clip_mdc.data.fingerprint import fingerprint
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner

OLD_WEIGHTS = read_json(Path(__file__).parent / "fixtures/weights_0.1.json")


@pytest.mark.parametrize("name", ["MDC-ViT-Ti-8", "ARC-ViT-Ti-8"])
def test_a_run_of_version_0_1_loads_whole(name, tmp_path):
    """A fixture has the names and shapes of its weights. Every one of them must be loaded."""
    generator = seeded(0)
    expected = {k: torch.randn(shape, generator=generator) for k, shape in OLD_WEIGHTS.items()}
    write_run(tmp_path, {f"module.{k}": v for k, v in expected.items()}, model=name, force_image_size=None,
              image_mean=None)
    model, _, _ = checkpoints.load(str(tmp_path))
    loaded = model.state_dict()
    assert holds(loaded, expected)
    assert {k for k in loaded if not k.startswith("length_head.")} == expected.keys()


@pytest.mark.parametrize("flag, model_args", [
    ("siglip", dict(init_logit_scale=math.log(10), init_logit_bias=-10)),
    ("force_custom_text", dict(force_custom_text=True)),
])
def test_a_run_of_clip_loads_whole_with_the_flags_that_change_its_weights(flag, model_args, tmp_path):
    open_clip_mdc.register()
    name, _ = save_clip(tmp_path)
    expected = open_clip.create_model(name, **model_args).state_dict()
    write_run(tmp_path, expected, model=name, **{"force_custom_text": False, "siglip": False} | {flag: True})
    assert equal(checkpoints.load(str(tmp_path))[0].state_dict(), expected)


def test_a_file_beside_a_params_txt_is_not_of_its_run(here):
    Path("params.txt").write_text("model: MDC-ViT-Ti-8\n")
    Path("bare.pt").touch()
    for pretrained in ("bare.pt", str(here / "bare.pt")):
        assert "bare.pt is not in a run folder" in refused(ValueError, checkpoints.find, pretrained)


def test_a_fingerprint_is_of_weights_and_settings():
    """The weights of a ViT fit its quickgelu twin, and those of an MDC model an ARC one."""
    model = tiny_captioner()
    expected = fingerprint(model)
    assert fingerprint(copy.deepcopy(model).train()) == expected
    twin = Captioner(64, VISION, TEXT, dict(objective="mdc"), quick_gelu=True)
    no_head, causal = tiny_captioner(length_head=False), tiny_captioner("arc")
    for other in (twin, no_head, causal):
        other.load_state_dict(model.state_dict(), strict=False)
    dimmer, trained = tiny_captioner(), tiny_captioner()
    dimmer.visual.image_mean = (0.4, 0.4, 0.4)
    trained.text.positional_embedding.data[0, 0] += 1
    assert len({expected, *map(fingerprint, (twin.eval(), no_head, causal, dimmer, trained))}) == 6


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


def test_a_changed_bit_in_a_weight_is_noticed(tmp_path):
    """PyTorch reads it as another weight."""
    path = tmp_path / "epoch_1.pt"
    torch.save({"weight": torch.zeros(1000)}, path)
    weights.check(path)
    whole = path.read_bytes()
    place = whole.index(bytes(2000)) + 1000
    path.write_bytes(whole[:place] + b"\x01" + whole[place + 1:])
    assert torch.load(path, weights_only=True)["weight"].any()
    with pytest.raises(ValueError, match=r"epoch_1.pt is damaged \(the checksum of .*data/0 is wrong\)"):
        weights.check(path)
    for size in range(9, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="epoch_1.pt is damaged or was cut off"):
            weights.check(path)


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path):
    """It is saved as by `open_clip_train`. The error must have the system's reason, not PyTorch's."""
    script = """
import resource, sys, torch, open_clip_mdc
open_clip_mdc.register(training=True)
path = sys.argv[1]
torch.save({"weight": torch.zeros(100)}, path)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    torch.save({"weight": torch.ones(100_000)}, path)
except OSError as problem:
    assert problem.filename == path and problem.strerror == "File too large", problem
else:
    raise SystemExit("it was saved")
"""
    path = tmp_path / "epoch_1.pt"
    run("python", "-c", script, str(path), fork=True)
    assert torch.load(path, weights_only=True)["weight"].shape == (100,)
    assert [p.name for p in tmp_path.iterdir()] == ["epoch_1.pt"]
