"""Claims about the files of `clip_benchmark eval --task captioning`: captions, results, journals, and bad inputs."""
import os
from pathlib import Path

import models
import pytest
import torch
from captioned import REFERENCES, captioned, evaluate, flags
from conftest import picture, read_json, write_csv, write_json
from models import CLIP_CONFIG, captioned_webdataset, other_weights, save_clip, skipped, tiny_clip
from safetensors.torch import save_file
from training import run_ranks

from clip_benchmark_ext.datasets.caption_data import unique_ids
from clip_benchmark_ext.table import markdown
from clip_benchmark_ext.tasks import captioning
from open_clip_mdc.decoding.sampling import Decoded
from open_clip_mdc.integration.checkpoints import load
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner

pytestmark = pytest.mark.usefixtures("clip_benchmark", "no_java")  # which takes its time (test_metrics.py)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return captioned(tmp_path_factory.mktemp("wds"))


@pytest.mark.parametrize("option, given", [
    ("--clip", "run/checkpoints/epoch_1.pt"), ("--clip", "run"), ("--clipscore_pretrained", "run/checkpoints"),
    ("--train_captions", "run/checkpoints/epoch_1.pt")])
def test_a_result_is_of_the_contents_of_the_files_that_helped(runs, data, tmp_path, option, given):
    """The CLIP that helps or scores is trained again under the same name, as a file or in its run folder."""
    name, weights = save_clip(tmp_path)
    file = tmp_path / "run/checkpoints/epoch_1.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(Path(weights).read_bytes() if option != "--train_captions" else b"a cat\n")
    given = tmp_path / given
    given = {"--clip": [f"{name}:{given}", "--clip_scale 1"],
             "--clipscore_pretrained": [given, "--clipscore_model", name],
             "--train_captions": [file, "--samples 2 --temperature 1"]}[option]
    command = [*flags(runs, data), "--caption_length 4", option, *given]
    evaluate(*command)
    assert skipped(*command)
    file.write_bytes(file.read_bytes() + b" ")
    assert not skipped(*command)


def test_the_table_shows_metrics_times_100_and_lengths_as_they_are():
    result = {"dataset": "d", "model": "m", "pretrained": "p", "metrics": {
        "Bleu_4": 0.1908, "METEOR": 0.1953, "CIDEr": 0.5998, "ROUGE_L": 0.3963, "SPICE": 0.133, "caption_length": 10,
        "mean_length": 9.893, "reference_mean_length": 10.416, "CLIPScore": 0.7, "RefCLIPScore": 0.75}}
    assert markdown([result]).splitlines()[-1] == \
        "| d | m |  | 10 | 19.1 | 19.5 | 60.0 | 39.6 | 13.3 | 70.0 | 75.0 | 9.9 | 10.4 |"


def test_two_processes_give_the_numbers_and_captions_of_one_to_the_digit(runs, data, tmp_path):
    save_file(tiny_clip().state_dict(), tmp_path / "open_clip_model.safetensors")
    write_json(tmp_path / "open_clip_config.json", {"model_cfg": CLIP_CONFIG, "preprocess_cfg": {}})
    arguments = [*flags(runs, data), "--caption_length 4 --clipscore_model", f"local-dir:{tmp_path}"]
    one = evaluate(*arguments, name="one")
    run_ranks("python", "-m", "clip_benchmark_ext.cli", "eval", *arguments, "--num_workers", "0", "--distributed",
              "--output", "two.json")
    assert (read_json("two.json")["metrics"], read_json("captions/two.json")) == one
    assert 0 < one[0]["CLIPScore"] < 2.5 and sorted(os.listdir("captions")) == ["one.json", "two.json"]


