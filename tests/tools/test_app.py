"""Claims about `open_clip_mdc app`, the page in a browser.    pytest tests/tools/test_app.py"""
import json
from contextlib import contextmanager

import numpy as np
import pytest
import requests
import torch
from conftest import BROWSER, complaint_of, make_image, needs_browser, picture, png, run_folder
from PIL import Image

import open_clip_mdc
from open_clip_mdc import errors
from open_clip_mdc.cli import app
from open_clip_mdc.likelihood.log_likelihood import mean_image

gradio = pytest.importorskip("gradio")
SHOWN = "text => document.querySelector('#caption textarea')?.value == text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("app")
    picture(folder / "photo.png", 3)
    (folder / "odd.png").write_bytes(b"\x89PNG no image")
    return folder


@pytest.fixture(scope="module")
def photo(folder) -> str:
    return str(folder / "photo.png")


@pytest.fixture(scope="module", params=["MDC-ViT-Ti-8", "ARC-ViT-Ti-8"])
def demo(request, tmp_path_factory) -> app.Demo:
    loaded = open_clip_mdc.load(run_folder(tmp_path_factory.mktemp("runs") / "run", request.param), device="cpu")
    blind = mean_image(loaded.model, loaded.batches([make_image(i) for i in range(32)]))
    return app.Demo(loaded, blind)


