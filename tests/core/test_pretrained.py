"""Claims about `open_clip_mdc.load`."""
import csv

import numpy as np
import pytest
import torch
from conftest import complaint_of, made_images, make_image, picture, run_folder
from PIL import Image

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


def test_a_run_is_loaded_with_its_size_context_and_mean(model):
    assert model.model.visual.image_size == (48, 48) and model.model.context_length == 20
    assert model.tokenizer(WORDS).shape == (2, 20)
    assert model.model.visual.preprocess_cfg["mean"] == [0.4, 0.5, 0.6]
    grey = model.transform(Image.new("RGB", (9, 9), (102, 128, 153)))
    assert grey.shape == (3, 48, 48) and grey.abs().max() < 0.02  # 102 / 255 = 0.4


@pytest.mark.parametrize("place", ["epoch_1.pt", ".."])
def test_a_run_is_loaded_as_it_was_trained_from_within_its_folder(place, run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    for model_name in (None, "MDC-ViT-Ti-8"):
        model = open_clip_mdc.load(place, model_name).model
        assert model.visual.image_size == (48, 48) and model.context_length == 20
        assert model.visual.preprocess_cfg["mean"] == [0.4, 0.5, 0.6]


def test_a_checkpoint_that_is_a_link_belongs_to_the_run_that_it_stands_in(run, folder):
    (folder / "linked" / "checkpoints").mkdir(parents=True)
    (folder / "linked" / "params.txt").write_text((run / "params.txt").read_text().replace("0.4", "0.3"))
    (folder / "linked" / "checkpoints" / "epoch_1.pt").symlink_to(run / "checkpoints" / "epoch_1.pt")
    assert open_clip_mdc.load(folder / "linked").model.visual.preprocess_cfg["mean"] == [0.3, 0.5, 0.6]


def test_files_arrays_folders_tensors_and_lists_of_all_kinds_are_images(model, tmp_path):
    (tmp_path / "in").mkdir()
    for name, image in zip(("b.png", "in/a.png"), IMAGES, strict=False):
        image.save(tmp_path / name)
    features, array = model.encode_image(IMAGES), np.stack([np.asarray(x) for x in IMAGES])
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
    image = torch.stack([model.transform(x) for x in IMAGES])
    plain = decode_captions(model.model.generate(image), model.tokenizer)
    assert model.caption(IMAGES, repeats="allow") == plain != model.caption(IMAGES)
    for options in ({}, {"length": 4, "tokens_per_step": 2}, {"length": "auto"}):
        expected = decode_captions(model.model.generate(image, repeats="avoid", **options), model.tokenizer)
        assert model.caption(IMAGES, **options) == model.caption(IMAGES, batch_size=2, **options) == expected
    assert len(set(expected)) > 1
    filled = model.trace(IMAGES[0], text="a [MASK] circle")[0]
    assert filled["caption"].split()[0] == "a" and filled["caption"].split()[-1] == "circle"
    assert [token["step"] for token in filled["tokens"]] == [None, 0, None]
    drawn = [model.caption(IMAGES, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_scores_are_the_log_likelihoods(model):
    image, text = torch.stack([model.transform(x) for x in IMAGES]), model.tokenizer(WORDS)
    expected = model.model.log_likelihood(image, text.expand(5, -1, -1))
    assert torch.allclose(model.score(IMAGES, WORDS, batch_size=2), expected, atol=1e-4)
    swapped = [WORDS if i % 2 else WORDS[::-1] for i in range(5)]
    own = model.score(IMAGES, swapped, batch_size=2)
    assert torch.allclose(own[1::2], expected[1::2], atol=1e-4)
    assert torch.allclose(own[::2], expected[::2].flip(1), atol=1e-4)
    for one in (WORDS[0], [WORDS[0]], np.array(WORDS[:1])):  # one caption is a list of one
        assert torch.allclose(model.score(IMAGES, one), expected[:, :1], atol=1e-4)
    with pytest.raises(ValueError, match="5 images, but captions for 4"):
        model.score(IMAGES, swapped[:4])
    with pytest.raises(ValueError, match="caption 1 has .* the model reads at most 20"):
        model.score(IMAGES, ["a circle " * 20])


@pytest.fixture(scope="module")
def many(folder):
    """A folder of 40 images."""
    for i in range(40):
        picture(folder / "many" / f"{i:02d}.png", i)
    return folder / "many"


def test_blind_and_debiased_scores_are_those_of_the_command(model, run, many, tmp_path):
    texts = tmp_path / "captions.txt"
    texts.write_text("\n".join(WORDS))
    assert complaint_of("score", "--pretrained", run, "--images", many, "--captions", texts, "--alpha", "0.5", "--out",
                        tmp_path / "s.csv", "--device", "cpu", "--workers", "0") is None
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    for kind, column, more in (("plain", "score", {}), ("blind", "blind", {}),
                               ("debiased", "debiased", {"alpha": 0.5})):
        theirs = torch.tensor([float(row[column]) for row in rows]).view(40, 2)
        torch.testing.assert_close(model.score(many, WORDS, kind=kind, **more), theirs, rtol=0, atol=1e-4)
    mean, plain = model.mean_image(many), model.score(IMAGES, WORDS)
    by_hand = mean_image(model.model, [made_images(model.transform, 40)])
    torch.testing.assert_close(mean, by_hand, rtol=0, atol=1e-5)
    blind = model.model.log_likelihood(None, model.tokenizer(WORDS)[None], blind=mean)
    for others in (many, mean):
        found = model.score(IMAGES, WORDS, kind="debiased", blind_images=others)
        torch.testing.assert_close(found, plain - blind, rtol=0, atol=1e-4)
    own = model.score(IMAGES[:2], [WORDS, WORDS[::-1]], kind="blind", blind_images=mean)
    torch.testing.assert_close(own, torch.cat((blind, blind.flip(1))), rtol=0, atol=1e-4)
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
    image = torch.stack([model.transform(x) for x in IMAGES])
    assert torch.equal(model.features(IMAGES), model.encode_image(IMAGES))
    assert torch.equal(model.features(IMAGES, kind="patches", batch_size=2), model.encode_image_tokens(IMAGES, 2))
    visual = model.model.visual
    with torch.inference_mode():
        hidden = visual._embeds(image)
        for layer, block in enumerate(visual.transformer.resblocks):
            hidden = block(hidden)
            tokens = visual.ln_post(hidden)
            expected = {"gap": tokens[:, 1:].mean(1), "cls": tokens[:, 0], "patches": tokens[:, 1:]}
            for kind, value in expected.items():
                for asked in (layer, layer - len(visual.transformer.resblocks)):
                    torch.testing.assert_close(model.features(IMAGES, kind, asked), value, rtol=0, atol=1e-5)


IMAGE = torch.zeros(3, 48, 48)
MISUSES = [  # what is done, the error, what its one line names
    (lambda m: m.score(IMAGE, [[]]), ValueError, "no captions"),
    (lambda m: m.score(IMAGE, {"a": "dog"}), TypeError, "captions"),
    (lambda m: m.score(IMAGE, ["a dog", 3]), TypeError, "'3'"),
    (lambda m: m.score([IMAGE, IMAGE], [["a dog"], ["a", "b"]]), ValueError, "same number"),
    (lambda m: m.score(IMAGE, "a", methd="bound"), TypeError, "'methd'"),
    (lambda m: m.score(IMAGE, "a", kind="bias"), ValueError, "'bias'"),
    (lambda m: m.score(IMAGE, "a", kind="debiased"), ValueError, "blind_images"),
    (lambda m: m.score(IMAGE, "a", kind="blind", blind_images=torch.zeros(2, 3)), ValueError, r"\[2, 3\]"),
    (lambda m: m.score(IMAGE, "a", alpha=0.5), ValueError, "alpha"),
    (lambda m: m.score(IMAGE, "a", num_samples=1.5), TypeError, "num_samples"),
    (lambda m: m.score(IMAGE, "a", num_samples=9), ValueError, "num_samples changes nothing"),
    (lambda m: m.caption(IMAGE, num_beams=2), ValueError, "num_beams"),
    (lambda m: m.caption(IMAGE, length=19), ValueError, "from 1 to 18"),
    (lambda m: m.caption(IMAGE, temperature="hot"), TypeError, "temperature"),
    (lambda m: m.caption(IMAGE, text=["a [MASK]"]), TypeError, "MASK"),
    (lambda m: m.features(IMAGE, "mean"), ValueError, "kind"),
    (lambda m: m.features(IMAGE, layer=1.0), ValueError, "layer"),
    (lambda m: m.caption([]), ValueError, "no images"),
    (lambda m: m.caption([None]), TypeError, "no image"),
    (lambda m: m.caption("https://x.org/cat.jpg"), ValueError, "download"),
    (lambda m: m.caption("0.tar"), ValueError, "0.tar"),
    (lambda m: m.caption("nowhere.jpg"), FileNotFoundError, "nowhere.jpg"),
    (lambda m: m.caption(torch.zeros(48, 48, 3)), ValueError, "tensor"),
    (lambda m: m.caption(IMAGE.byte()), ValueError, "uint8"),
    (lambda m: m.caption(np.zeros((3, 48, 48), np.uint8)), ValueError, "channels last"),
    (lambda m: m.caption(np.zeros((9, 9, 3))), ValueError, "float64"),
    (lambda m: m.caption(Image.new("RGB", (9, 2000))), ValueError, "9 x 2000"),
]


def test_a_misuse_is_one_line(model, here):
    for misuse, error, words in MISUSES:
        with pytest.raises(error, match=words) as raised:
            misuse(model)
        assert "\n" not in str(raised.value) and "unmask_images" not in str(raised.value)


def test_what_cannot_be_loaded_is_said(run, here):
    make_image(0).save("0.png")
    for options, error, words in (
            ({"precision": "fp64"}, ValueError, "precision is 'fp64': it must be fp32, bf16, fp16"),
            ({"precision": 16}, ValueError, "precision is 16: it must be fp32, bf16, fp16"),
            ({"device": "gpu"}, ValueError, "gpu is no device: give cpu, cuda"),
            ({"device": 0}, ValueError, "0 is no device: give cpu, cuda"),
            ({"device": "cpu", "compile": True}, ValueError, "compile is True: it must be False on cpu"),
            ({"pretrained": ""}, ValueError, "pretrained is empty: give a run folder"),
            ({"pretrained": None}, TypeError, "not NoneType"),
            ({"pretrained": here}, FileNotFoundError, "give a checkpoint file or a run of open_clip_train")):
        with pytest.raises(error, match=words):
            open_clip_mdc.load(**{"pretrained": run, **options})
    assert open_clip_mdc.load(run, device=torch.device("cpu"), precision="fp16").precision == "fp16"


def test_the_device_and_the_precision_can_be_chosen(run):
    """bfloat16 rounds the features. The decoder stays in float32."""
    plain, rounded = (open_clip_mdc.load(run, device="cpu", precision=p) for p in ("fp32", "bf16"))
    a, b = (model.encode_image(IMAGES) for model in (plain, rounded))
    assert 0 < (a - b).abs().max() < 0.1 and b.dtype == torch.float32
