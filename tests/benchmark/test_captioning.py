"""Claims about `clip_benchmark eval --task captioning`, by the real command.

The models are untrained: what they say is noise, as long as asked for, and any bytes at all.
"""
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from conftest import make_image, png, run
from models import CLIP_CONFIG, add, save_clip, tiny_clip
from safetensors.torch import save_file
from test_coca import tiny_coca
from training import TORCHRUN

from clip_benchmark_ext import cli
from clip_benchmark_ext import run as run_module
from clip_benchmark_ext.datasets.caption_data import unique_ids
from clip_benchmark_ext.metrics import diversity
from clip_benchmark_ext.metrics.caption_metrics import score_captions
from clip_benchmark_ext.table import markdown
from clip_benchmark_ext.tasks import captioning
from open_clip_mdc.decoding.clip_guidance import Clip, Guide
from open_clip_mdc.decoding.sampling import Decoded, Sampling
from open_clip_mdc.integration.checkpoints import load
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.likelihood.log_likelihood import mean_image
from open_clip_mdc.text.special_tokens import caption_lengths, decode_captions

pytestmark = pytest.mark.usefixtures("clip_benchmark", "no_java")  # which takes its time (test_metrics.py)
REFERENCES = [  # of the seven images
    ["a red square", "something red", "red"], ["a café in the rain", "ein Café im Regen"], ["雨の中の猫", "a cat"],
    ["two dogs", "2 dogs!"], ["🐈 → 🐕", "cats and dogs"], ["it's a \"sign\"\u2028of (three) lines", "a sign"], ["x"],
]
PER_SHARD = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A webdataset as clip_benchmark's: two shards, captions a line each."""
    root = tmp_path_factory.mktemp("wds")
    (root / "test").mkdir()
    (root / "dataset_type.txt").write_text("retrieval")
    (root / "test" / "nshards.txt").write_text("2\n")
    for shard in range(2):
        with tarfile.open(root / "test" / f"{shard}.tar", "w") as tar:
            for i in range(shard * PER_SHARD, min((shard + 1) * PER_SHARD, len(REFERENCES))):
                add(tar, f"key{i}.png", png(i))
                add(tar, f"key{i}.txt", "\n".join([*REFERENCES[i], ""]).encode())
                if i == 1:
                    add(tar, f"key{i}.json", b'{"filename": "COCO_000000000001.jpg"}')
    return root


def flags(runs, data, alias="mdc", dataset="wds/noise") -> list[str]:
    return [str(x) for x in ("eval", "--model", alias, "--pretrained", runs / alias, "--dataset", dataset,
                             "--dataset_root", data, "--task", "captioning", "--batch_size", 2, "--num_workers", 0,
                             "--no_amp", "--quiet")]


def evaluate(tmp_path, *arguments, name="result") -> tuple[dict, dict]:
    """The metrics, and what is in the file of captions."""
    cli.main([*map(str, arguments), "--output", str(tmp_path / f"{name}.json")])
    return (json.loads((tmp_path / f"{name}.json").read_text())["metrics"],
            json.loads((tmp_path / "captions" / f"{name}.json").read_text()))


@pytest.mark.parametrize("alias, given, decoding", [
    ("mdc", [], {"length": 15, "tokens_per_step": 1}),
    ("mdc", ["--caption_length", "5", "--tokens_per_step", "2"], {"length": 5, "tokens_per_step": 2}),
    ("mdc", ["--caption_length", "auto"], {"length": "auto", "tokens_per_step": 1}),
    ("arc", ["--caption_length", "6"], {"length": 6, "num_beams": 6}),
    ("arc", ["--num_beams", "2", "--min_length", "3"], {"length": "auto", "num_beams": 2, "min_length": 3}),
])
def test_captions_are_those_that_the_model_generates(runs, data, tmp_path, alias, given, decoding):
    metrics, saved = evaluate(tmp_path, *flags(runs, data, alias), *given)
    model, transform, tokenizer = load(str(runs / alias))
    text = model.generate(torch.stack([transform(make_image(i)) for i in range(len(REFERENCES))]), **decoding)
    assert list(saved["captions"].items()) == [
        (f"key{i}", caption) for i, caption in enumerate(decode_captions(text, tokenizer))]
    assert list(saved["references"].values()) == REFERENCES
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


