"""Claims about SugarCrepe++, BiVLC, What'sUp, COLA, NegBench, ColorSwap and MMVP-VLM: cases in their layouts."""
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_image, picture, png, write_csv, write_json
from models import evaluate, flags_of, save_clip

from clip_benchmark_ext.datasets.readers import Case
from clip_benchmark_ext.metrics.selection_metrics import selection_metrics
from clip_benchmark_ext.metrics.statements import statement_metrics
from clip_benchmark_ext.selection_datasets import build_dataset, find_row

COUNT = 6
TWO_IMAGES = ("bivlc", "cola", "colorswap", "mmvp_vlm")
NAMES = ("sugar_crepe_pp/swap_obj", "whatsup/controlled_images_a", "whatsup/coco_qa_one_obj", "whatsup/vg_qa_two_obj",
         "negbench/coco", *TWO_IMAGES)
TRUE, FALSE = ([f"{word} {i}" for i in range(COUNT)] for word in ("right", "wrong"))
PAIRS = list(zip(range(COUNT), TRUE, FALSE, strict=True))


def sugar_crepe_pp(root: Path, subset: str) -> None:
    write_json(root / f"{subset}.json", [
        {"id": i, "filename": picture(root / f"val2017/{i:012d}.png", i), "caption": true, "caption2": f"too {i}",
         "negative_caption": false} for i, true, false in PAIRS])


def whatsup(root: Path, subset: str) -> None:
    if subset == "controlled_images_a":
        rows = [{"image_path": "data/controlled_images/" + picture(
            root / f"controlled_images/mug{i}_{('on', 'left_of')[i % 2]}_plate.jpeg", i),
            "caption_options": [true, false, "x", "y"]} for i, true, false in PAIRS]
        return write_json(root / "controlled_images_dataset.json", rows)
    coco = subset == "coco_qa_one_obj"
    for i in range(COUNT):
        picture(root / (f"val2017/{i:012d}.jpg" if coco else f"vg_images/23{i}.jpg"), i)
    write_json(root / f"{subset}.json", [[i if coco else f"23{i}", true, false] for i, true, false in PAIRS])


def negbench(root: Path, subset: str) -> None:
    rows = [["image_path", "correct_answer", *(f"caption_{i}" for i in range(4)), "correct_answer_template"]]
    for i, true, false in PAIRS:
        captions = [false, "x", "y"]
        captions.insert(i % 4, true)
        image = picture(root / f"val2017/{i:012d}.png", i)
        rows.append([f"data/coco/images/val2017/{image}", i % 4, *captions, ("positive", "negative", "hybrid")[i % 3]])
    write_csv(root / "COCO_val_mcq_llama3.1_rephrased.csv", rows)


def bivlc(root: Path) -> None:
    (root / "data").mkdir(parents=True)
    for table, kind in enumerate(("swap", "add")):
        rows = [{"image": {"bytes": png(2 * i)}, "caption": true, "negative_image": {"bytes": png(2 * i + 1)},
                 "negative_caption": false, "type": kind} for i, true, false in PAIRS[table::2]]
        pq.write_table(pa.Table.from_pylist(rows), root / f"data/test-0000{table}-of-00002-abc.parquet",
                       row_group_size=2)


def cola(root: Path) -> None:
    def address(i: int, side: int) -> str:
        return f"https://example.org/vg/{picture(root / f'images/{i}{side}.jpg', 2 * i + side)}"

    write_json(root / "COLA_multiobjects_matching_benchmark.json", [
        [address(i, 0), true, address(i, 1), false] for i, true, false in PAIRS])


def colorswap(root: Path) -> None:
    def image(i: int, side: int) -> str:
        return "images/" + picture(root / f"data/images/img_{i}_{side + 1}.png", 2 * i + side)

    write_json(root / "data/test.json", [
        {"id": i, "caption_1": true, "caption_2": false, "image_source": "midjourney", "image_1": image(i, 0),
         "image_2": image(i, 1)} for i, true, false in PAIRS])


def mmvp_vlm(root: Path) -> None:
    rows = [["Question ID", "Type", "Statement"]]
    for i, *texts in PAIRS:
        pattern = ("Orientation", "Camera Perspective")[i % 2]
        for side, text in enumerate(texts):
            picture(root / f"MLLM_VLM Images/{pattern}/{2 * i + side + 1}.jpg", 2 * i + side)
            rows.append([2 * i + side + 1, pattern, text])
    write_csv(root / "Questions.csv", rows)


