"""Claims about data sets that are one row of JSON: ours of captions and classes, and your own by --datasets."""
import json
from pathlib import Path

import models
import pytest
import torch
from conftest import make_image, picture, read_json

from clip_benchmark_ext.datasets import known, masks
from clip_benchmark_ext.datasets.readers import CASES, FORMS
from clip_benchmark_ext.metrics import selection_metrics
from clip_benchmark_ext.metrics.classes import average_precisions, map_11_points
from clip_benchmark_ext.selection_datasets import build_dataset

pytestmark = pytest.mark.usefixtures("clip_benchmark", "no_java")
TEXTS = ["a red square above a dog", "two dogs", "a small green owl", "the sea at night"]
VOC = known.KINDS["classes"]["voc2007_official"]["classes"]


def write(path: Path, *lines: object) -> None:
    """Write a text, or JSON, on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))


def docci(root):
    write(root / "docci_descriptions.jsonlines", *(
        {"example_id": f"{split}_{i}", "split": split, "image_file": picture(root / f"images/{split}_{i}.jpg", i),
         "description": text} for split in ("test", "train") for i, text in enumerate(TEXTS)))


def dci(root):
    for i, text in enumerate(TEXTS):
        image, (first, *rest) = "sa/" + picture(root / f"photos/sa_{i}.jpg", i), text.split()
        write(root / f"complete/{i}.json", {"image": image, "short_caption": first, "extra_caption": " ".join(rest),
                                                "mask_data": {}})
    write(root / "complete/9.json", {"image": "absent.jpg"})
    write(root / "splits.json", {"train": ["9.json"], "test": [f"{i}.json" for i in range(4)], "valid": []})


def iiw(root):
    write(root / "IIW-400/data.jsonl", *(
        {"image/key": picture(root / f"images_aar/aar_{i}.jpg", i).removesuffix(".jpg"), "IIW": text, "IIW-P5B": ""}
        for i, text in enumerate(TEXTS)))


def urban1k(root):
    for i, text in enumerate(TEXTS, 1):
        write(root / f"Urban1k/caption/{i}.txt", text + "\n")
        picture(root / f"Urban1k/image/{i}.jpg", i - 1)


def nocaps(root):
    write(root / "nocaps_val_4500_captions.json", {
        "images": [{"id": i, "file_name": picture(root / f"images/00{i}ea.jpg", i),
                    "domain": ("in-domain", "out-domain")[i % 2]} for i in range(4)],
        "annotations": [{"id": j, "image_id": j % 4, "caption": TEXTS[j % 4]} for j in range(8)]})


def voc2007_official(root):
    main = root / "VOCdevkit/VOC2007/ImageSets/Main"
    for split, count in ("test", 6), ("train", 8), ("val", 8):
        for number, label in enumerate(VOC):
            signs = [1 if i % 4 == number % 4 else 0 if (i + number) % 7 == 0 else -1 for i in range(count)]
            write(main / f"{label}_{split}.txt", *(f"{split}{i:04d} {sign:2d}" for i, sign in enumerate(signs)))
        write(main / f"{split}.txt", *(
            picture(main.parents[1] / f"JPEGImages/{split}{i:04d}.jpg", i)[:-4] for i in range(count)))


def evaluate(runs, dataset, *flags) -> dict:
    return models.evaluate(*models.flags_of(runs, dataset, "data", "--batch_size 2", *flags))


@pytest.mark.parametrize("make, name, copies", [
    (docci, "docci", 1), (dci, "dci", 1), (iiw, "iiw/docci_aar", 1), (urban1k, "urban1k", 1), (nocaps, "nocaps", 2)])
def test_each_layout_gives_its_images_with_their_captions(tmp_path, make, name, copies):
    make(tmp_path)
    assert [(image.tobytes(), captions) for image, captions in build_dataset(name, tmp_path)] == [
        (make_image(i).tobytes(), [text] * copies) for i, text in enumerate(TEXTS)]


def test_a_split_has_its_own_rows(tmp_path):
    docci(tmp_path)
    cases = build_dataset("docci", tmp_path, split="train").cases
    assert [case.key for case in cases] == [f"train_{i}" for i in range(4)]
    with pytest.raises(ValueError, match="no rows of the split 'tset'"):
        build_dataset("docci", tmp_path, split="tset")


def test_domains_of_nocaps_are_captioned_and_scored_apart(runs, tmp_path):
    nocaps(tmp_path / "data")
    result = evaluate(runs, "nocaps", "--task captioning --save_coco_results", tmp_path / "coco.json")
    metrics = result["metrics"]
    assert metrics["images"] == 4 and metrics["in-domain/images"] == metrics["out-domain/images"] == 2
    saved = read_json(tmp_path / "captions/result.json")
    assert list(saved["captions"]) == ["0", "1", "2", "3"] and saved["filenames"]["1"] == "001ea.jpg"
    assert [row["image_id"] for row in read_json(tmp_path / "coco.json")] == [0, 1, 2, 3]
    from clip_benchmark_ext.metrics.caption_metrics import score_captions
    alone = score_captions(*({i: saved[kind][i] for i in "13"} for kind in ("captions", "references")))
    assert metrics["out-domain/ROUGE_L"] == alone.scores["ROUGE_L"] != metrics["ROUGE_L"]


def test_long_captions_are_retrieved_and_other_tasks_are_named(runs, tmp_path):
    urban1k(tmp_path / "data")
    metrics = evaluate(runs, "urban1k", "--recall_k 1")["metrics"]
    assert metrics["images"] == metrics["captions"] == 4 and 0 <= metrics["text_retrieval_recall@1_debiased"] <= 1
    assert read_json(tmp_path / "result.json")["task"] == "zeroshot_retrieval"
    with pytest.raises(SystemExit, match="urban1k has captions: give --task zeroshot_retrieval or captioning or cloze"):
        evaluate(runs, "urban1k", "--task linear_probe")


def test_voc2007_leaves_out_what_is_in_doubt(tmp_path):
    voc2007_official(tmp_path)
    images = build_dataset("voc2007_official", tmp_path, lambda image: image.size)
    assert [target[:8].tolist() for _, target in images][:2] == [[1, 0, 0, 0, 1, 0, 0, -1], [0, 1, 0, 0, 0, 1, -1, 0]]
    write(tmp_path / "VOCdevkit/VOC2007/ImageSets/Main/dog_test.txt", "test0000 2\n")
    with pytest.raises(ValueError, match="Main/\\*_test.txt is not an image and 1, -1 or 0"):
        build_dataset("voc2007_official", tmp_path, None)


def test_several_classes_of_an_image_are_probed_and_classified(runs, tmp_path, capsys):
    voc2007_official(tmp_path / "data")
    flags = ("voc2007_official", "--task linear_probe --fewshot_epochs 20 --fewshot_lr 0.1")
    probed = evaluate(runs, *flags, "--feature pixels --fewshot_k -1")
    assert probed["metrics"]["lp_map_11_points"] > 0.9  # test images are among those of training
    assert [row["class"] for row in probed["of_classes"]] == VOC and "| sofa | " in capsys.readouterr().out
    assert "lp_acc1" not in probed["metrics"]
    with pytest.raises(SystemExit, match="--fewshot_k needs one class"):
        evaluate(runs, *flags, "--fewshot_k 2")
    with pytest.raises(SystemExit, match="several classes, give --task linear_probe"):
        evaluate(runs, "voc2007_official", "--task probe")
    metrics = evaluate(runs, "voc2007_official", "--scorer heuristic")["metrics"]
    assert 0 < metrics["map_11_points_debiased"] <= 1 and 0 < metrics["mean_average_precision"] <= 1


def test_average_precision_at_11_points_is_that_of_a_loop_and_of_a_hand():
    # Ranks 1, 3 and 6 are right: precision 1, 2/3, 1/2 at recall 1/3, 2/3, 1. Recalls 0 to 0.3, to 0.6, to 1.
    scores, targets = torch.arange(6, 0, -1.0)[:, None], torch.tensor([1, 0, 1, 0, 0, 1])[:, None]
    assert map_11_points(scores, targets) == pytest.approx((4 * 1 + 3 * 2 / 3 + 4 / 2) / 11)
    torch.manual_seed(0)
    for _ in range(20):
        scores, targets = torch.randn(30, 3), torch.randint(-1, 2, (30, 3))
        expected = []
        for score, target in zip(scores.T, targets.T, strict=True):
            ranked = [t for t in target[score.argsort(descending=True)].tolist() if t != -1]
            hits = [ranked[:rank].count(1) for rank in range(1, len(ranked) + 1)]
            expected.append(sum(max(
                (hit / rank for rank, hit in enumerate(hits, 1) if 10 * hit >= point * ranked.count(1)), default=0)
                for point in range(11)) / 11)
        rows = average_precisions(scores, targets, ["a", "b", "c"])
        assert [row["ap_11_points"] for row in rows] == pytest.approx(expected)
        assert [row["images"] for row in rows] == (targets == 1).sum(0).tolist()
    with pytest.raises(ValueError, match="no image has a class"):
        map_11_points(scores, torch.zeros(30, 3))


# ---- rows of your own

OWN = {
    "selection": {"mine": {"file": "pairs.csv", "columns": {"images": ["image"], "captions": ["right", "wrong"]}}},
    "captions": {"holiday": {"subsets": {"sea": {}, "hills": {}}, "file": "{subset}-{split}.jsonl",
                             "columns": {"images": ["image"], "captions": "texts"}}},
    "classes": {"birds": {"file": "birds.csv", "templates": ["a {c}"],
                          "columns": {"images": ["image"], "labels": ["kind"], "split": "split"}}}}


def test_data_sets_of_a_file_of_yours_are_evaluated(runs, tmp_path):
    data, names = tmp_path / "data", [picture(tmp_path / f"data/{i}.png", i) for i in range(4)]
    write(data / "pairs.csv", "image,right,wrong", *(f"{name},a dog,a cat" for name in names))
    write(data / "sea-test.jsonl", *({"image": name, "texts": TEXTS[:2]} for name in names))
    write(data / "birds.csv", "image,kind,split", *(
        f"{name},{('owl', 'jay')[i % 2]},{split}" for split in ("train", "test") for i, name in enumerate(names)))
    write(tmp_path / "own.json", OWN)
    own = ("--datasets", tmp_path / "own.json")
    found = evaluate(runs, "mine", *own)
    assert found["metrics"]["cases"] == 4 and "text_acc_debiased" in found["metrics"]
    assert len(found["settings"]["datasets_sha256"][0]) == 64
    assert evaluate(runs, "holiday/sea", *own, "--recall_k 1")["metrics"]["captions"] == 8
    probed = evaluate(runs, "birds", *own, "--task linear_probe --fewshot_epochs 1 --fewshot_lr 0.1 --fewshot_k -1")
    assert [(row["class"], row["images"]) for row in probed["of_classes"]] == [("jay", 2), ("owl", 2)]
    rows = evaluate(runs, "birds", *own)["of_classes"]
    assert rows[0].keys() == {"class", "images", "plain", "blind", "debiased"}
    write(tmp_path / "own.json", json.dumps(OWN).replace(', "split": "split"', ""))
    with pytest.raises(SystemExit, match="birds has the same images for test and train: give its row a split"):
        evaluate(runs, "birds", *own, "--task linear_probe")
    for name, said in (("hills", "no hills-test.jsonl in .* should then hold: ROOT/hills-test.jsonl"),
                       ("see", "'holiday/see'.*holiday/sea.*give one of holiday/sea, holiday/hills")):
        with pytest.raises(SystemExit, match=said):
            evaluate(runs, f"holiday/{name}", *own)


def test_a_reader_of_a_plug_in_is_a_row_too(runs, tmp_path):
    image = tmp_path / "data" / picture(tmp_path / "data/0.png", 0)
    (tmp_path / "my_set.py").write_text(
        "from clip_benchmark_ext.datasets.readers import Case\n"
        "from clip_benchmark_ext.selection_datasets import PAIRS, ROWS, Row\n"
        "def read(name, root, **_):\n"
        f"    return [Case('a', (root / {image.name!r},), ('a dog', 'a cat'), name)], {{'facts': 1}}\n"
        "ROWS['of_a_plugin'] = Row(read, PAIRS)\n")
    metrics = evaluate(runs, "of_a_plugin", "--plugin", tmp_path / "my_set.py")["metrics"]
    assert metrics["cases"] == metrics["facts"] == 1


def test_fields_of_rows_are_those_of_the_code_and_of_our_own_rows():
    fields = read_json(known.PACKAGE / "dataset_fields.json")
    forms = dict.fromkeys(("selection", "captions", "classes"), list(FORMS)) | {"masked": list(masks.FORMS)}
    assert {kind: fields[kind]["form"] for kind in forms} == forms and fields["selection"]["case"] == list(CASES)
    assert fields["selection"]["metric"] == [
        name for name, value in vars(selection_metrics).items() if isinstance(value, selection_metrics.Metric)]
    for kind in ("captions", "classes", "masked"):
        for name, row in known.KINDS[kind].maps[1].items():
            for own in row.get("subsets", {"": {}}).values():
                known.check({field: value for field, value in {**row, **own}.items() if field in fields[kind]},
                            fields[kind], name)
