"""Claims about `clip_benchmark eval --task captioning`, by the real command.

The models are untrained. Their captions are noise of the requested length, and may hold any bytes.
"""
import shutil

import numpy as np
import open_clip
import pytest
import torch
from captioned import REFERENCES, captioned, evaluate, flags
from conftest import made_images, read_json, seeded
from models import save_clip

from clip_benchmark_ext.metrics import diversity
from clip_benchmark_ext.metrics.caption_metrics import score_captions
from open_clip_mdc.decoding.clip_guidance import Clip, Guide
from open_clip_mdc.decoding.consensus import agreement
from open_clip_mdc.decoding.sampling import Sampling
from open_clip_mdc.integration.checkpoints import load
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.likelihood.log_likelihood import mean_image
from open_clip_mdc.text.special_tokens import caption_lengths, decode_captions

pytestmark = pytest.mark.usefixtures("clip_benchmark", "no_java")  # which takes its time (test_metrics.py)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return captioned(tmp_path_factory.mktemp("wds"))


@pytest.mark.parametrize("alias, given, decoding", [
    ("mdc", [], {"length": 15, "tokens_per_step": 1}),
    ("mdc", ["--caption_length 5 --tokens_per_step 2"], {"length": 5, "tokens_per_step": 2}),
    ("mdc", ["--caption_length auto"], {"length": "auto", "tokens_per_step": 1}),
    ("mdc", ["--caption_length 9 --repeats avoid"], {"length": 9, "tokens_per_step": 1, "repeats": "avoid"}),
    ("arc", ["--caption_length 6"], {"length": 6, "num_beams": 6}),
    ("arc", ["--num_beams 2 --min_length 3"], {"length": "auto", "num_beams": 2, "min_length": 3}),
])
def test_captions_are_those_that_the_model_generates(runs, data, alias, given, decoding):
    metrics, saved = evaluate(*flags(runs, data, alias), *given)
    model, transform, tokenizer = load(str(runs / alias))
    text = model.generate(made_images(transform, len(REFERENCES)), **decoding)
    assert texts(saved) == decode_captions(text, tokenizer) and list(saved["captions"]) == [
        f"key{i}" for i in range(len(REFERENCES))]
    assert texts(saved, "references") == REFERENCES
    assert saved["decoding"] == decoding and saved["dataset"] == "wds/noise"
    assert metrics["caption_length"] == decoding["length"] and metrics["images"] == len(REFERENCES)

    expected = score_captions(saved["captions"], saved["references"]).scores
    assert {name: metrics[name] for name in expected} == expected and "Bleu_4" in expected
    assert "no Java" in metrics["METEOR_missing"] and metrics["word_tokenizer"] == "plain"
    tokens = [len(tokenizer.encode(r)) for texts in REFERENCES for r in texts]
    assert metrics["reference_mean_tokens"] == sum(tokens) / len(tokens)
    assert metrics["mean_tokens"] == (caption_lengths(text, model.vocab_size) - 2).double().mean()
    if alias == "mdc" and decoding["length"] != "auto":
        assert metrics["mean_tokens"] == decoding["length"]
        assert metrics["mean_steps"] == -(-decoding["length"] // decoding["tokens_per_step"])


def texts(saved: dict, kind: str = "captions") -> list:
    """Return what a file of captions says of each image."""
    return list(saved[kind].values())


def of_the_second_batch(model, transform, *sampling, **options) -> torch.Tensor:
    """The captions of images 2 and 3, from the seed that the command gives their batch. `sampling` begins Sampling."""
    generator = seeded(int(np.random.SeedSequence([0, 1]).generate_state(1)[0]))
    return model.generate(made_images(transform, 4)[2:], sampling=Sampling(*sampling or [1.0], generator=generator),
                          **options)


def test_drawn_captions_are_those_of_the_seed_on_any_number_of_processes(runs, data):
    drawing = [*flags(runs, data), "--caption_length 4 --temperature 0.8 --top_k 50 --top_p 0.9"]
    one = evaluate(*drawing, name="one")
    assert one[1]["decoding"] == {"length": 4, "tokens_per_step": 1, "temperature": 0.8, "top_k": 50, "top_p": 0.9,
                                  "seed": 0, "batch_size": 2}
    assert evaluate(*drawing, name="again")[1]["captions"] == one[1]["captions"]
    other = evaluate(*drawing, "--seed 1", name="seed")[1]["captions"]
    greedy = evaluate(*flags(runs, data), "--caption_length 4", name="greedy")[1]["captions"]
    assert one[1]["captions"] != other != greedy != one[1]["captions"]
    model, transform, tokenizer = load(str(runs / "mdc"))
    text = of_the_second_batch(model, transform, 0.8, 50, 0.9, length=4)
    assert texts(one[1])[2:4] == decode_captions(text, tokenizer)
    lengths = {evaluate(*flags(runs, data), "--caption_length sample --seed", str(seed),
                        name=f"length{seed}")[0]["mean_tokens"] for seed in range(3)}
    assert len(lengths) > 1


@pytest.mark.parametrize("alias", ["mdc", "arc"])
def test_of_several_drawn_captions_the_first_is_scored_and_their_diversity_is_measured(runs, data, tmp_path, alias):
    (tmp_path / "train.txt").write_text("a red square\n")
    drawing = [*flags(runs, data, alias), "--caption_length 4 --temperature 1"]
    metrics, saved = evaluate(*drawing, "--samples 3 --train_captions train.txt")
    model, transform, tokenizer = load(str(runs / alias))
    text = of_the_second_batch(model, transform, length=4, samples=3)
    said = decode_captions(text, tokenizer)
    assert texts(saved, "samples")[2:4] == [said[:3], said[3:]]
    assert texts(saved)[2:4] == [said[0], said[3]]
    expected, of_images = diversity.metrics(saved["samples"], {"a red square"})
    assert {name: metrics[name] for name in expected} == expected and metrics["novel_captions"] == 1
    items = read_json(tmp_path / "items/result.json")["values"]
    assert {name: items[name] for name in of_images} == of_images and metrics["samples"] == 3
    if alias == "mdc":
        assert metrics["mean_tokens"] == 4
    metrics, saved = evaluate(*drawing, "--samples 3 --select consensus", name="one")
    value = agreement(text, 3, model.vocab_size).view(-1, 3).argmax(1).tolist()
    assert texts(saved)[2:4] == [said[value[0]], said[3 + value[1]]]
    assert "samples" not in saved and "div_1" not in metrics and metrics["select"] == "consensus"


def test_guidance_is_by_the_mean_image_and_one_is_none(runs, data):
    plain, one, two, none = (
        evaluate(*flags(runs, data), "--caption_length 5", *more, name=name)[1]["captions"]
        for name, more in (("plain", ()), ("one", ("--guidance_scale 1",)), ("two", ("--guidance_scale 2",)),
                           ("none", ("--guidance_scale 0",))))
    model, transform, tokenizer = load(str(runs / "mdc"))
    images = made_images(transform, len(REFERENCES))
    text = model.generate(images, length=5, guidance_scale=2.0, blind=mean_image(model, [images]))
    assert one == plain != two and list(two.values()) == decode_captions(text, tokenizer)
    assert len(set(none.values())) == 1  # the same for all images: the blind model alone


def test_captions_are_drawn_by_the_reverse_diffusion_with_the_seed_and_guided_by_masked_features(runs, data):
    ancestral = [*flags(runs, data), "--caption_length 5 --sampler ancestral"]
    metrics, saved = evaluate(*ancestral, "--steps 4 --temperature 1", name="drawn")
    assert saved["decoding"] == {"length": 5, "sampler": "ancestral", "steps": 4, "temperature": 1.0, "seed": 0,
                                 "batch_size": 2}
    assert metrics["sampler"] == "ancestral" and metrics["steps"] == 4 and metrics["mean_steps"] <= 4
    model, transform, tokenizer = load(str(runs / "mdc"))
    text = of_the_second_batch(model, transform, length=5, sampler="ancestral", steps=4)
    assert texts(saved)[2:4] == decode_captions(text, tokenizer)
    guided = [*flags(runs, data, "mcd"), "--caption_length 5 --guidance_scale 3"]
    saved = evaluate(*guided, name="guided")[1]
    assert saved["decoding"] == {"length": 5, "tokens_per_step": 1, "guidance_scale": 3.0, "uncond": "masked_image",
                                 "seed": 0, "batch_size": 2}
    blind = evaluate(*guided, "--uncond null_image", name="blind")[1]
    assert "seed" not in blind["decoding"] and blind["captions"] != saved["captions"]


def test_clip_guides_and_reranks_by_its_own_transform_and_the_result_says_what_it_cost(runs, data, tmp_path):
    """The CLIP model looks at 48 px, the captioner at 32."""
    name, weights = save_clip(tmp_path)
    command = [*flags(runs, data), "--caption_length 4 --clip", f"{name}:{weights}"]
    clip, _, clip_transform = open_clip.create_model_and_transforms(name, weights)
    clip = Clip(clip.eval(), clip_transform, open_clip.get_tokenizer(name))
    model, transform, tokenizer = load(str(runs / "mdc"))
    images = made_images(transform, len(REFERENCES))
    seen = made_images(clip_transform, len(REFERENCES))

    metrics, saved = evaluate(*command, "--clip_scale 2")
    guide = Guide(clip, seen, tokenizer, 2.0)
    text = model.generate(images, length=4, guide=guide)
    assert texts(saved) == decode_captions(text, tokenizer)
    assert texts(saved, "clip_texts") == guide.texts
    assert metrics["clip_texts_per_caption"] == sum(guide.texts) / len(guide.texts) and metrics["clip_scale"] == 2.0

    metrics, saved = evaluate(*command, "--clip_rerank 3 --temperature 1", name="reranked")
    guide = Guide(clip, seen[2:4], tokenizer)
    text = of_the_second_batch(model, transform, length=4, samples=3, rerank=True, guide=guide)
    assert texts(saved)[2:4] == decode_captions(text, tokenizer)
    assert texts(saved, "clip_texts")[2:4] == guide.texts == [3, 3]
    assert evaluate(*flags(runs, data), name="plain")[0].get("clip_texts_per_caption") is None


def test_the_clip_that_guides_may_not_score(runs, data, tmp_path, monkeypatch):
    name, weights = save_clip(tmp_path)
    copy = shutil.copy(weights, tmp_path / "under-another-name.pt")
    monkeypatch.setattr(Captioner, "generate", None)
    with pytest.raises(SystemExit, match="by the model of --clip would be biased"):
        evaluate(*flags(runs, data), "--clip", f"{name}:{weights}", "--clip_scale 1 --clipscore_model", name,
                 "--clipscore_pretrained", copy)


@torch.no_grad()
def test_clip_scores_by_name_and_weights_are_those_of_the_published_formula(runs, data, tmp_path):
    _, weights = save_clip(tmp_path)
    metrics, saved = evaluate(*flags(runs, data), "--clipscore_model tiny-clip-vit --clipscore_pretrained", weights)

    clip, _, transform = open_clip.create_model_and_transforms("tiny-clip-vit", weights)
    tokenizer = open_clip.get_tokenizer("tiny-clip-vit")

    def cosine(caption, other):
        return float(torch.cosine_similarity(embedded(caption), other)[0])

    def embedded(caption):
        return clip.encode_text(tokenizer(["A photo depicts " + caption]))

    plain, with_references = [], []
    for image, caption, references in zip(made_images(transform, 7), texts(saved), REFERENCES, strict=True):
        a = 2.5 * max(cosine(caption, clip.eval().encode_image(image[None])), 0)
        b = max(0, *(cosine(caption, embedded(reference)) for reference in references))
        plain.append(a)
        with_references.append(2 * a * b / (a + b) if a + b else 0)
    assert metrics["CLIPScore"] == pytest.approx(np.mean(plain), rel=1e-5)
    assert metrics["RefCLIPScore"] == pytest.approx(np.mean(with_references), rel=1e-5)
    assert metrics["clipscore_model"] == f"tiny-clip-vit {weights}"
