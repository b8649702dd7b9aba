"""Claims about `open_clip_mdc.load`.    pytest tests/core/test_pretrained.py"""
import open_clip
import pytest
import torch
from conftest import run_folder
from PIL import Image

import open_clip_mdc
from open_clip_mdc.tokens import decode_captions

WORDS = ["a red circle above a blue square", "a blue square"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder):
    return run_folder(folder / "mdc", "MDC-ViT-Ti-8", force_image_size=48, force_context_length=20,
                      image_mean=[0.4, 0.5, 0.6])


@pytest.fixture(scope="module")
def model(run):
    return open_clip_mdc.load(str(run))


@pytest.fixture(scope="module")
def images():
    noise = torch.randint(0, 256, (5, 60, 50, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return [Image.fromarray(x.numpy()) for x in noise]


def test_a_run_is_loaded_with_its_size_context_and_mean(model):
    assert model.model.visual.image_size == (48, 48) and model.model.context_length == 20
    assert model.tokenizer(WORDS).shape == (2, 20)
    assert model.model.visual.preprocess_cfg["mean"] == [0.4, 0.5, 0.6]
    grey = model.transform(Image.new("RGB", (9, 9), (102, 128, 153)))
    assert grey.shape == (3, 48, 48) and grey.abs().max() < 0.02  # 102 / 255 = 0.4


@pytest.mark.parametrize("place", ["epoch_1.pt", ".", "../checkpoints", ".."])
def test_a_run_is_loaded_as_it_was_trained_from_within_its_folder(place, run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    for model_name in (None, "MDC-ViT-Ti-8"):
        model = open_clip_mdc.load(place, model_name).model
        assert model.visual.image_size == (48, 48) and model.context_length == 20
        assert model.visual.preprocess_cfg["mean"] == [0.4, 0.5, 0.6]


def test_a_checkpoint_that_is_a_link_belongs_to_the_run_that_it_stands_in(run, folder):
    (folder / "linked" / "checkpoints").mkdir(parents=True)
    (folder / "linked" / "params.txt").write_text((run / "params.txt").read_text().replace("0.4", "0.3"))
    (folder / "linked" / "checkpoints" / "epoch_1.pt").symlink_to(run / "checkpoints" / "epoch_1.pt")
    assert open_clip_mdc.load(folder / "linked").model.visual.preprocess_cfg["mean"] == [0.3, 0.5, 0.6]


def test_files_images_and_tensors_are_the_same_images(model, images, tmp_path):
    images[0].save(tmp_path / "0.png")
    each = [images[0], tmp_path / "0.png", str(tmp_path / "0.png"), model.transform(images[0])]
    features = model.encode_image(each)
    assert torch.equal(features[0].expand(4, -1), features)
    for one in (*each, torch.stack([each[-1]])):
        assert torch.allclose(model.encode_image(one), features[:1], atol=1e-6)
    assert model.encode_image_tokens(each[0]).mean(1).sub(features[0]).abs().max() < 1e-6
    rgba = images[0].convert("RGBA")
    assert torch.equal(model.encode_image(rgba), model.encode_image(images[0]))


def test_captions_are_those_of_generate_whatever_the_batch(model, images):
    image = torch.stack([model.transform(x) for x in images])
    for options in ({}, {"length": 4, "tokens_per_step": 2}, {"length": "auto"}):
        expected = decode_captions(model.model.generate(image, **options), model.tokenizer)
        assert model.caption(images, **options) == model.caption(images, batch_size=2, **options) == expected
    assert len(set(expected)) > 1
    filled = model.trace(images[0], text="a [MASK] circle")[0]
    assert filled["caption"].split()[0] == "a" and filled["caption"].split()[-1] == "circle"
    assert [token["step"] for token in filled["tokens"]] == [None, 0, None]
    drawn = [model.caption(images, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_scores_are_the_log_likelihoods(model, images):
    image, text = torch.stack([model.transform(x) for x in images]), model.tokenizer(WORDS)
    expected = model.model.log_likelihood(image, text.expand(5, -1, -1))
    assert torch.allclose(model.score(images, WORDS, batch_size=2), expected, atol=1e-4)
    swapped = [WORDS if i % 2 else WORDS[::-1] for i in range(5)]
    own = model.score(images, swapped, batch_size=2)
    assert torch.allclose(own[1::2], expected[1::2], atol=1e-4)
    assert torch.allclose(own[::2], expected[::2].flip(1), atol=1e-4)
    with pytest.raises(ValueError, match="5 images, but captions of 4"):
        model.score(images, swapped[:4])
    with pytest.raises(ValueError, match="caption 1 has .* the model reads 20"):
        model.score(images, ["a circle " * 20])


def test_the_device_and_the_precision_can_be_chosen(run, images):
    """bfloat16 rounds the features; the decoder stays in float32."""
    plain, rounded = (open_clip_mdc.load(run, device="cpu", precision=p) for p in ("fp32", "bf16"))
    a, b = (model.encode_image(images) for model in (plain, rounded))
    assert 0 < (a - b).abs().max() < 0.1 and b.dtype == torch.float32


def test_what_is_no_captioner_and_what_is_no_image_is_said(folder, model, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at nowhere"):
        open_clip_mdc.load("nowhere")
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(ValueError, match="text.png"):
        model.caption([tmp_path / "text.png"])
    clip = folder / "clip"
    (clip / "checkpoints").mkdir(parents=True)
    (clip / "params.txt").write_text("model: ViT-Ti-8\n")
    torch.save({"state_dict": open_clip.create_model("ViT-Ti-8").state_dict()}, clip / "checkpoints" / "epoch_1.pt")
    with pytest.raises(ValueError, match="is no captioner"):
        open_clip_mdc.load(clip)