def nlvr(root: Path, split: str) -> None:
    """Each sentence is true of six images and false of six others."""
    rows = []
    for i, true, _ in PAIRS:
        for m in range(2):
            for k in range(6):
                picture(root / f"images/{i % 2}/{split}-{i}-{m}-{k}.png", 2 * i + m)
            rows.append({"sentence": true, "identifier": f"{i}-{m}", "directory": str(i % 2), "evals": {},
                         "label": ("true", "false")[m]})
    (root / f"{split}.json").write_text("\n".join(map(json.dumps, rows)) + "\n")


MAKERS = {make.__name__: make for make in (sugar_crepe_pp, whatsup, negbench, bivlc, cola, colorswap, mmvp_vlm, nlvr)}


def write_files(root: Path, name: str) -> None:
    """Write COUNT cases. Image i shows what caption i says, and of two images 2 i and 2 i + 1 each shows its own."""
    kind, *subset = name.split("/")
    MAKERS[kind](root, *subset)


@pytest.mark.parametrize("name", NAMES)
def test_each_case_has_its_images_and_captions_the_right_ones_first(tmp_path, name):
    write_files(tmp_path / "set", name)
    dataset = build_dataset(name, tmp_path / "set")
    assert len(dataset) == COUNT and dataset.facts == {"cases_left_out": 0}
    two, seen, scores = name in TWO_IMAGES, set(), []
    for case, (images, captions) in zip(dataset.cases, dataset, strict=True):
        texts = [caption.removeprefix("a photo of ") for caption in captions]
        i = TRUE.index(texts[0])
        seen.add(i)
        assert list(case.captions) == captions and FALSE[i] in texts[case.right:]
        assert [x.tobytes() for x in (images if two else [images])] == [
            make_image(number).tobytes() for number in ((2 * i, 2 * i + 1) if two else (i,))]
        scores.append(np.eye(2) if two else np.array([float(text in (TRUE[i], f"too {i}")) for text in texts]))
    metrics, _ = selection_metrics(dataset.metric, {"plain": scores, "blind": [-s for s in scores]}, dataset.cases)
    for number in ("text_acc", *(("image_acc", "acc") if two else ())):
        assert metrics[number] == 1 and metrics[f"{number}_blind"] == 0
    assert len(seen) == COUNT


def test_pairs_of_images_are_scored_plain_blind_and_debiased_and_as_clip_benchmark_scores_a_clip(
        runs, clip_benchmark, tmp_path):
    bivlc(tmp_path)
    metrics = evaluate(*flags_of(runs, "bivlc", tmp_path))["metrics"]
    assert metrics["cases"] == metrics["image_ties_blind"] == COUNT  # blind, it cannot tell images apart
    name, weights = save_clip(tmp_path)
    theirs = evaluate(*flags_of(runs, "bivlc", tmp_path, "--model", name, "--pretrained", weights))["metrics"]
    for found, prefix, suffix in ((metrics, "", ""), (metrics, "", "_blind"), (metrics, "", "_debiased"),
                                  (theirs, "", ""), (theirs, "clip_benchmark_", "")):
        whole, *parts = (found[f"{prefix}{name}{suffix}"] for name in ("acc", "text_acc", "image_acc"))
        assert 0 <= whole <= min(parts) <= max(parts) <= 1


def test_both_right_captions_of_sugar_crepe_pp_must_beat_the_wrong_one():
    cases = [Case(str(i), (Path("x.png"),), (f"a {i}", f"b {i}", f"wrong {i}"), "swap_obj", right=2) for i in range(4)]
    scores = [[3, 2, 1], [3, 1, 2], [1, 3, 2], [3, 2, 2]]
    metrics, _ = selection_metrics(find_row("sugar_crepe_pp/swap_obj").metric, {"plain": scores}, cases)
    assert (metrics["text_acc"], metrics["ties"], metrics["tied_cases"]) == (1 / 4, 1, "3")


def test_a_statement_is_taken_for_true_if_the_image_makes_it_more_probable():
    one = [Case(str(i), (Path("x.png"),), ("right", "too", "wrong"), "g", right=2) for i in range(2)]
    two = [Case("2", (Path("a.png"), Path("b.png")), ("x", "y"), "g")]
    for name, cases, scores, share in (
            ("sugar_crepe_pp/swap_obj", one, [[1, -1, -2], [3, 2, 1]], ((0.5 + 1) / 2 + (1 + 0) / 2) / 2),
            ("cola", two, [[[1, 2], [-1, 3]]], (1 + 0.5) / 2)):  # the diagonal is right, one other is above 0
        metrics, _ = selection_metrics(find_row(name).metric, {"plain": scores, "debiased": scores}, cases)
        assert metrics["statement_acc_debiased"] == share and "statement_acc" not in metrics


