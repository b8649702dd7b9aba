"""Claims about `open_clip_mdc caption`.

The models are those of the scenes, untrained, with an output layer so large that predictions are clear.
"""
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import caption_files
import open_clip
import pytest
import torch
from caption_files import NAMES, PATHS, Page, column, lines, run, scene
from conftest import picture, run_folder, saved, write_json, write_tar
from PIL import Image
from safetensors.torch import save_file

from open_clip_mdc import progress
from open_clip_mdc.cli import caption
from open_clip_mdc.cli import page as report
from open_clip_mdc.data import images
from open_clip_mdc.decoding.clip_guidance import Clip, Guide
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.text.special_tokens import decode_captions

folder = pytest.fixture(caption_files.folder)


def facts():
    """Return what page.html says of its captions, by its label."""
    texts = Page(Path("page.html").read_text()).texts
    return dict(zip(texts["dt"], texts["dd"], strict=True))


def loaded(run):
    return checkpoints.load(str(run))


# ---- the lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias, options, arguments", [
    ("mdc", dict(repeats="avoid"), ()),
    ("mdc", dict(repeats="allow"), ("--repeats allow",)),
    ("mdc", dict(length="auto", tokens_per_step=3, repeats="avoid"), ("--length auto --tokens-per-step 3",)),
    ("arc", dict(length=6), ("--length 6",)),
], ids=["mdc", "repeats", "auto", "arc"])
def test_every_image_gets_the_caption_that_it_gets_alone(runs, folder, capsys, monkeypatch, alias, options, arguments):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("--pretrained", runs / alias, *PATHS, "--batch-size 3", *arguments) is None
    printed = capsys.readouterr().out.splitlines()
    model, transform, tokenizer = loaded(runs / alias)
    rows = lines()
    assert [row["image"] for row in rows] == list(NAMES)
    for number, row in enumerate(rows):
        alone = model.generate(transform(scene(number))[None], **options)
        assert row["caption"] == decode_captions(alone, tokenizer)[0]
        assert printed[number] == report.printable(f"{row['image']}: {row['caption']}")
    assert len({row["caption"] for row in rows}) > 1
    assert sorted(os.listdir()) == sorted(["5.tar", "6.tar", "captions.jsonl", "deep", "holiday[1].png", "x1.png",
                                           "x2.png"])


def test_a_log_file_gets_a_line_at_the_end_and_now_and_then_one_on_the_way(runs, folder, capsys, monkeypatch):
    """No captions, which are in --out, and no bar that is drawn again and again."""
    assert run("--pretrained", runs / "mdc", *PATHS, "--batch-size 2 --length 3") is None
    out, err = capsys.readouterr()
    assert out == "7 captions: captions.jsonl\n" and err == ""
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert run("--pretrained", runs / "mdc", "x1.png", "--out one.jsonl --length 3") is None
    out, err = capsys.readouterr()
    assert out == "1 caption: one.jsonl\n" and "\r" not in err
    assert re.fullmatch(r"captions: 1 of 1 images, \d\d:\d\d gone, 00:00 to go, +\d+\.\d\d( images/s| s/image)",
                        err.splitlines()[-1])


