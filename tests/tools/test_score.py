"""Claims about `open_clip_mdc score`, with a real model that is not trained."""
import csv
from pathlib import Path

import pytest
import torch
from conftest import complaint_of, json_lines, picture, run_folder
from PIL import Image

from open_clip_mdc.cli.score import read_captions
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.likelihood.log_likelihood import mean_image

CAPTIONS = ["a red circle left of a blue square", "a star", "a blue square up above a red star"]


@pytest.fixture(scope="module", params=["MDC-ViT-Ti-8", "ARC-ViT-Ti-8"])
def place(tmp_path_factory, request):
    """A run, a folder of 40 images, another of 5, and a file of captions."""
    folder = tmp_path_factory.mktemp("score")
    run_folder(folder / "run", request.param)
    for name, count in (("many", 40), ("few", 5)):
        for i in range(count):
            picture(folder / name / f"{i:02d}.png", i, 32)
    (folder / "captions.txt").write_text("\n".join(CAPTIONS) + "\n\n")
    return folder


def score(place, *argv) -> str | None:
    """The tool's complaint, None if it has none."""
    return complaint_of("score", "--pretrained", place / "run", "--captions", place / "captions.txt", "--device cpu",
                        *argv)


@pytest.mark.parametrize("flags", [(), ("--workers 0 --batch-size 3",)], ids=["default", "small batches"])
def test_every_column_is_the_models(place, tmp_path, flags):
    out = tmp_path / "scores.jsonl"
    assert score(place, "--images", place / "many", "--out", out, "--alpha 0.5", *flags) is None
    rows = json_lines(out)
    assert [(Path(row["image"]).stem, row["caption"]) for row in rows] == [
        (f"{i:02d}", caption) for i in range(40) for caption in CAPTIONS]
    model, transform, tokenizer = checkpoints.load(str(place / "run"))
    image = torch.stack([transform(Image.open(path)) for path in sorted((place / "many").iterdir())])
    text, blind = tokenizer(CAPTIONS), mean_image(model, [image])
    for i in (0, 7, 39):
        for c, caption in enumerate(CAPTIONS):
            row = rows[3 * i + c]
            assert row["score"] == pytest.approx(float(model.log_likelihood(image[i:i + 1], text[c:c + 1])), abs=1e-3)
            prior = float(model.log_likelihood(None, text[c][None, None], blind=blind))
            assert row["blind"] == pytest.approx(prior, abs=1e-3)
            assert row["debiased"] == pytest.approx(row["score"] - 0.5 * prior, abs=2e-3)
            assert sum(token["log_likelihood"] for token in row["tokens"]) == pytest.approx(row["score"], abs=1e-3)
            assert " ".join(token["token"] for token in row["tokens"]) == f"{caption} <end>"


@pytest.mark.parametrize("images", ["few", "few/00.png"])
def test_of_few_images_there_is_the_plain_score_alone(place, tmp_path, capsys, images):
    """The mean of one image is that image: blind equalled the plain score and debiased was 0, without a warning."""
    assert score(place, "--images", place / images, "--out", tmp_path / "few.csv") is None
    said = capsys.readouterr().err
    assert said.startswith("blind and debiased scores are left out: the mean of ") and said.count("\n") == 1
    assert score(place, "--images", place / "many", "--out", tmp_path / "many.csv", "--plain") is None
    assert score(place, "--images", place / "many", "--out", tmp_path / "all.csv") is None
    assert capsys.readouterr().err == ""
    few, many, whole = (list(csv.DictReader((tmp_path / f"{name}.csv").open())) for name in ("few", "many", "all"))
    assert list(few[0]) == list(many[0]) == ["image", "caption", "score", "tokens"]
    assert [row["score"] for row in many] == [row["score"] for row in whole]
    assert [float(row["score"]) for row in few] == pytest.approx(
        [float(row["score"]) for row in whole[:len(few)]], abs=1e-4)
    for path in tmp_path.iterdir():
        path.unlink()
    assert "32 or more" in score(place, "--images", place / "many", "--blind-images", place / "few", "--out",
                                 tmp_path / "s.csv")
    assert not list(tmp_path.iterdir())


def test_a_caption_is_a_line_whatever_else_ends_lines(tmp_path):
    (tmp_path / "c.txt").write_bytes("a\u2028b\x0bc\x85d\n\n e \r\n".encode())
    assert read_captions(str(tmp_path / "c.txt")) == ["a\u2028b\x0bc\x85d", "e"]
