"""Claims about an export: timm and transformers see of a picture file what OpenCLIP's own transform shows."""

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import complaint_of, read_json, run_folder, seeded
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

import open_clip_mdc

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SHAPES = (96, 64), (64, 96), (160, 90)  # 3:2, 2:3, 16:9, width and height
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Files of smooth random pictures."""
    paths, generator = [], seeded(0)
    for width, height in SHAPES:
        coarse = torch.rand(1, 3, height // 8, width // 8, generator=generator)
        pixels = F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0].permute(1, 2, 0)
        paths.append(tmp_path_factory.getbasetemp() / f"{width}x{height}.png")
        Image.fromarray((pixels * 255).byte().numpy()).save(paths[-1])
    return paths


def pixels_by_open_clip(path, size, mode, interpolation):
    cfg = PreprocessCfg(size=size, mean=MEAN, std=STD, interpolation=interpolation, resize_mode=mode)
    return image_transform_v2(cfg, is_train=False)(Image.open(path))


def timm_export(folder):
    encoder = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return encoder, timm.data.create_transform(**timm.data.resolve_model_data_config(encoder))


@pytest.mark.parametrize(("size", "mode", "interpolation"), [
    ([32, 32], "shortest", "bicubic"), ([32, 32], "squash", "bilinear"), ([32, 48], "shortest", "bilinear"),
    ([48, 32], "shortest", "bilinear"), ([48, 32], "squash", "bilinear"), ([32, 32], "shortest", "random")])
def test_an_export_cuts_pictures_as_the_model_does(tmp_path, pictures, size, mode, interpolation):
    square = size[0] == size[1]
    run = run_folder(tmp_path / "run", "MDC-ViT-Ti-8", force_image_size=size, image_resize_mode=mode,
                     image_interpolation=interpolation)
    assert complaint_of("export", "--pretrained", run, "--out", tmp_path / "out", "--to", "timm",
                        *["transformers"] * square) is None
    encoder, transform = timm_export(tmp_path / "out")
    features = open_clip_mdc.load(run, device="cpu").encode_image(pictures)
    for path, feature in zip(pictures, features, strict=True):
        expected = pixels_by_open_clip(path, size, mode, interpolation)
        found = transform(Image.open(path))
        assert torch.equal(found, expected)
        with torch.no_grad():
            assert (encoder(found[None])[0] - feature).abs().max() < 1e-4
        if square:
            processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out" / "clip_vision_model")
            pixels = processor(Image.open(path), return_tensors="pt")["pixel_values"][0]
            assert (pixels - expected).abs().max() < 0.05  # its resize works on bytes


@pytest.mark.parametrize("to", ["timm", "transformers"])
def test_black_borders_that_the_other_library_does_not_have_are_refused(tmp_path, to):
    run = run_folder(tmp_path / "run", "MDC-ViT-Ti-8", image_resize_mode="longest")
    message = complaint_of("export", "--pretrained", run, "--out", tmp_path / "out", "--to", to)
    assert "pictures that are not square in another way (resize mode longest)" in message
    assert not (tmp_path / "out").exists()


def test_borders_in_timm_are_as_black_as_the_mean(tmp_path, pictures):
    run = run_folder(tmp_path / "run", "MDC-ViT-Ti-8", image_resize_mode="longest", image_mean=[0.0] * 3,
                     image_std=[1.0] * 3)
    assert complaint_of("export", "--pretrained", run, "--out", tmp_path / "out", "--to", "timm") is None
    _, transform = timm_export(tmp_path / "out")
    model = open_clip_mdc.load(run, device="cpu")
    for path in pictures:
        assert torch.equal(transform(Image.open(path)), next(model.batches([path]))[0])


def test_the_packaged_captioner_of_feature_maps_goes_to_timm_and_its_card_shows_how(pictures, here):
    assert complaint_of("export", "--pretrained", "photo", "--out", here / "out", "--to", "timm") is None
    assert "`LICENSE`, `SOURCE.md`" in (here / "out" / "README.md").read_text()
    assert "Apache License" in (here / "out" / "LICENSE").read_text()
    assert "non-commercial" in (here / "out" / "SOURCE.md").read_text()
    encoder, transform = timm_export(here / "out")
    expected = open_clip_mdc.load("photo", device="cpu").encode_image(pictures)
    with torch.no_grad():
        maps = encoder.forward_features(torch.stack([transform(Image.open(path)) for path in pictures]))
    mean, spread = maps.mean(1, keepdim=True), maps.var(1, keepdim=True, unbiased=False)
    assert (((maps - mean) / (spread + 1e-5).sqrt()).mean((2, 3)) - expected).abs().max() < 1e-4
    assert read_json(here / "out" / "config.json")["architecture"] == "tf_efficientnet_lite0"
    Image.open(pictures[0]).save("image.jpg", format="PNG")
    card = (here / "out" / "README.md").read_text()
    blocks = [text.partition("```")[0] for text in card.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        with torch.no_grad():
            exec(block, names := {})
        assert (names["feature"] - expected[:1]).abs().max() < 1e-4
