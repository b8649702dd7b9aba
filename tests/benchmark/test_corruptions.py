"""Claims about corrupted images."""
from unittest.mock import patch

import models
import pytest
import torch
from conftest import made_images, make_image, read_json, saved
from models import captioned_webdataset, labelled_webdataset, order_data, save_clip
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from clip_benchmark_ext.datasets import corruptions
from clip_benchmark_ext.datasets.corruptions import LEVELS, parse
from clip_benchmark_ext.metrics import clipscore

pytestmark = pytest.mark.usefixtures("clip_benchmark", "no_java")  # which takes its time
SEVERITIES = range(1, 6)


def scene(*size: int) -> Image.Image:
    """A box of one colour on another, which noise and blur change in different ways."""
    image = Image.new("RGB", size, (60, 90, 110))
    image.paste((150, 40, 60), (0, 0, size[0] // 2, size[1] // 2))
    return image


def change(image: Image.Image, spec: str) -> torch.Tensor:
    return pil_to_tensor(parse(spec)(image)).float() - pil_to_tensor(image).float()


@pytest.mark.parametrize("name", LEVELS)
def test_severity_0_is_the_image_each_step_makes_it_worse_and_twice_is_the_same(name):
    image = make_image(0, 200)
    assert parse(f"{name}:0")(image) is image
    errors = [change(image, f"{name}:{severity}").square().mean().item() for severity in SEVERITIES]
    assert errors[0] > 0 and errors == sorted(errors) and len(set(errors)) == 5
    for severity in SEVERITIES:
        once, again = (parse(f"{name}:{severity}")(make_image(0, 200)).tobytes() for _ in range(2))
        assert once == again


def test_noise_has_its_standard_deviation_and_is_another_for_another_image():
    noise = change(Image.new("RGB", (100, 100), (128, 128, 128)), "gaussian_noise:1")
    assert noise.std() == pytest.approx(255 * 0.08, rel=0.02) and abs(noise.mean()) < 0.5
    other = change(Image.new("RGB", (100, 100), (128, 128, 129)), "gaussian_noise:1")
    assert abs(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1]) < 0.05


def test_blur_is_relative_to_the_image_and_keeps_a_flat_one():
    assert change(Image.new("RGB", (30, 20), (9, 99, 199)), "gaussian_blur:5").abs().max() <= 1
    small, large = (change(scene(4 * n, 3 * n), "gaussian_blur:3").abs().mean() for n in (24, 96))
    assert small == pytest.approx(float(large), rel=0.15)
    assert parse("gaussian_blur:5")(Image.new("RGB", (1, 5))).size == (1, 5)


def test_brightness_is_a_factor():
    assert parse("brightness:5")(Image.new("RGB", (2, 2), (40, 60, 200))).getpixel((0, 0)) == (80, 120, 255)


# ---- in the tasks


def evaluate(runs, name, *arguments) -> dict:
    return models.evaluate(*models.flags_of(runs, *arguments, "--no_amp --skip_existing"), name=name)


@pytest.fixture
def captioned(tmp_path):
    return captioned_webdataset(tmp_path / "captioned", {str(i): (i, "a red square") for i in range(5)})


def test_captions_are_of_corrupted_images_and_are_scored_by_clean_ones(runs, captioned, tmp_path, monkeypatch):
    """A test set that was corrupted beforehand gives the same captions."""
    name, weights = save_clip(tmp_path)
    command = ("wds/x", captioned, "--task captioning --caption_length 6 --batch_size 2")
    clip = ("--clip", f"{name}:{weights}", "--clip_scale 1")
    noisy = evaluate(runs, "noisy", *command, *clip, "--corruption gaussian_noise:5")
    with monkeypatch.context() as patch:
        patch.setattr(corruptions, "parse", lambda spec: pytest.fail("has been corrupted already"))
        clean = evaluate(runs, "clean", *command, *clip)
    beforehand = captioned_webdataset(tmp_path / "beforehand", {
        str(i): (saved(parse("gaussian_noise:5")(make_image(i))), "a red square") for i in range(5)})
    evaluate(runs, "same", *(beforehand if x == captioned else x for x in command), *clip)
    captions, uncorrupted, same = (read_json(f"captions/{name}.json")["captions"]
                                   for name in ("noisy", "clean", "same"))
    assert captions == same != uncorrupted
    assert noisy["settings"]["corruption"] == "gaussian_noise:5" and clean["settings"]["corruption"] is None

    other, state = tmp_path / "other.pt", torch.load(weights)
    state["visual.proj"] *= 2
    torch.save(state, other)
    scored = evaluate(runs, "noisy", *command, *clip, "--corruption gaussian_noise:5 --clipscore_model", name,
                      "--clipscore_pretrained", other)
    judge = clipscore.load(name, str(other), "cpu")
    with torch.no_grad():
        images = judge.model.encode_image(made_images(judge.transform, 5))
        texts = [clipscore.PREFIX + text for text in captions.values()]
        texts = clipscore.encode_texts(judge, texts, "cpu", "texts")
    assert scored["metrics"]["CLIPScore"] == pytest.approx(float(clipscore.clip_scores(images, texts).mean()), rel=1e-4)


@pytest.mark.parametrize("make, dataset, task, count", [
    (lambda root: labelled_webdataset(root, ["a", "b"], ["{c}"]), "wds/x", "linear_probe", 24),
    (order_data, "aro/coco_order", "image_caption_selection", 12)])
def test_images_of_testing_alone_are_corrupted(runs, tmp_path, make, dataset, task, count):
    root = make(tmp_path / "data")
    corrupt = corruptions.Corruption.__call__
    with patch.object(corruptions.Corruption, "__call__", autospec=True, side_effect=corrupt) as seen:
        found = evaluate(runs, "x", dataset, root, "--task", task, "--corruption jpeg:5 --batch_size 8")
    assert {call.args[1].tobytes() for call in seen.call_args_list} == {make_image(i).tobytes() for i in range(count)}
    assert found["settings"]["corruption"] == "jpeg:5"
