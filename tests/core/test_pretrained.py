"""Claims about `open_clip_mdc.load`."""
import re

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import complaint_of, made_images, make_image, picture, refused, run_folder
from PIL import Image
from torch.testing import assert_close

import open_clip_mdc
from open_clip_mdc.likelihood.log_likelihood import mean_image
from open_clip_mdc.text.special_tokens import decode_captions

IMAGES = [make_image(i, 50, 60) for i in range(5)]
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


def transformed(model) -> torch.Tensor:
    return made_images(model.transform, 5, 50, 60)


def test_a_run_is_loaded_with_its_size_context_and_mean(model):
    assert model.model.visual.image_size == (48, 48) and model.model.context_length == 20
    assert model.tokenizer(WORDS).shape == (2, 20)
    assert model.model.visual.preprocess_cfg["mean"] == [0.4, 0.5, 0.6]
    grey = model.transform(Image.new("RGB", (9, 9), (102, 128, 153)))
    assert grey.shape == (3, 48, 48) and grey.abs().max() < 0.02  # 102 / 255 = 0.4


@pytest.mark.parametrize("place", ["epoch_1.pt", ".."])
@pytest.mark.parametrize("name", [None, "MDC-ViT-Ti-8"])
def test_a_run_is_loaded_as_it_was_trained_from_within_its_folder(place, name, run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    test_a_run_is_loaded_with_its_size_context_and_mean(open_clip_mdc.load(place, name))


def test_a_checkpoint_that_is_a_link_belongs_to_the_run_that_it_stands_in(run, folder):
    linked = folder / "linked"
    (linked / "checkpoints").mkdir(parents=True)
    (linked / "params.txt").write_text((run / "params.txt").read_text().replace("0.4", "0.3"))
    (linked / "checkpoints/epoch_1.pt").symlink_to(run / "checkpoints/epoch_1.pt")
    assert open_clip_mdc.load(linked).model.visual.preprocess_cfg["mean"] == [0.3, 0.5, 0.6]


def test_files_arrays_folders_tensors_and_lists_of_all_kinds_are_images(model, tmp_path):
    (tmp_path / "in").mkdir()
    for name, image in zip(("b.png", "in/a.png"), IMAGES, strict=False):
        image.save(tmp_path / name)
    features, array = model.encode_image(IMAGES), np.stack(IMAGES)
    preprocessed, file = model.transform(IMAGES[0]), tmp_path / "b.png"
    for one in (IMAGES[0], IMAGES[0].convert("RGBA"), file, str(file), array[0], preprocessed, preprocessed[None]):
        assert torch.allclose(model.encode_image(one), features[:1], atol=1e-6)
    mixed = [str(tmp_path), array[2], file, IMAGES[3], preprocessed.double(), preprocessed[None]]
    for given, which in ((array, slice(None)), (iter(IMAGES), slice(None)), (tmp_path, [0, 1]),
                         (mixed, [0, 1, 2, 0, 3, 0, 0])):
        assert torch.equal(model.encode_image(given), features[which])
    assert model.encode_image_tokens(IMAGES[0]).mean(1).sub(features[0]).abs().max() < 1e-6
    grey = array[0, ..., 0]
    assert torch.equal(model.encode_image([grey, grey[..., None], Image.fromarray(grey)]),
                       model.encode_image(np.repeat(grey[..., None], 3, 2)).expand(3, -1))


def test_captions_are_those_of_generate_whatever_the_batch(model):
    def generated(**options):
        return decode_captions(model.model.generate(transformed(model), **options), model.tokenizer)

    assert model.caption(IMAGES, repeats="allow") == generated() != model.caption(IMAGES)
    for options in ({}, {"length": 4, "tokens_per_step": 2}, {"length": "auto"}):
        expected = generated(repeats="avoid", **options)
        assert model.caption(IMAGES, **options) == model.caption(IMAGES, batch_size=2, **options) == expected
    assert len(set(expected)) > 1
    filled = model.trace(IMAGES[0], text="a [MASK] circle")[0]
    assert re.fullmatch("a .* circle", filled["caption"])
    assert [token["step"] for token in filled["tokens"]] == [None, 0, None]
    drawn = [model.caption(IMAGES, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_scores_are_the_log_likelihoods(model):
    expected = model.model.log_likelihood(transformed(model), model.tokenizer(WORDS).expand(5, -1, -1))
    assert torch.allclose(model.score(IMAGES, WORDS, batch_size=2), expected, atol=1e-4)
    swapped = [WORDS if i % 2 else WORDS[::-1] for i in range(5)]
    own = model.score(IMAGES, swapped, batch_size=2)
    assert torch.allclose(own[1::2], expected[1::2], atol=1e-4)
    assert torch.allclose(own[::2], expected[::2].flip(1), atol=1e-4)
    for one in (WORDS[0], [WORDS[0]], np.array(WORDS[:1])):  # one caption is a list of one
        assert torch.allclose(model.score(IMAGES, one), expected[:, :1], atol=1e-4)
    assert "5 images, but captions for 4" in refused(ValueError, model.score, IMAGES, swapped[:4])
    said = refused(ValueError, model.score, IMAGES, ["a circle " * 20])
    assert "caption 1 has " in said and " the model reads at most 20" in said


@pytest.fixture(scope="module")
def many(folder):
    """A folder of 40 images."""
    for i in range(40):
        picture(folder / f"many/{i:02d}.png", i)
    return folder / "many"


def test_blind_and_debiased_scores_are_those_of_the_command(model, run, many, tmp_path):
    (tmp_path / "captions.txt").write_text("\n".join(WORDS))
    assert not complaint_of(*f"score --pretrained {run} --images {many} --captions {tmp_path}/captions.txt --alpha 0.5 "
                            f"--out {tmp_path}/s.csv --device cpu --workers 0".split())
    table = pd.read_csv(tmp_path / "s.csv", dtype=np.float32, usecols=["score", "blind", "debiased"])
    for column, given in {"score": {}, "blind": {"kind": "blind"},
                          "debiased": {"kind": "debiased", "alpha": 0.5}}.items():
        found = model.score(many, WORDS, **given)
        assert_close(found.flatten(), torch.tensor(table[column]), rtol=0, atol=1e-4)
    mean, plain = model.mean_image(many), model.score(IMAGES, WORDS)
    assert_close(mean, mean_image(model.model, [made_images(model.transform, 40)]), rtol=0, atol=1e-5)
    blind = model.model.log_likelihood(None, model.tokenizer(WORDS)[None], blind=mean)
    for others in (many, mean):
        found = model.score(IMAGES, WORDS, kind="debiased", blind_images=others)
        assert_close(found, plain - blind, rtol=0, atol=1e-4)
    own = model.score(IMAGES[:2], [WORDS, WORDS[::-1]], kind="blind", blind_images=mean)
    assert_close(own, torch.cat((blind, blind.flip(1))), rtol=0, atol=1e-4)
    guided = decode_captions(model.model.generate(model.transform(IMAGES[0])[None], length=5, guidance_scale=3.0,
                                                  blind=mean), model.tokenizer)
    assert model.caption(IMAGES[0], length=5, guidance_scale=3.0, blind_images=many) == guided


def test_the_length_is_the_models_choice_where_it_has_learnt_to_choose(model, folder, monkeypatch):
    """ARC ends its captions by itself. Its maximum length is the context, as before."""
    assert model.caption(IMAGES) == model.caption(IMAGES, length="auto") != model.caption(IMAGES, length=15)
    arc = open_clip_mdc.load(run_folder(folder / "arc", "ARC-ViT-Ti-8"))
    assert arc.caption(IMAGES[:2]) == arc.caption(IMAGES[:2], length="auto")
    head = model.model.length_head
    monkeypatch.setattr(head, "weight", torch.nn.Parameter(torch.zeros_like(head.weight)))
    assert model.caption(IMAGES) == model.caption(IMAGES, length=15)


def test_features_are_of_any_kind_and_layer(model):
    assert torch.equal(model.features(IMAGES), model.encode_image(IMAGES))
    assert torch.equal(model.features(IMAGES, kind="patches", batch_size=2), model.encode_image_tokens(IMAGES, 2))
    visual = model.model.visual
    with torch.inference_mode():
        hidden = visual._embeds(transformed(model))
        for layer, block in enumerate(visual.transformer.resblocks):
            hidden = block(hidden)
            tokens = visual.ln_post(hidden)
            expected = {"gap": tokens[:, 1:].mean(1), "cls": tokens[:, 0], "patches": tokens[:, 1:]}
            for asked in (layer, layer - len(visual.transformer.resblocks)):
                found = {kind: model.features(IMAGES, kind, asked) for kind in expected}
                assert_close(found, expected, rtol=0, atol=1e-5)


IMAGE = torch.zeros(3, 48, 48)
MISUSES = [  # the method, the error, what its one line names, what is given
    ("score", ValueError, "no captions", dict(captions=[[]])),
    ("score", TypeError, "captions", dict(captions={"a": "dog"})),
    ("score", TypeError, "'3'", dict(captions=["a dog", 3])),
    ("score", ValueError, "same number", dict(images=[IMAGE, IMAGE], captions=[["a dog"], ["a", "b"]])),
    ("score", TypeError, "'methd'", dict(captions="a", methd="bound")),
    ("score", ValueError, "'bias'", dict(captions="a", kind="bias")),
    ("score", ValueError, "blind_images", dict(captions="a", kind="debiased")),
    ("score", ValueError, "[2, 3]", dict(captions="a", kind="blind", blind_images=torch.zeros(2, 3))),
    ("score", ValueError, "alpha", dict(captions="a", alpha=0.5)),
    ("score", TypeError, "num_samples", dict(captions="a", num_samples=1.5)),
    ("score", ValueError, "num_samples changes nothing", dict(captions="a", num_samples=9)),
    ("caption", ValueError, "num_beams", dict(num_beams=2)),
    ("caption", ValueError, "from 1 to 18", dict(length=19)),
    ("caption", TypeError, "temperature", dict(temperature="hot")),
    ("caption", TypeError, "MASK", dict(text=["a [MASK]"])),
    ("features", ValueError, "kind", dict(kind="mean")),
    ("features", ValueError, "layer", dict(layer=1.0)),
    ("caption", ValueError, "no images", dict(images=[])),
    ("caption", TypeError, "no image", dict(images=[None])),
    ("caption", ValueError, "download", dict(images="https://x.org/cat.jpg")),
    ("caption", ValueError, "0.tar", dict(images="0.tar")),
    ("caption", FileNotFoundError, "nowhere.jpg", dict(images="nowhere.jpg")),
    ("caption", ValueError, "tensor", dict(images=torch.zeros(48, 48, 3))),
    ("caption", ValueError, "uint8", dict(images=IMAGE.byte())),
    ("caption", ValueError, "channels last", dict(images=np.zeros((3, 48, 48), np.uint8))),
    ("caption", ValueError, "float64", dict(images=np.zeros((9, 9, 3)))),
    ("caption", ValueError, "9 x 2000", dict(images=Image.new("RGB", (9, 2000)))),
]


def test_a_misuse_is_one_line(model, here):
    for method, error, words, given in MISUSES:
        said = refused(error, getattr(model, method), **{"images": IMAGE} | given)
        assert words in said and "unmask_images" not in said, said


def test_what_cannot_be_loaded_is_said(run, here):
    make_image(0).save("0.png")
    for words, options in {
            "precision is 'fp64': it must be fp32, bf16, fp16": {"precision": "fp64"},
            "precision is 16: it must be fp32, bf16, fp16": {"precision": 16},
            "gpu is no device: give cpu, cuda": {"device": "gpu"}, "0 is no device: give cpu, cuda": {"device": 0},
            "compile is True: it must be False on cpu": {"device": "cpu", "compile": True},
            "pretrained is empty: give a run folder": {"pretrained": ""}, "not NoneType": {"pretrained": None},
            "give a checkpoint file or a run of open_clip_train": {"pretrained": here}}.items():
        assert words in refused((ValueError, TypeError, FileNotFoundError), open_clip_mdc.load, **{
            "pretrained": run, **options})
    assert open_clip_mdc.load(run, device=torch.device("cpu"), precision="fp16").precision == "fp16"


def test_the_device_and_the_precision_can_be_chosen(run):
    """bfloat16 rounds the features. The decoder stays in float32."""
    plain, rounded = (open_clip_mdc.load(run, device="cpu", precision=p) for p in ("fp32", "bf16"))
    a, b = (model.encode_image(IMAGES) for model in (plain, rounded))
    assert 0 < (a - b).abs().max() < 0.1 and b.dtype == torch.float32