@contextmanager
def served(demo: app.Demo, folder, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(folder / "uploads"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    page = app.build(demo)
    try:
        yield app.launch(page, server_name="127.0.0.1")[1].rstrip("/")
    finally:
        page.close()


def test_the_caption_is_the_models_with_a_map_for_each_word_that_it_chose(demo, photo):
    caption, steps, words, maps = demo.caption(photo)
    expected = demo.loaded.trace([photo])[0]
    assert caption == expected["caption"] and words == [token["token"].strip() for token in expected["tokens"]]
    assert len(maps) == len(words) and maps[0].size == (32, 32)
    assert "sandbox" in steps and "http" not in steps.replace("http-equiv", "")


def test_masks_are_filled_in_around_what_was_given(demo, photo):
    if demo.loaded.model.causal:
        with pytest.raises(ValueError, match="which is autoregressive"):
            demo.caption(photo, "a [MASK]")
        return
    caption, _, words, _ = demo.caption(photo, "a red [MASK]")
    assert caption == demo.loaded.caption([photo], text="a red [MASK]")[0]
    assert demo.caption(photo, "a red <mask>")[0] == caption
    assert words == caption.split()[2:]
    with pytest.raises(ValueError, match="no \\[MASK\\]"):
        demo.caption(photo, "a red circle")


def test_sentences_are_ranked_by_the_debiased_score(demo, photo):
    lines = ["a red circle", "a blue square", "a red circle left of a blue square"]
    rows = demo.score(photo, "\n".join([lines[0], "", *lines[1:]]))
    plain = demo.loaded.score([photo], lines)[0]
    debiased = demo.loaded.score([photo], lines, kind="debiased", blind_images=demo.blind)[0]
    assert [row[0] for row in rows] == [lines[i] for i in debiased.argsort(descending=True)]
    for row in rows:
        assert row[1] == pytest.approx(plain[lines.index(row[0])].item(), abs=0.006)
        assert row[3] == pytest.approx(row[1] - row[2], abs=0.011)
    assert len(app.Demo(demo.loaded, None).score(photo, lines[0])[0]) == 2
    for wrong in "", None, "a\n" * 65, "a dog\n" + "ab " * 400:
        with pytest.raises(ValueError, match="1 to 64 sentences of at most 1000 characters"):
            demo.score(photo, wrong)
    with pytest.raises(ValueError, match="at most 1000 characters"):
        demo.caption(photo, "[MASK]" + "x" * 500_000)


def test_a_map_is_the_image_where_the_attention_was_and_dark_elsewhere():
    seen = np.asarray(app.highlight(Image.new("RGB", (4, 4), (200, 100, 50)), torch.tensor([[1.0, 0.0], [0.5, 0.0]])))
    assert (seen[:2, :2] == (200, 100, 50)).all() and (seen[:, 2:] == (60, 30, 15)).all() and 150 < seen[3, 0, 0] < 165


def test_a_map_leaves_the_whole_photograph_to_be_seen():
    """One patch has nearly all, as a sink of attention has. The others keep a third of their light, and their order."""
    weights = torch.tensor([[0.9, 0.05], [0.04, 0.01]])
    seen = np.asarray(app.highlight(Image.new("RGB", (2, 2), (200, 200, 200)), weights))[..., 0] / 200
    assert seen[0, 0] == 1 > seen[0, 1] > seen[1, 0] > seen[1, 1] > 0.33


def test_a_map_that_was_deleted_is_asked_for_again(demo):
    [show_map] = [each.fn for each in app.build(demo).fns.values() if each.name == "show_map"]
    assert show_map(0, ["a map"]) == "a map"
    with pytest.warns(UserWarning, match="caption the photograph again"):
        assert show_map(0, []) is None


def test_an_upload_is_captioned_and_a_large_one_is_refused(demo, folder, monkeypatch):
    with served(demo, folder, monkeypatch) as url:
        def upload(content: bytes) -> requests.Response:
            return requests.post(f"{url}/gradio_api/upload", files={"files": ("a.png", content)})
        [path] = upload(png(3)).json()
        data = [{"path": path, "meta": {"_type": "gradio.FileData"}}]
        event = requests.post(f"{url}/gradio_api/call/caption", json={"data": data}).json()["event_id"]
        said = requests.get(f"{url}/gradio_api/call/caption/{event}").text
        assert "event: complete" in said and json.dumps(demo.caption(path)[0]) in said
        assert upload(bytes(21 * 2 ** 20)).status_code == 413


@needs_browser
def test_in_a_browser_a_photograph_is_captioned_filled_in_and_scored(demo, folder, photo, monkeypatch):
    api = pytest.importorskip("playwright.sync_api")
    with served(demo, folder, monkeypatch) as url, api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page, asked = browser.new_page(), []
        page.set_default_timeout(150_000)  # also on a busy machine
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        first, expected = demo.caption(str(app.example())), demo.caption(photo)
        page.wait_for_function(SHOWN, arg=first[0])
        page.frame_locator("#steps iframe").locator("tr").nth(len(first[2]) + 1).wait_for()  # that of per cents
        page.set_input_files("#photograph input[type=file]", folder / "odd.png")
        page.get_by_text("cannot").first.wait_for()  # the message, and the rest stays
        assert page.evaluate(SHOWN, first[0]) and page.locator("#words label").count() == len(first[2])
        page.reload()
        page.wait_for_function(SHOWN, arg=first[0])
        page.set_input_files("#photograph input[type=file]", photo)
        page.wait_for_function(SHOWN, arg=expected[0])
        page.click("#words label >> nth=0")
        page.wait_for_selector("#where img")
        page.fill("#sentences textarea", "a red circle\na blue square")
        page.click("#rate")
        page.wait_for_function("document.querySelector('#scores').innerText.includes('a red circle')")
        if not demo.loaded.model.causal:
            filled = demo.caption(photo, "a [MASK] circle")[0]
            page.fill("#text textarea", "a [MASK] circle")
            page.click("#fill")
            page.wait_for_function(SHOWN, arg=filled)
        # Blue with white text of contrast 5.2, a ring around what has the focus, and no number out of sight.
        assert page.eval_on_selector("#ask", "button => getComputedStyle(button).backgroundColor") == "rgb(37, 99, 235)"
        for part in "#words input", "#sentences textarea":
            page.focus(part)
            page.keyboard.press("Shift")  # as from here on with the keyboard
            assert page.eval_on_selector(part, "part => getComputedStyle(part).outlineStyle") == "solid"
        page.set_viewport_size({"width": 390, "height": 800})
        page.wait_for_function("""document.querySelector('#scores thead').getBoundingClientRect().right < innerWidth &&
            document.querySelector('#where').getBoundingClientRect().left < 40""")
        assert all(each.startswith((url, "data:", "blob:", "about:")) for each in asked)
        browser.close()


def test_without_gradio_the_command_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    said = complaint_of("app")
    assert "pip install 'open_clip_mdc[app]'" in said and "\n" not in said