def test_statements_of_nlvr_are_judged_one_by_one(runs, clip_benchmark, tmp_path):
    nlvr(tmp_path / "set", "dev")
    dataset = build_dataset("nlvr/dev", tmp_path / "set")
    assert len(dataset) == 12 * COUNT and dataset[0][1] == [TRUE[0]]
    assert all(case.right == (case.images[0].name.split("-")[2] == "0") for case in dataset.cases)
    metrics = evaluate(*flags_of(runs, "nlvr/dev", tmp_path / "set"))["metrics"]
    assert metrics["cases"] == 12 * COUNT and metrics["majority"] == 0.5
    assert metrics["auc_blind"] == 0.5  # each sentence is as often true as false
    assert 0 <= metrics["text_acc_debiased"] <= 1 and "text_acc" not in metrics


def test_the_numbers_of_statements_are_counted_by_hand():
    cases = [Case(str(i), (Path(f"{i}.png"),), (sentence,), sentence, right=right)
             for i, (sentence, right) in enumerate((("x", 1), ("x", 0), ("y", 1), ("y", 0), ("z", 1)))]
    scores = [[2.0], [-1.0], [0.5], [1.0], [-3.0]]
    metrics, items = statement_metrics({"plain": scores, "debiased": scores}, cases)
    assert metrics.items() >= {
        "text_acc_debiased": 3 / 5, "consistency_debiased": 1 / 3, "majority": 3 / 5,
        "auc": 3 / 6}.items()  # of true against false: 2 is above both, 0.5 above one, -3 above none
    assert items["values"]["text_acc_debiased"] == [1, 1, 1, 0, 0]


def test_a_surface_that_a_right_caption_has_too_gives_nothing_away():
    cases = [Case("0", (Path("x.png"),), ("A dog.", "a dog", "A cat."), "g", right=2),
             Case("1", (Path("x.png"),), ("A dog.", "A hound.", "A cat"), "g", right=2)]
    metrics, items = selection_metrics(find_row("sugar_crepe_pp/swap_obj").metric, {"plain": [[2, 2, 1]] * 2}, cases)
    assert items["full_stop_differs"] == [False, True] and metrics["capital_differs"] == 0


def test_pairs_and_sets_of_whatsup_count_only_when_all_their_places_are_right():
    cases = [Case(f"{thing} {place}", (Path("x.png"),), ("a", "b", "c", "d"), f"{thing} {place} table")
             for thing in ("mug", "cap", "pen") for place in ("left", "right", "on", "under")]
    scores = [[case.key not in ("cap under", "pen left", "pen on"), 0.5, 0, 0] for case in cases]
    metrics, _ = selection_metrics(find_row("whatsup/controlled_images_a").metric, {"plain": scores}, cases)
    assert metrics.items() >= {"text_acc": 9 / 12, "pair_acc": 3 / 6,  # of pen none, of cap left and right
                               "set_acc": 1 / 3, "text_acc_left": 2 / 3, "text_acc_right": 1, "text_acc_on": 2 / 3,
                               "text_acc_under": 2 / 3}.items()


def test_the_numbers_of_each_kind_are_the_metrics_of_its_cases():
    cases = [Case(str(i), (Path("a.png"), Path("b.png")), (f"x {i}", f"y {i}"), kind)
             for i, kind in enumerate(("Camera Perspective", "Color", "Color"))]
    scores = [[[2, 1], [1, 2]], [[2, 1], [3, 4]], [[1, 2], [0, 3]]]  # both, text alone, image alone
    metrics, _ = selection_metrics(find_row("mmvp_vlm").metric, {"blind": scores}, cases)
    for kind, shares in (("camera_perspective", [1, 1, 1]), ("color", [0.5, 0.5, 0])):
        assert [metrics[f"{name}_{kind}_blind"] for name in ("text_acc", "image_acc", "acc")] == shares


@pytest.mark.parametrize("name, file, old, new, words", [
    ("sugar_crepe_pp/swap_obj", "swap_obj.json", "caption2", "caption3", "row 0: 'caption2' is missing"),
    ("whatsup/coco_qa_one_obj", "coco_qa_one_obj.json", "[[0, ", "[[0, 0, ", "row 0: .* is not .image, right, wrong"),
    ("negbench/coco", "COCO_val_mcq_llama3.1_rephrased.csv", "png,0,", "png,4,", "row 0: correct_answer is '4'"),
    ("cola", "COLA_multiobjects_matching_benchmark.json", '.jpg", "', '.jpg", 1, "',
     "row 0: .* is not .image_0, caption_0"),
    ("mmvp_vlm", "Questions.csv", "1,Orientation", "1,..", "refused the file name '../1.jpg'"),
    ("nlvr/dev", "dev.json", '"true"', '"maybe"', "row 0: label is 'maybe'"),
])
def test_a_damaged_row_is_named(tmp_path, name, file, old, new, words):
    write_files(tmp_path, name)
    path = tmp_path / file
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        build_dataset(name, tmp_path)
