"""Claims about `clip_benchmark eval --task segmentation`."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import SHARED, needs_data, picture, png, refused, saved, seeded, write_tar
from models import evaluate, flags_of
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score

from clip_benchmark_ext.datasets import masks
from clip_benchmark_ext.metrics.mask_metrics import class_iou, confusion, measures, with_errors
from clip_benchmark_ext.table import markdown, read_results
from clip_benchmark_ext.tasks import segmentation


def mask_png(ids, mode: str = "L") -> bytes:
    image = Image.fromarray(np.asarray(ids, dtype=np.uint8))
    if mode == "P":
        image.putpalette([*range(256)] * 3)
    return saved(image)


def test_mean_iou_is_that_of_sets_of_pixels():
    generator = seeded(0)
    predicted, target = (torch.randint(0, 4, (5, 8, 9), generator=generator) for _ in range(2))
    target[predicted == 3] = 0  # a class that is never right
    target[0, :2] = masks.VOID
    seen = target != 255
    expected = jaccard_score(target[seen], predicted[seen], average=None).tolist()
    matrices = torch.stack([confusion(p, t, 5) for p, t in zip(predicted, target, strict=True)])
    assert class_iou(matrices.sum(0)).tolist() == pytest.approx([*expected, math.nan], nan_ok=True)  # 4 is nowhere
    assert measures(matrices.sum(0)) == pytest.approx({
        "miou": sum(expected) / 4, "pixel_acc": accuracy_score(target[seen], predicted[seen])})
    # The jackknife of a mean of groups of as many pixels is the standard error of their mean.
    whole = torch.stack([confusion(p, t, 5) for p, t in zip(predicted[1:], target[1:], strict=True)])
    shares = np.array([measures(one)["pixel_acc"] for one in whole])
    assert with_errors(whole)["pixel_acc_se"] == pytest.approx(shares.std(ddof=1) / 2)


def test_logits_at_a_pixel_are_those_of_the_enlarged_map():
    torch.manual_seed(0)
    logits = torch.randn(1, 3, 4, 5)
    large = F.interpolate(logits, (11, 7), mode="bilinear")
    y, x = torch.meshgrid(torch.arange(11), torch.arange(7), indexing="ij")
    places = torch.stack(((x + 0.5) / 7, (y + 0.5) / 11), -1).view(1, -1, 2)
    torch.testing.assert_close(segmentation.at_places(logits, places), large.flatten(2), atol=1e-5, rtol=1e-5)


def test_the_loss_at_random_pixels_is_that_of_the_mask_without_void():
    torch.manual_seed(0)
    logits, mask = torch.randn(1, 3, 4, 4), torch.randint(0, 3, (9, 6), dtype=torch.uint8)
    mask[:3] = masks.VOID
    whole = F.cross_entropy(F.interpolate(logits, (9, 6), mode="bilinear"), mask[None].long(), ignore_index=255)
    drawn = torch.stack([segmentation.sampled_loss(logits, [mask]) for _ in range(40)])
    assert abs(drawn.mean() - whole) < 4 * drawn.std() / math.sqrt(40) + 1e-3


def test_patches_are_the_pixels_under_each_token():
    images = torch.arange(2 * 3 * 8 * 12).view(2, 3, 8, 12).float()
    found = segmentation.patches(images, (2, 3))
    assert torch.equal(found[1, 4], images[1, :, 4:8, 4:8].flatten())  # row 1, column 1
    assert segmentation.patches(images[..., :11], (2, 3)).shape == (2, 6, 48)


def ade20k(root: Path) -> Path:
    for folder in ("training", "validation"):
        picture(root / "images" / folder / "a.jpg", 1)
        (root / "annotations" / folder).mkdir(parents=True)
        (root / "annotations" / folder / "a.png").write_bytes(mask_png(np.full((40, 40), 150) * (np.eye(40) == 0)))
    return root


def voc(root: Path) -> Path:
    for folder in ("SegmentationClass", "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True)
    for split, name in (("train", "2007_a"), ("val", "2007_b")):
        (root / f"ImageSets/Segmentation/{split}.txt").write_text(name + "\n")
        picture(root / f"JPEGImages/{name}.jpg", 1)
        (root / f"SegmentationClass/{name}.png").write_bytes(mask_png(np.where(np.eye(40), 255, 20), "P"))
    return root


@pytest.mark.parametrize("name, make, last", [("ade20k", ade20k, 149), ("voc2012", voc, 20)])
def test_layouts_of_ade20k_and_voc_are_read_as_they_are(tmp_path, name, make, last):
    root = make(tmp_path)
    for split in ("train", "test"):
        image, mask = masks.build(name, str(root), split, lambda image: torch.zeros(3, *image.size))[0]
        assert mask.shape == (40, 40) and mask.dtype == torch.uint8
        assert torch.equal(mask == masks.VOID, torch.eye(40, dtype=torch.bool)) and mask[0, 1] == last
        assert len(masks.MASKED[name]["classes"]) == last + 1


@needs_data("camvid/train.tar")
@pytest.mark.parametrize("split, count", [("train", 367), ("val", 101), ("test", 233)])
def test_camvid_has_its_photographs_and_eleven_classes_beside_void(split, count):
    found = masks.build("camvid", str(SHARED / "camvid"), split, lambda image: torch.zeros(3, *image.size[::-1]))
    assert len(found) == count and len(found.classes) == 11
    ids = set()
    for index in range(0, count, 20):
        image, mask = found[index]
        assert image.shape[1:] == mask.shape == (180, 240)
        ids |= set(mask.unique().tolist())
    assert ids == {*range(11), masks.VOID}


def halves(root: Path, count: int = 24) -> Path:
    """Return images of two colours side by side. A colour is a class, and the upper row is void."""
    colours = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200]])
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        content = {}
        for i in range(count):
            left, right = generator.permutation(3)[:2]
            ids = np.where(np.arange(40) < generator.integers(12, 29), left, right)[None].repeat(40, 0)
            content[f"{i}.png"] = saved(Image.fromarray(colours[ids].astype(np.uint8)))
            ids[0] = masks.VOID
            content[f"{i}.mask.png"] = mask_png(ids)
        write_tar(root / f"{split}.tar", content)
    (root / "classnames.txt").write_text("red\ngreen\nblue")
    return root


def segmented(runs, root: Path, *more) -> dict:
    return evaluate(*flags_of(runs, "masks", root, "--no_amp", *more))


@pytest.mark.usefixtures("clip_benchmark")
def test_the_command_segments_beside_its_floors(runs, tmp_path):
    result = segmented(runs, halves(tmp_path), "--fewshot_epochs 40")  # the task is the data set's
    metrics = result["metrics"]
    assert result["task"] == "segmentation" and metrics["images"] == 24 and metrics["held_out"] == 2
    for row in ("", "untrained/", "pixels/"):
        assert metrics[f"{row}miou"] > 0.75 and 0 < metrics[f"{row}miou_se"] < 0.1
        ious = [metrics[f"{row}iou {name}"] for name in ("red", "green", "blue")]
        assert metrics[f"{row}miou"] == pytest.approx(sum(ious) / 3)
    head, _, *rows = markdown(read_results(["result.json"])).splitlines()
    assert head == "| data set | model (run) | scorer | features | mIoU | pixel accuracy |"
    assert [row.split(" | ")[3] for row in rows] == ["encoder", "untrained", "pixels"] and " ± " in rows[2]


@pytest.mark.usefixtures("clip_benchmark")
@pytest.mark.parametrize("spoil, more, said", [
    (lambda root: (root / "classnames.txt").unlink(), (), "--dataset_root takes a folder with train.tar and test.tar"),
    (lambda root: (root / "classnames.txt").write_text("red\ngreen"), (), "the class 2, but there are 2 classes"),
    (lambda root: write_tar(root / "train.tar", {"x.png": png(0), "x.mask.png": mask_png(np.zeros((3, 3)))}), (),
     "the image is 40 x 40 pixels and its mask 3 x 3"),
    (lambda root: (root / "test.tar").rename(root / "val.tar"), ("--val_split validation",), "val is both"),
])
def test_what_is_no_data_for_it_is_said_in_one_line(runs, tmp_path, spoil, more, said):
    spoil(halves(tmp_path, 3))
    found = refused(SystemExit, segmented, runs, tmp_path, *more)
    assert found.startswith("error: ") and said in found