def test_drawn_captions_are_those_of_the_seed_on_any_number_of_processes(runs, data, tmp_path):
    drawing = [*flags(runs, data), "--caption_length", "4", "--temperature", "0.8", "--top_k", "50", "--top_p", "0.9"]
    one = evaluate(tmp_path, *drawing, name="one")
    assert one[1]["decoding"] == {"length": 4, "tokens_per_step": 1, "temperature": 0.8, "top_k": 50, "top_p": 0.9,
                                  "seed": 0, "batch_size": 2}
    assert evaluate(tmp_path, *drawing, name="again")[1]["captions"] == one[1]["captions"]
    other = evaluate(tmp_path, *drawing, "--seed", "1", name="seed")[1]["captions"]
    greedy = evaluate(tmp_path, *flags(runs, data), "--caption_length", "4", name="greedy")[1]["captions"]
    assert one[1]["captions"] != other != greedy != one[1]["captions"]
    model, transform, tokenizer = load(str(runs / "mdc"))
    state = int(np.random.SeedSequence([0, 1]).generate_state(1)[0])  # of the second batch
    text = model.generate(torch.stack([transform(make_image(i)) for i in (2, 3)]), length=4, sampling=Sampling(
        0.8, 50, 0.9, torch.Generator().manual_seed(state)))
    assert list(one[1]["captions"].values())[2:4] == decode_captions(text, tokenizer)
    lengths = {evaluate(tmp_path, *flags(runs, data), "--caption_length", "sample", "--seed", str(seed),
                        name=f"length{seed}")[0]["mean_tokens"] for seed in range(3)}
    assert len(lengths) > 1


@pytest.mark.parametrize("alias", ["mdc", "arc"])
def test_of_several_drawn_captions_the_first_is_scored_and_their_diversity_is_measured(runs, data, tmp_path, alias):
    (tmp_path / "train.txt").write_text("a red square\n")
    drawing = [*flags(runs, data, alias), "--caption_length", "4", "--temperature", "1"]
    metrics, saved = evaluate(tmp_path, *drawing, "--samples", "3", "--train_captions", "train.txt")
    model, transform, tokenizer = load(str(runs / alias))
    state = int(np.random.SeedSequence([0, 1]).generate_state(1)[0])  # of the second batch
    text = model.generate(torch.stack([transform(make_image(i)) for i in (2, 3)]), length=4, samples=3,
                          sampling=Sampling(1.0, generator=torch.Generator().manual_seed(state)))
    said = decode_captions(text, tokenizer)
    assert list(saved["samples"].values())[2:4] == [said[:3], said[3:]]
    assert list(saved["captions"].values())[2:4] == [said[0], said[3]]
    expected, of_images = diversity.metrics(saved["samples"], {"a red square"})
    assert {name: metrics[name] for name in expected} == expected and metrics["novel_captions"] == 1
    items = json.loads((tmp_path / "items" / "result.json").read_text())["values"]
    assert {name: items[name] for name in of_images} == of_images and metrics["samples"] == 3
    if alias == "mdc":
        assert metrics["mean_tokens"] == 4


def test_guidance_is_by_the_mean_image_and_one_is_none(runs, data, tmp_path):
    plain, one, two, none = (
        evaluate(tmp_path, *flags(runs, data), "--caption_length", "5", *more, name=name)[1]["captions"]
        for name, more in (("plain", ()), ("one", ("--guidance_scale", "1")), ("two", ("--guidance_scale", "2")),
                           ("none", ("--guidance_scale", "0"))))
    model, transform, tokenizer = load(str(runs / "mdc"))
    images = torch.stack([transform(make_image(i)) for i in range(len(REFERENCES))])
    text = model.generate(images, length=5, guidance_scale=2.0, blind=mean_image(model, [images]))
    assert one == plain != two and list(two.values()) == decode_captions(text, tokenizer)
    assert len(set(none.values())) == 1  # the same for all images: the blind model alone


