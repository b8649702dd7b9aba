"""Claims about what lies beside weights: how images are prepared for them."""
import shlex
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import refused, run_folder, write_json
from training import equal, weights

import open_clip_mdc
from open_clip_mdc import train
from open_clip_mdc.integration import check_flags, checkpoints, image_source
from open_clip_mdc.integration import clip as clip_models
from open_clip_mdc.integration.runs import PHOTO_MODEL, find

pytestmark = pytest.mark.usefixtures("registered_for_training")
TOLD = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3], "interpolation": "bilinear", "resize_mode": "longest"}


def export(folder: Path, model_name: str = "MDC-ViT-Ti-8") -> Path:
    """An exported folder, whose file of weights is returned."""
    folder.mkdir()
    torch.save(open_clip.create_model(model_name).state_dict(), folder / "open_clip_pytorch_model.bin")
    write_json(folder / "open_clip_config.json", {
        "model_cfg": open_clip.get_model_config(model_name), "preprocess_cfg": TOLD})
    return folder / "open_clip_pytorch_model.bin"


def test_weights_bring_the_preparation_of_images_that_lies_beside_them(tmp_path, caplog, capsys):
    """In Python and the tools, for captioners and CLIP, by a file of an export and a checkpoint of a run."""
    path = export(tmp_path / "export")
    make = open_clip_mdc.create_model_and_transforms
    for model, *_ in (make("MDC-ViT-Ti-8", str(path)), checkpoints.load(str(path), "MDC-ViT-Ti-8"),
                      make("MDC-ViT-Ti-8", pretrained_image=str(tmp_path / "export"))):
        assert {name: model.visual.preprocess_cfg[name] for name in TOLD} == TOLD
    path = export(tmp_path / "clip", "ViT-Ti-8")
    clip = clip_models.load("ViT-Ti-8", str(path))
    assert "mean=[0.4, 0.5, 0.6]" in str(clip.transform) and not capsys.readouterr().err
    other, _, _ = open_clip.create_model_and_transforms("ViT-Ti-8", str(path), image_mean=(0, 0, 0),
                                                        force_image_size=64)
    assert other.visual.preprocess_cfg["mean"] == (0, 0, 0) and other.visual.preprocess_cfg["std"] == TOLD["std"]
    assert f"{path} was trained on images of 32x32 pixels, and this model takes 64x64: --force" in caplog.text
    epoch = run_folder(tmp_path / "run", "MDC-ViT-Ti-8", image_mean=TOLD["mean"]) / "checkpoints/epoch_1.pt"
    model = open_clip.create_model("MDC-ViT-Ti-8", str(epoch))
    assert model.visual.preprocess_cfg["mean"] == TOLD["mean"]
    epoch.rename(tmp_path / "alone.pt")
    checkpoints.load(str(tmp_path / "alone.pt"), "MDC-ViT-Ti-8")
    said = capsys.readouterr().err
    assert "alone.pt: no open_clip_config.json beside it tells mean and std of its images, so" in said


@pytest.mark.parametrize("given", ["export", "file", "local-dir", "run", "photo"])
def test_training_takes_what_the_tools_take_and_its_run_remembers_how_images_are_prepared(given, tmp_path):
    file = export(tmp_path / "export")
    run_folder(tmp_path / "run", "MDC-ViT-Ti-8", **{f"image_{name}": x for name, x in TOLD.items()})
    source, model = {"export": (tmp_path / "export", "MDC-ViT-Ti-8"), "file": (file, "MDC-ViT-Ti-8"),
                     "local-dir": (f"local-dir:{tmp_path / 'export'}", "MDC-ViT-Ti-8"),
                     "run": (tmp_path / "run", "MDC-ViT-Ti-8"),
                     "photo": ("photo", PHOTO_MODEL)}[given]
    args = train.parse(["--model", model, "--pretrained", str(source), "--dataset-type", "synthetic",
                        "--train-num-samples", "64", "--precision", "fp32", "--image-std", "1", "1", "1"])
    assert check_flags.find_problem(args) is None and Path(args.pretrained).is_file()
    assert not [said for said in check_flags.find_warnings(args) if "mean and std" in said]
    assert args.image_mean == ([0.5] * 3 if given == "photo" else TOLD["mean"]) and args.image_std == [1, 1, 1]
    assert (args.image_interpolation, args.image_resize_mode) == (
        ("bicubic", "shortest") if given == "photo" else ("bilinear", "longest"))


def test_the_packaged_captioner_is_known_to_training_by_its_name():
    """Its tower, too."""
    args = train.parse(["--model", PHOTO_MODEL, "--pretrained-image", "photo"])
    assert args.image_mean == [0.5] * 3 and image_source.check("photo", PHOTO_MODEL) is None


def test_a_run_of_a_model_from_a_folder_says_a_line_that_can_be_pasted(tmp_path):
    """A folder of any length and letters. The run is then read."""
    folder = tmp_path / ("a folder " + "x" * 100)
    export(folder)
    given = run_folder(tmp_path / "run", "MDC-ViT-Ti-8")
    (given / "params.txt").write_text(f"model: local-dir:{folder}\n")
    before, _, name = refused(ValueError, find, str(given)).rpartition("if you trust that place, add --model ")
    loaded = open_clip_mdc.load(given, *shlex.split(name), device="cpu").model
    assert before and equal(loaded.state_dict(), weights(tmp_path, 1))


@pytest.mark.parametrize("content, said", [
    ("{", "does not tell how images are prepared (JSONDecodeError"),
    ('{"model_cfg": {"vision_cfg": {}}, "preprocess_cfg": {"mean": [1, 2]}}', "its image mean is [1, 2], not three nu"),
    ('{"model_cfg": {"vision_cfg": {}}, "preprocess_cfg": {"mean": ["", 0, 0]}}', "its image mean is ['', 0, 0], "),
    ('{"model_cfg": {"vision_cfg": {}}, "preprocess_cfg": {"mean": [1e39, 0, 0]}}', "its image mean is [1e+39, 0, 0],"),
    ('{"model_cfg": {"vision_cfg": {}}, "preprocess_cfg": {"std": [0, 1, 1]}}', "its image std is [0, 1, 1], not thr"),
    ('{"model_cfg": {"vision_cfg": {}}, "preprocess_cfg": {"resize_mode": "x"}}', "its image resize_mode is 'x', not"),
    ('{"model_cfg": {"vision_cfg": {"image_size": []}}, "preprocess_cfg": {}}', "its image size is [], not one or two"),
])
def test_what_lies_beside_weights_and_is_damaged_is_one_line(content, said, tmp_path):
    file = export(tmp_path / "export")
    (tmp_path / "export/open_clip_config.json").write_text(content)
    line = refused(ValueError, open_clip.create_model, "MDC-ViT-Ti-8", str(file))
    assert said in line and "open_clip_config.json" in line