def test_captions_are_saved_before_they_are_scored_and_used_again(runs, data, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("must not happen")
    command = [*flags(runs, data), "--save_captions {task}-{dataset}.json"]
    with monkeypatch.context() as patch:
        patch.setattr(captioning, "score_captions", fail)
        with pytest.raises(RuntimeError):
            models.evaluate(*command)
    content = read_json("captioning-noise.json")
    assert len(content["captions"]) == len(REFERENCES) and content["filenames"] == {"key1": "COCO_000000000001.jpg"}
    monkeypatch.setattr(Captioner, "generate", fail)
    models.evaluate(*command)
    other_weights(runs, tmp_path / "epoch_1.pt")
    for more in (("--caption_length 3",), ("--model MDC-ViT-Ti-8 --pretrained", tmp_path / "epoch_1.pt")):
        with pytest.raises(RuntimeError):
            models.evaluate(*command, *more)
    assert read_json("captioning-noise.json")["captions"] == content["captions"]
    write_json("captioning-noise.json", content | {"references": {}})  # not whole, so it is made again
    with pytest.raises(RuntimeError):
        models.evaluate(*command)


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
        with pytest.raises(SystemExit, match="interrupted"):
            evaluate(*flags(runs, data))
    part = tmp_path / "captions/result.json.part0"
    with part.open("a") as file:
        file.write('{"batch": 3, "ids": ["key6"], "capt')  # broken off
    if other_process:
        part.rename(part.with_suffix(".part7"))
    calls.clear()
    monkeypatch.setattr(Captioner, "generate", lambda *a, **k: calls.append(1) or generate(*a, **k))
    resumed = evaluate(*flags(runs, data))
    assert len(calls) == 2 and os.listdir(part.parent) == ["result.json"]  # of four batches
    assert evaluate(*flags(runs, data), name="afresh") == resumed


def test_unicode_survives_from_the_tokens_to_the_score(runs, data, monkeypatch):
    """A model that says the first reference of every image: what it says is saved, read and scored as perfect."""
    _, _, tokenizer = load(str(runs / "mdc"))
    said = iter(range(len(REFERENCES)))
    def say(self, images, **_):
        text = tokenizer([REFERENCES[next(said)][0] for _ in images])
        return Decoded(text, torch.zeros_like(text), torch.zeros(text.shape))

    monkeypatch.setattr(Captioner, "generate", say)
    metrics, saved = evaluate(*flags(runs, data))
    pairs = list(zip(saved["captions"].values(), REFERENCES, strict=True))
    for caption, references in pairs:
        # as the tokenizer cleans texts: lower case, spaces between kinds of characters, one kind of white space
        assert "".join(caption.split()) == "".join(references[0].lower().split())
    assert "雨の中の猫" in saved["captions"].values() and "a café in the rain" in saved["captions"].values()
    assert metrics["Bleu_1"] > 0.9 and metrics["ROUGE_L"] > 0.9
    assert metrics["length_match"] == metrics["mean_steps"] == 1
    assert 0 < metrics["exact_match"] == sum(caption in references for caption, references in pairs) / 7 < 1


def karpathy(folder: Path, pairs: list[tuple[int, str]]) -> None:
    """Write captions of images as COCO's test split."""
    write_json(folder / "coco_test_karpathy.json", {
        "images": [{"id": i, "file_name": f"{i}.jpg"} for i in dict(pairs)],
        "annotations": [{"id": j, "image_id": i, "caption": caption} for j, (i, caption) in enumerate(pairs)]})


@pytest.mark.parametrize("dataset", ["flickr8k", "flickr30k", "mscoco_captions"])
def test_clip_benchmarks_own_data_sets_are_captioned_where_their_files_are(runs, tmp_path, dataset):
    folder = tmp_path / "val2014" if dataset == "mscoco_captions" else tmp_path
    pairs = [(picture(folder / f"{i}.jpg", i), caption) for i in range(3) for caption in REFERENCES[i]]
    write_csv(tmp_path / f"{dataset}_test_karpathy.txt", [("image", "caption"), *pairs], lineterminator="\n")
    karpathy(tmp_path, [(int(name[0]), caption) for name, caption in pairs])
    metrics, saved = evaluate(*flags(runs, tmp_path, dataset=dataset), "--caption_length 3")
    assert saved["references"] == {str(i): REFERENCES[i] for i in range(3)} and metrics["images"] == 3


def test_a_key_that_comes_again_gets_a_number_that_no_other_has():
    assert unique_ids(["0", "1", "0", "0", "2"]) == ["0", "1", "0#2", "0#3", "2"]
    assert unique_ids(["k", "k", "k#1", "a"]) == ["k", "k#1", "k#1#2", "a"]


def test_cocos_results_are_written_on_request_and_refused_before_decoding_where_there_are_no_numbers(
        runs, data, tmp_path, monkeypatch):
    for i in (70, 8, 9):
        picture(tmp_path / f"val2014/{i}.jpg", i)
    karpathy(tmp_path, [(i, "a cat") for i in (70, 8, 9)])
    coco = ("--save_coco_results {dataset}-results.json",)
    _, saved = evaluate(*flags(runs, tmp_path, dataset="mscoco_captions"), "--caption_length 3", *coco)
    results = read_json(tmp_path / "mscoco_captions-results.json")
    assert [row["image_id"] for row in results] == [8, 9, 70]
    assert [row["caption"] for row in results] == list(saved["captions"].values())

    numbered = captioned_webdataset(tmp_path / "numbered", {f"k{i}": (i, "a dog") for i in (3, 1)}, **{
        f"k{i}": {"filename": f"COCO_val2014_{i:012d}.jpg"} for i in (3, 1)})
    evaluate(*flags(runs, numbered), "--caption_length 3", *coco)
    assert [row["image_id"] for row in read_json(tmp_path / "noise-results.json")] == [3, 1]
    monkeypatch.setattr(Captioner, "generate", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(SystemExit, match="0.tar::key0 has no image_id"):
        models.evaluate(*flags(runs, data), *coco)