def test_captions_are_drawn_by_the_reverse_diffusion_with_the_seed_and_guided_by_masked_features(runs, data, tmp_path):
    ancestral = [*flags(runs, data), "--caption_length", "5", "--sampler", "ancestral"]
    metrics, saved = evaluate(tmp_path, *ancestral, "--steps", "4", "--temperature", "1", name="drawn")
    assert saved["decoding"] == {"length": 5, "sampler": "ancestral", "steps": 4, "temperature": 1.0, "seed": 0,
                                 "batch_size": 2}
    assert metrics["sampler"] == "ancestral" and metrics["steps"] == 4 and metrics["mean_steps"] <= 4
    model, transform, tokenizer = load(str(runs / "mdc"))
    state = int(np.random.SeedSequence([0, 1]).generate_state(1)[0])  # of the second batch
    text = model.generate(torch.stack([transform(make_image(i)) for i in (2, 3)]), length=5, sampler="ancestral",
                          steps=4, sampling=Sampling(1.0, generator=torch.Generator().manual_seed(state)))
    assert list(saved["captions"].values())[2:4] == decode_captions(text, tokenizer)
    guided = [*flags(runs, data, "mcd"), "--caption_length", "5", "--guidance_scale", "3"]
    saved = evaluate(tmp_path, *guided, name="guided")[1]
    assert saved["decoding"] == {"length": 5, "tokens_per_step": 1, "guidance_scale": 3.0, "guidance_weak": "masked",
                                 "seed": 0, "batch_size": 2}
    blind = evaluate(tmp_path, *guided, "--guidance_weak", "blind", name="blind")[1]
    assert "seed" not in blind["decoding"] and blind["captions"] != saved["captions"]
    for wrong, words in ((["--steps", "4"], "--steps is of --sampler ancestral"),
                         (["--sampler", "ancestral", "--tokens_per_step", "2"], "is of --sampler confidence"),
                         (["--guidance_weak", "blind"], "--guidance_weak changes nothing without a --guidance_scale"),
                         (["--guidance_scale", "nan"], "--guidance_scale is nan"),
                         (["--temperature", "inf"], "temperature is inf"),
                         (["--guidance_scale", "2", "--guidance_weak", "masked"], "trained with masked image")):
        with pytest.raises(SystemExit, match=words):
            cli.main([*flags(runs, data), *wrong])


def test_clip_guides_and_reranks_by_its_own_transform_and_the_result_says_what_it_cost(runs, data, tmp_path):
    """The CLIP model looks at 48 px, the captioner at 32."""
    name, weights = save_clip(tmp_path)
    command = [*flags(runs, data), "--caption_length", "4", "--clip", f"{name}:{weights}"]
    clip, _, clip_transform = open_clip.create_model_and_transforms(name, weights)
    clip = Clip(clip.eval(), clip_transform, open_clip.get_tokenizer(name))
    model, transform, tokenizer = load(str(runs / "mdc"))
    images = torch.stack([transform(make_image(i)) for i in range(len(REFERENCES))])
    seen = torch.stack([clip_transform(make_image(i)) for i in range(len(REFERENCES))])

    metrics, saved = evaluate(tmp_path, *command, "--clip_scale", "2", "--clip_top_k", "3")
    guide = Guide(clip, seen, tokenizer, 2.0, 3)
    text = model.generate(images, length=4, guide=guide)
    assert list(saved["captions"].values()) == decode_captions(text, tokenizer)
    assert list(saved["clip_texts"].values()) == guide.texts
    assert metrics["clip_texts_per_caption"] == sum(guide.texts) / len(guide.texts) and metrics["clip_scale"] == 2.0

    metrics, saved = evaluate(tmp_path, *command, "--clip_rerank", "3", "--temperature", "1", name="reranked")
    guide = Guide(clip, seen[2:4], tokenizer)
    state = int(np.random.SeedSequence([0, 1]).generate_state(1)[0])  # of the second batch
    text = model.generate(images[2:4], length=4, samples=3, rerank=True, guide=guide,
                          sampling=Sampling(1.0, generator=torch.Generator().manual_seed(state)))
    assert list(saved["captions"].values())[2:4] == decode_captions(text, tokenizer)
    assert list(saved["clip_texts"].values())[2:4] == guide.texts == [3, 3]
    assert evaluate(tmp_path, *flags(runs, data), name="plain")[0].get("clip_texts_per_caption") is None


