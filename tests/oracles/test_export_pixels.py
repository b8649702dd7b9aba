"""Claims about an export: timm and transformers see of a picture file what OpenCLIP's own transform shows."""

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import complaint_of, make_image, read_json, run_folder
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

import open_clip_mdc

SHAPES = (96, 64), (64, 96), (160, 90)  # 3:2, 2:3, 16:9, width and height
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Files of smooth random pictures."""
    paths = []
    for width, height in SHAPES:
        paths.append(tmp_path_factory.getbasetemp() / f"{width}x{height}.png")
        make_image(0, width // 8, height // 8).resize((width, height), Image.BICUBIC).save(paths[-1])
    return paths


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
    by_open_clip = image_transform_v2(PreprocessCfg(size, interpolation=interpolation, resize_mode=mode), False)
    for path, feature in zip(pictures, features, strict=True):
        expected, found = by_open_clip(Image.open(path)), transform(Image.open(path))
        assert torch.equal(found, expected)
        with torch.no_grad():
            assert (encoder(found[None])[0] - feature).abs().max() < 1e-4
        if square:
            processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out/clip_vision_model")
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
    card, license_, source = ((here / "out" / name).read_text() for name in ("README.md", "LICENSE", "SOURCE.md"))
    assert "`LICENSE`, `SOURCE.md`" in card and "Apache License" in license_ and "non-commercial" in source
    encoder, transform = timm_export(here / "out")
    expected = open_clip_mdc.load("photo", device="cpu").encode_image(pictures)
    with torch.no_grad():
        maps = encoder.forward_features(torch.stack([transform(Image.open(path)) for path in pictures]))
    assert (F.layer_norm(maps.movedim(1, -1), maps.shape[1:2]).mean((1, 2)) - expected).abs().max() < 1e-4
    assert read_json(here / "out/config.json")["architecture"] == "tf_efficientnet_lite0"
    Image.open(pictures[0]).save("image.jpg", format="PNG")
    blocks = [text.partition("```")[0] for text in card.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        with torch.no_grad():
            exec(block, names := {})
        assert (names["feature"] - expected[:1]).abs().max() < 1e-4
