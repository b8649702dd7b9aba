"""Claims about `open_clip_mdc attention` and its page."""
import base64
import io
import re
from html import escape

import numpy as np
import pytest
import torch
from conftest import complaint_of, picture, run_folder
from PIL import Image

import open_clip_mdc
from open_clip_mdc.decoding.attention_maps import principal_components, word_maps


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_folder(tmp_path_factory.mktemp("runs") / "mdc", "MDC-ViT-Ti-8")


@pytest.fixture
def folder(here):
    for number, name in enumerate(("a.png", "<b>.png"), 3):
        picture(here / "photos" / name, number, 32, 40)
    return here


def complaint(*argv) -> str | None:
    return complaint_of("attention", *argv, "--device cpu")


def pixels(url: str) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))))


def test_the_page_has_a_map_for_each_word_and_the_features(run, folder):
    assert complaint("--pretrained", run, "photos", "--length 4 --out page.html") is None
    page = (folder / "page.html").read_text()
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert "&lt;b&gt;.png" in page and "<b>.png" not in page
    articles = page.split("<article")[1:]
    model = open_clip_mdc.load(run)
    files = [folder / "photos" / name for name in ("<b>.png", "a.png")]
    image = next(model.batches(files))
    decoded = model.model.generate(image, length=4, repeats="avoid", return_trace=True)
    components = principal_components(model.encode_image_tokens(image))
    for article, maps, caption, own in zip(
            articles, word_maps(model.model, image, decoded), model.caption(files, length=4), components, strict=True):
        assert f">{escape(caption)}</h2>" in article
        features, *veils = re.findall(r'src="(data:image/png;base64,[^"]+)"', article)[1:]
        assert len(veils) == 4
        for url, weights in zip(veils, maps.attention.mean((1, 2)), strict=True):
            grey, alpha = np.moveaxis(pixels(url), -1, 0)
            assert grey.shape == (4, 4) and not grey.any()
            assert alpha.argmin() == weights.argmax() and alpha.min() == 0
            # The photograph is seen everywhere, and a patch is the lighter the more attention it has.
            visible, share = 1 - alpha.flatten() / 255, weights.numpy() / weights.max().item()
            assert visible.min() >= 0.295 and np.allclose(((visible - 0.3) / 0.7).clip(0) ** 2, share, atol=0.02)
        assert np.allclose(pixels(features).reshape(16, 3) / 255, (own / 4 + 0.5).clamp(0, 1), atol=0.005)


def test_a_given_word_has_no_map_and_the_image_is_what_the_model_sees(run, folder):
    assert complaint("--pretrained", run, "photos/a.png", "--text", "a [MASK] circle", "--out page.html") is None
    article = (folder / "page.html").read_text().split("<article")[1]
    assert article.count('class="given"') == 2 and article.count('class="tile"') == 1
    model = open_clip_mdc.load(run)
    shown = pixels(re.search(r'src="(data:image/png;base64,[^"]+)"', article)[1])
    own = model.transform(Image.open(folder / "photos/a.png"))
    assert shown.shape == (32, 32, 3) and torch.allclose(model.transform(Image.fromarray(shown)), own, atol=0.02)