def test_the_clip_that_guides_may_not_score(runs, data, tmp_path, monkeypatch):
    name, weights = save_clip(tmp_path)
    copy = tmp_path / "under-another-name.pt"
    copy.write_bytes((tmp_path / f"{name}.pt").read_bytes())
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="by the very CLIP that --clip names"):
        patch.setattr(Captioner, "generate", None)
        evaluate(tmp_path, *flags(runs, data), "--clip", f"{name}:{weights}", "--clip_scale", "1",
                 "--clipscore_model", name, "--clipscore_pretrained", str(copy))


@pytest.mark.parametrize("option, given", [
    *((option, given) for option in ("--clip", "--clipscore_pretrained")
      for given in ("run/checkpoints/epoch_1.pt", "run", "run/checkpoints")),
    ("--train_captions", "run/checkpoints/epoch_1.pt")])
def test_a_result_is_of_the_contents_of_the_files_that_helped(runs, data, tmp_path, monkeypatch, option, given):
    """The CLIP that helps or scores is trained again under the same name, as a file or in its run folder."""
    name, weights = save_clip(tmp_path)
    file = tmp_path / "run" / "checkpoints" / "epoch_1.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(Path(weights).read_bytes() if option != "--train_captions" else b"a cat\n")
    given = tmp_path / given
    given = {"--clip": [f"{name}:{given}", "--clip_scale", "1"],
             "--clipscore_pretrained": [given, "--clipscore_model", name],
             "--train_captions": [file, "--samples", "2", "--temperature", "1"]}[option]
    command = [*flags(runs, data), "--caption_length", "4", "--skip_existing", option, *given]
    evaluate(tmp_path, *command)

    def fail(args):
        raise AssertionError("loaded")
    monkeypatch.setattr(run_module, "load_model", fail)
    evaluate(tmp_path, *command)
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(AssertionError, match="loaded"):
        evaluate(tmp_path, *command)


def test_coca_is_captioned_by_the_same_task(data, tmp_path, monkeypatch):
    coca = tiny_coca(vocab_size=49408, context_length=8, image_size=32)
    transform, tokenizer = open_clip.image_transform(32, is_train=False), open_clip.get_tokenizer("ViT-B-32")
    monkeypatch.setattr(run_module, "load_model", lambda args: (coca, transform, tokenizer))
    arguments = ["eval", "--model", "coca_ViT-B-32", "--pretrained", "x", "--dataset", "wds/noise", "--dataset_root",
                 data, "--task", "captioning", "--batch_size", 3, "--num_workers", 0, "--no_amp", "--quiet",
                 "--num_beams", "2", "--caption_length", "3"]
    metrics, saved = evaluate(tmp_path, *arguments)
    assert len(saved["captions"]) == len(REFERENCES) and saved["decoding"] == {"length": 3, "num_beams": 2}
    assert 0 < metrics["mean_tokens"] <= 3 and json.loads((tmp_path / "result.json").read_text())["settings"]["length"]


def test_several_lengths_do_not_overwrite_one_another_and_fill_a_table(runs, data, tmp_path):
    for length in ("3", "auto"):
        cli.main([*flags(runs, data), "--caption_length", length])
    results = sorted(p for p in tmp_path.iterdir() if p.suffix == ".json")
    captions = sorted((tmp_path / "captions").iterdir())
    assert [p.name for p in captions] == [p.name for p in results]
    assert [p.name.partition("captioning")[2] for p in results] == ["_caption_length-3.json",
                                                                    "_caption_length-auto.json"]
    cli.main(["build", *map(str, tmp_path.glob("*.json")), "--output", "all.csv"])
    table = markdown([json.loads(p.read_text()) for p in results])
    assert "| length | B@4 | CIDEr | ROUGE-L | mean length | references |" in table
    assert "| wds/noise | MDC-ViT-Ti-8 (mdc) |  | 3 | " in table and "|  | auto | " in table