def test_the_time_to_go_of_a_resumed_run_does_not_count_what_was_done(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with progress.progress_bar(total=2000) as bar:
        for images in (1900, 1, 1, 1, 1):
            bar.update(images)
            time.sleep(0.1)  # of each image, so that 96 take 10 s
    minutes, seconds = re.findall(r"(\d\d):(\d\d) to go", capsys.readouterr().err)[-2]  # the last has the mean rate
    assert int(minutes) * 60 + int(seconds) >= 9


def test_the_length_of_a_model_that_has_learnt_to_choose_is_its_choice(runs, folder):
    run("--pretrained", runs / "mdc", *PATHS, "--html page.html")
    chosen = lines()
    assert facts()["Length"].startswith("auto (")
    run("--pretrained", runs / "mdc", *PATHS, "--out auto.jsonl --length auto")
    assert chosen == lines("auto.jsonl") and any(len(row["tokens"]) != 15 for row in chosen)


@pytest.mark.parametrize("alias", ["mdc", "arc"])
def test_consensus_writes_the_draw_that_the_other_draws_are_most_like(runs, folder, alias):
    draws = ("--length 6 --temperature 1 --samples 4 --select consensus --batch-size 3",)
    run("--pretrained", runs / alias, *PATHS, *draws, "--html page.html")
    assert (facts()["Samples"], facts()["Select"]) == ("4", "consensus")
    model, transform, tokenizer = loaded(runs / alias)
    args = caption.argparse.Namespace(seed=0, temperature=1.0, top_k=None, top_p=None)
    repeats = {} if model.causal else {"repeats": "avoid"}
    rows = column("caption")
    for names in (NAMES[:3], NAMES[3:6]):
        image = torch.stack([transform(scene(NAMES.index(name))) for name in names])
        text = model.generate(image, length=6, samples=4, select="consensus", **repeats, sampling=caption.sampling_of(
            args, list(names), "cpu"))
        assert decode_captions(text, tokenizer) == rows[NAMES.index(names[0]):][:3]


def test_consensus_of_lengths_needs_no_temperature_and_is_the_default_of_a_model_that_has_learnt_them(runs, folder):
    run("--pretrained", runs / "mdc", "x1.png", "--samples 3 --select consensus")
    model, transform, tokenizer = loaded(runs / "mdc")
    text = model.generate(transform(scene(NAMES.index("x1.png")))[None], length="top", samples=3, select="consensus",
                          repeats="avoid")
    assert column("caption") == decode_captions(text, tokenizer)


def test_a_page_names_no_folder_of_the_machine(runs, folder, tmp_path, monkeypatch):
    picture(tmp_path / "page/in.png", 3)
    (tmp_path / "bad.png").write_bytes(b"no image")
    images = [tmp_path / name for name in ("x1.png", "page/in.png", "5.tar", "bad.png")]
    run("--pretrained", runs / "mdc/checkpoints/epoch_1.pt", *images, "--length 3 --out", tmp_path / "plain.jsonl")
    monkeypatch.chdir(tmp_path)  # other spellings of the same images
    images[0] = "x1.png"
    run("--pretrained", runs / "mdc", *images, "--length 3 --html", tmp_path / "page/p.html", "--compare",
        tmp_path / "plain.jsonl")
    text = (tmp_path / "page/p.html").read_text()
    assert str(tmp_path) not in text and str(runs) not in text
    assert {"x1.png", "in.png", "plain.jsonl"} <= set(Page(text).texts["p"]) and "cannot read the image bad.png" in text
    assert "5.tar::" in text
    assert report.shown(f"{runs}/mdc/checkpoints/epoch_1.pt", "p.html") == "mdc/checkpoints/epoch_1.pt"
    assert report.shown(f"local-dir:{runs}/exported", "p.html") == "local-dir:exported"
    assert report.shown("hf-hub:org/name", "p.html") == "hf-hub:org/name"


def test_the_title_names_a_captioner_of_a_folder_without_the_folder_it_is_in(folder):
    run("x1.png", "--html p.html")  # by the package's own
    assert Page(Path("p.html").read_text()).texts["h1"] == ["Captions by photo"]


def test_a_caption_written_left_to_right_adds_up_to_its_likelihood_with_its_end(runs, folder):
    run("--pretrained", runs / "arc", "x1.png", "--length 6")
    model, transform, tokenizer = loaded(runs / "arc")
    (row,) = lines()
    image = transform(scene(2))[None]
    likelihood = model.log_likelihood(image, model.generate(image, length=6))
    assert sum(token["log_prob"] for token in row["tokens"]) == pytest.approx(float(likelihood), abs=1e-4)
    assert [token["step"] for token in row["tokens"]] == list(range(len(row["tokens"])))
    assert row["tokens"][-1]["token"] == "<end>"


def test_words_that_are_given_stay_and_have_neither_step_nor_probability(runs, folder):
    run("--pretrained", runs / "mdc", "x1.png", "x2.png", "--text", "a [MASK] circle left of [MASK]")
    for row in lines():
        assert [token["token"] for token in row["tokens"] if token["step"] is None] == ["a ", "circle ", "left ", "of "]
        assert {token["step"] for token in row["tokens"]} == {None, 0, 1}
        assert all((token["step"] is None) == (token["log_prob"] is None) for token in row["tokens"])


def test_drawn_and_guided_captions_are_those_of_the_seed_and_the_page_says_how(runs, folder):
    command = ("x1.png", "x2.png", "--length 5 --html page.html --pretrained")
    run_folder(folder / "cfg", "MCD-ViT-Ti-8-cfg")
    for model, options, order, uncond in (
            (runs / "mdc", ("--sampler ancestral --temperature 1",), {"Temperature": "1.0"}, None),
            (runs / "mcd", ("--sampler ancestral --steps 4 --guidance-scale 3",),
             {"Order": "draws from the reverse diffusion", "Sampler": "ancestral", "Steps": "4"}, "masked_image"),
            ("cfg", ("--guidance-scale 3 --uncond null_image",),
             {"Order": "reveals the most confident tokens first", "Guidance scale": "3.0"}, "null_image")):
        found = []
        for seed in "001":
            assert run(*command, model, *options, "--seed", seed) is None
            found.append(lines())
        assert order.items() <= facts().items() and facts().get("Uncond") == uncond
        assert found[0] == found[1] and (found[1] == found[2]) == (model == "cfg")  # which draws nothing


def test_the_mean_image_of_guidance_takes_the_first_images_and_skips_what_cannot_be_read(runs, here, monkeypatch):
    """It read all the images before the first caption, whatever --limit, and one that is broken ended the run."""
    for number in range(40):
        scene(number).save(f"{number:02d}.png")
    Path("20.png").write_bytes(b"no image")
    opened, decode = [], images.decode_image
    monkeypatch.setattr(images, "decode_image", lambda *a, **k: opened.append(a[0]) or decode(*a, **k))
    monkeypatch.setattr(caption.decoding, "NULL_IMAGES", 35)
    command = ("??.png", "--length 4 --workers 0 --limit 3 --pretrained", runs / "mdc")
    assert run(*command, "--guidance-scale 2") is None
    assert column("image") == ["00.png", "01.png", "02.png"] and len(opened) == 35 + 3
    assert "cannot read the image 20.png" in run(*command, "--guidance-scale 2 --blind-images ??.png")


@pytest.mark.parametrize("options, said", [
    ((), {}), (("--tokens-per-step 3",), {"Tokens per step": "3"}),
    (("--tokens-per-step 0.0 --temperature 1",), {"Tokens per step": "0.0", "Temperature": "1.0"}),
    (("--repeats allow --seed 3",), {"Repeats": "allow", "Seed": "3"})])
def test_the_page_says_what_was_asked_for_and_no_default(runs, folder, options, said):
    run("--pretrained", runs / "mdc", "x1.png", "--length 3 --html page.html", *options)
    assert facts() == {"Checkpoint": "mdc", "Images": "1", "Order": "reveals the most confident tokens first",
                       "Length": "3", "Repeats": "avoid", **said}


# ---- with CLIP -----------------------------------------------------------------------------------------------------


def test_clip_guides_by_its_own_view_of_each_image_and_the_lines_say_what_it_cost(runs, folder):
    """CLIP's image size is one that the captioner's transform does not make."""
    Path("big").mkdir()
    clip, _, big = open_clip.create_model_and_transforms("ViT-Ti-8", force_image_size=48)
    save_file(clip.state_dict(), "big/open_clip_model.safetensors")
    write_json("big/open_clip_config.json", {
        "model_cfg": {**open_clip.get_model_config("ViT-Ti-8"), "vision_cfg": {
            **open_clip.get_model_config("ViT-Ti-8")["vision_cfg"], "image_size": 48}}, "preprocess_cfg": {}})
    command = ("--pretrained", runs / "mdc", *PATHS, "--length 4 --clip local-dir:big --clip-scale 2")
    assert run(*command, "--batch-size 3") is None
    model, transform, tokenizer = loaded(runs / "mdc")
    for number, line in enumerate(lines()):
        guide = Guide(Clip(clip.eval(), big, tokenizer), big(scene(number))[None], tokenizer, 2.0)
        alone = model.generate(transform(scene(number))[None], length=4, guide=guide, repeats="avoid")
        assert line["caption"] == decode_captions(alone, tokenizer)[0] and [line["clip_texts"]] == guide.texts


def test_captions_of_two_commands_stand_side_by_side_on_the_page(runs, folder):
    command = ("--pretrained", runs / "mdc", *PATHS, "--length 4")
    run(*command, "--out plain.jsonl --limit 6")
    torch.manual_seed(3)
    torch.save(open_clip.create_model("ViT-Ti-8").state_dict(), "clip.pt")
    clip = ("--clip ViT-Ti-8:clip.pt --clip-scale 3 --clip-rerank 2 --temperature 1",)
    assert run(*command, *clip, "--html page.html --compare plain.jsonl") is None
    page = Page(Path("page.html").read_text())
    plain = column("caption", "plain.jsonl") + [None]
    shown = [caption for pair in zip(column("caption"), plain, strict=True) for caption in pair]
    assert page.texts["h2"] == [report.printable(caption) for caption in shown if caption is not None]
    assert sum(attributes.get("class") == "pair" for tag, attributes in page.tags if tag == "article") == 6
    texts = sum(line["clip_texts"] for line in lines()) / 7
    told = facts()
    assert told["Clip"] == f"ViT-Ti-8:clip.pt, {texts:.1f} texts per caption" and told["Compared with"] == "plain.jsonl"
    assert (told["Clip scale"], told["Clip rerank"]) == ("3.0", "2")


# ---- images that are none ----------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_listed_and_all_else_is_captioned(runs, folder):
    whole = saved(scene(1))
    Path("empty.png").write_bytes(b"")
    Path("text.png").write_text("no image\x1b[2J")
    Path("cut.png").write_bytes(whole[:len(whole) // 2])
    Image.new("RGB", (4, 500)).save("thin.png")
    write_tar(Path("bad.tar"), {"good.png": whole, "broken.png": b"xx", "third.png": whole, "other.png": whole})
    Path("bad.tar").write_bytes(Path("bad.tar").read_bytes()[:3 * len(whole)])
    complaint = run("--pretrained", runs / "mdc", "empty.png", "text.png", "x1.png", "cut.png", "thin.png", "bad.tar",
                    "x2.png", "--length 3 --html page.html --batch-size 2")
    assert column("image") == ["x1.png", "bad.tar::good", "x2.png"]
    listed = complaint.splitlines()
    assert listed[0] == "error: 6 skipped, all else is written:" and len(listed) == 7
    for line, name in zip(listed[1:], ("empty.png", "text.png", "cut.png", "thin.png", "bad.tar::broken", "bad.tar"),
                          strict=True):
        assert name in line and line.isprintable()
    page = Path("page.html").read_text()
    assert page.count("<article>") == 3 and "not a complete tar" in page
    assert len(re.findall("<li>cannot (?:read|use) the image", page)) == 5


def test_a_caption_waits_for_no_code_of_training_or_of_tables(runs, tmp_path):
    picture(tmp_path / "photo.png", 0)
    code = "import sys\nfrom open_clip_mdc.cli import main\nmain(sys.argv[1:])\nprint('modules', *sys.modules)"
    said = subprocess.run([sys.executable, "-c", code, "caption", "photo.png", "--pretrained", runs / "mdc", "--length",
                           "4", "--workers", "0", "--out", "x.jsonl"], cwd=tmp_path, capture_output=True, text=True)
    imported = {name.partition(".")[0] for name in said.stdout.split("modules")[-1].split()}
    assert "torch" in imported and (tmp_path / "x.jsonl").exists()
    assert not imported & {"open_clip_train", "pandas", "scipy", "pyarrow", "matplotlib", "sklearn"}