def test_the_table_shows_metrics_times_100_and_lengths_as_they_are():
    result = {"dataset": "d", "model": "m", "pretrained": "p", "metrics": {
        "Bleu_4": 0.1908, "METEOR": 0.1953, "CIDEr": 0.5998, "ROUGE_L": 0.3963, "SPICE": 0.133, "caption_length": 10,
        "mean_length": 9.893, "reference_mean_length": 10.416, "CLIPScore": 0.7, "RefCLIPScore": 0.75}}
    assert markdown([result]).splitlines()[-1] == \
        "| d | m |  | 10 | 19.1 | 19.5 | 60.0 | 39.6 | 13.3 | 70.0 | 75.0 | 9.9 | 10.4 |"


def test_two_processes_give_the_numbers_and_captions_of_one_to_the_digit(runs, data, tmp_path):
    save_file(tiny_clip().state_dict(), tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": CLIP_CONFIG, "preprocess_cfg": {}}))
    arguments = [*flags(runs, data), "--caption_length", "4", "--clipscore_model", f"local-dir:{tmp_path}"]
    one = evaluate(tmp_path, *arguments, name="one")
    run(*TORCHRUN, "-m", "clip_benchmark_ext.cli", *arguments, "--distributed", "--output", str(tmp_path / "two.json"))
    assert json.loads((tmp_path / "two.json").read_text())["metrics"] == one[0]
    assert json.loads((tmp_path / "captions" / "two.json").read_text()) == one[1]
    assert 0 < one[0]["CLIPScore"] < 2.5 and sorted(os.listdir(tmp_path / "captions")) == ["one.json", "two.json"]


# ---- what is not lost


def test_captions_are_saved_before_they_are_scored_and_used_again(runs, data, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("must not happen")
    with monkeypatch.context() as patch:
        patch.setattr(captioning, "score_captions", fail)
        with pytest.raises(RuntimeError):
            cli.main([*flags(runs, data), "--save_captions", "{task}-{dataset}.json"])
    content = json.loads((tmp_path / "captioning-noise.json").read_text())
    saved = content["captions"]
    assert len(saved) == len(REFERENCES) and content["filenames"] == {"key1": "COCO_000000000001.jpg"}
    with monkeypatch.context() as patch:
        patch.setattr(Captioner, "generate", fail)
        cli.main([*flags(runs, data), "--save_captions", "{task}-{dataset}.json"])
        with pytest.raises(RuntimeError):  # not for another length
            cli.main([*flags(runs, data), "--save_captions", "{task}-{dataset}.json", "--caption_length", "3"])
        checkpoint = torch.load(runs / "mdc" / "checkpoints" / "epoch_1.pt")
        checkpoint["state_dict"]["text.output.weight"][0] += 1
        torch.save(checkpoint, tmp_path / "epoch_1.pt")
        changed = [str(tmp_path / "epoch_1.pt") if x == str(runs / "mdc") else x for x in flags(runs, data)]
        changed[changed.index("mdc")] = "MDC-ViT-Ti-8"
        with pytest.raises(RuntimeError):  # nor for other weights
            cli.main([*changed, "--save_captions", "{task}-{dataset}.json"])
    assert json.loads((tmp_path / "captioning-noise.json").read_text())["captions"] == saved


@pytest.mark.parametrize("other_process", [False, True])
def test_a_decoding_that_was_stopped_goes_on(runs, data, tmp_path, monkeypatch, other_process):
    generate, calls = Captioner.generate, []

    def interrupted(*arguments, **more):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        return generate(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Captioner, "generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(tmp_path, *flags(runs, data))
    part = tmp_path / "captions" / "result.json.part0"
    with part.open("a") as file:
        file.write('{"batch": 3, "ids": ["key6"], "capt')  # broken off
    if other_process:
        part.rename(part.with_suffix(".part7"))
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Captioner, "generate", lambda *a, **k: calls.append(1) or generate(*a, **k))
        resumed = evaluate(tmp_path, *flags(runs, data))
    assert len(calls) == 2 and os.listdir(part.parent) == ["result.json"]  # of four batches
    assert evaluate(tmp_path, *flags(runs, data), name="afresh") == resumed


def test_unicode_survives_from_the_tokens_to_the_score(runs, data, tmp_path, monkeypatch):
    """A model that says the first reference of every image: what it says is saved, read and scored as perfect."""
    _, _, tokenizer = load(str(runs / "mdc"))
    said = iter(range(len(REFERENCES)))
    def say(self, images, **_):
        text = tokenizer([REFERENCES[next(said)][0] for _ in images])
        return Decoded(text, torch.zeros_like(text), torch.zeros(text.shape))

    monkeypatch.setattr(Captioner, "generate", say)
    metrics, saved = evaluate(tmp_path, *flags(runs, data))
    for caption, references in zip(saved["captions"].values(), REFERENCES, strict=True):
        # as the tokenizer cleans texts: lower case, spaces between kinds of characters, one kind of white space
        assert "".join(caption.split()) == "".join(references[0].lower().split())
    assert "雨の中の猫" in saved["captions"].values() and "a café in the rain" in saved["captions"].values()
    assert metrics["Bleu_1"] > 0.9 and metrics["ROUGE_L"] > 0.9
    assert metrics["length_match"] == 1 and metrics["mean_steps"] == 1
    same = [caption in references for caption, references in zip(saved["captions"].values(), REFERENCES, strict=True)]
    assert metrics["exact_match"] == sum(same) / len(same) and 0 < sum(same) < len(same)


# ---- data sets


@pytest.mark.parametrize("dataset", ["flickr8k", "flickr30k", "mscoco_captions"])
def test_clip_benchmarks_own_data_sets_are_captioned_where_their_files_are(runs, tmp_path, dataset):
    folder = tmp_path / "val2014" if dataset == "mscoco_captions" else tmp_path
    folder.mkdir(exist_ok=True)
    for i in range(3):
        make_image(i).save(folder / f"{i}.jpg")
    lines = [f"{i}.jpg,{caption}" for i in range(3) for caption in REFERENCES[i]]
    (tmp_path / f"{dataset}_test_karpathy.txt").write_text("\n".join(["image,caption", *lines]))
    (tmp_path / "coco_test_karpathy.json").write_text(json.dumps({
        "images": [{"id": i, "file_name": f"{i}.jpg"} for i in range(3)],
        "annotations": [{"id": 10 * i + j, "image_id": i, "caption": caption}
                        for i in range(3) for j, caption in enumerate(REFERENCES[i])]}))
    metrics, saved = evaluate(tmp_path, *flags(runs, tmp_path, dataset=dataset), "--caption_length", 3)
    assert saved["references"] == {str(i): REFERENCES[i] for i in range(3)} and metrics["images"] == 3


def test_a_key_that_comes_again_keeps_its_captions_apart():
    assert unique_ids(["0", "1", "0", "0", "2"]) == ["0", "1", "0#2", "0#3", "2"]


def test_bad_input_is_named_in_one_line_before_any_decoding(runs, data, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise AssertionError("must not be decoded")
    labelled, empty = tmp_path / "labelled", tmp_path / "empty"
    for root in (labelled, empty):
        (root / "test").mkdir(parents=True)
        (root / "test" / "nshards.txt").write_text("1")
        with tarfile.open(root / "test" / "0.tar", "w") as tar:
            add(tar, "a.png", png(0))
            add(tar, *(("a.cls", b"1") if root == labelled else ("a.txt", b"\n \n")))
    mdc, arc = flags(runs, data), flags(runs, data, "arc")
    cases = {
        "neither a number of tokens nor auto": [*mdc, "--caption_length", "0"],
        "--num_beams is not supported by this model, which decodes by unmasking": [*mdc, "--num_beams", "3"],
        "--min_length is not supported by this model, which decodes by unmasking": [*mdc, "--min_length", "3"],
        "--tokens_per_step is not supported by this model": [*arc, "--tokens_per_step", "3"],
        "0.tar, sample a: captioning needs an image": flags(runs, labelled),
        "image a has no captions": flags(runs, empty),
        "nshards.txt": flags(runs, tmp_path / "absent"),
        "has wrong captions too": flags(runs, data, dataset="sugar_crepe/swap_obj"),
        "--samples needs a temperature": [*mdc, "--samples", "3"],
        "--train_captions is of --samples": [*mdc, "--train_captions", "x.txt"],
        "leave out --samples": [*mdc, "--samples", "3", "--temperature", "1", "--clip", "ViT-B-32:x.pt",
                                "--clip_rerank", "2"],
        "--clip_scale or --clip_rerank needs --clip": [*mdc, "--clip_scale", "1"],
        "--clip changes nothing without": [*mdc, "--clip", "ViT-B-32:x.pt"],
        "--clip_scale is not supported by this model": [*arc, "--clip", "ViT-B-32:x.pt", "--clip_scale", "1"],
        "'ViT-B-32' should be MODEL:FILE": [*mdc, "--clip", "ViT-B-32", "--clip_scale", "1"],
        "needs --clipscore_pretrained": [*mdc, "--clipscore_model", "ViT-B-32"],
        "needs --clipscore_model": [*mdc, "--clipscore_pretrained", "x.pt"],
        "x.pt is no file and no tag of ViT-B-32 (": [*mdc, "--clipscore_model", "ViT-B-32", "--clipscore_pretrained",
                                                     "x.pt"],
        "compares no images with texts": [*mdc, "--clipscore_model", "MDC-ViT-Ti-8", "--clipscore_pretrained",
                                          str(runs / "mdc")],
    }
    for words, arguments in cases.items():
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as error:
            patch.setattr(Captioner, "generate", fail)
            cli.main(arguments)
        if error.value.code == 2:  # of argparse
            assert words in capsys.readouterr().err
        else:
            assert words in error.value.code and "\n" not in error.value.code, words
    with pytest.raises(SystemExit, match="--caption_length 500 is more than this model"):
        cli.main([*mdc, "--caption_length", "500"])
    assert os.listdir(tmp_path / "captions") == []


# ---- CLIPScore

def test_clip_scores_by_name_and_weights_are_those_of_the_published_formula(runs, data, tmp_path):
    _, weights = save_clip(tmp_path)
    metrics, saved = evaluate(tmp_path, *flags(runs, data), "--clipscore_model", "tiny-clip-vit",
                              "--clipscore_pretrained", weights)

    clip, _, transform = open_clip.create_model_and_transforms("tiny-clip-vit", weights)
    tokenizer = open_clip.get_tokenizer("tiny-clip-vit")

    @torch.no_grad()
    def unit(texts):
        x = clip.eval().encode_text(tokenizer(["A photo depicts " + text for text in texts]))
        return x / x.norm(dim=-1, keepdim=True)

    plain, with_references = [], []
    for i, (caption, references) in enumerate(zip(saved["captions"].values(), REFERENCES, strict=True)):
        with torch.no_grad():
            image = clip.encode_image(transform(make_image(i))[None])[0]
        a = 2.5 * max(float(unit([caption])[0] @ image / image.norm()), 0)
        b = max(max((unit(references) @ unit([caption])[0]).tolist()), 0)
        plain.append(a)
        with_references.append(2 * a * b / (a + b) if a + b else 0)
    assert metrics["CLIPScore"] == pytest.approx(sum(plain) / len(plain), rel=1e-5)
    assert metrics["RefCLIPScore"] == pytest.approx(sum(with_references) / len(plain), rel=1e-5)
    assert metrics["clipscore_model"] == f"tiny-clip-vit {weights}"
