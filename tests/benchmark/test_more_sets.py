"""Claims about SugarCrepe++, BiVLC, What'sUp, COLA, NegBench, ColorSwap and MMVP-VLM: rendered scenes in their layouts.

The true captions of a scene are derived from its coordinates, by other code than the readers under test.
"""
import csv
import json
import random
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from case_files import save_json
from PIL import ImageChops

from clip_benchmark_ext import cli
from clip_benchmark_ext.datasets.readers import Case
from clip_benchmark_ext.metrics.selection_metrics import selection_metrics
from clip_benchmark_ext.metrics.statements import statement_metrics
from clip_benchmark_ext.selection_datasets import build_dataset, find_row
from open_clip_mdc.scenes.drawing import render
from open_clip_mdc.scenes.plain import RELATIONS, World, caption, draw_pair

COUNT = 6
TWO_IMAGES = ("bivlc", "cola", "colorswap", "mmvp_vlm")
NAMES = ("sugar_crepe_pp/swap_obj", "whatsup/controlled_images_a", "whatsup/coco_qa_one_obj", "whatsup/vg_qa_two_obj",
         "negbench/coco", *TWO_IMAGES)


def is_true(text: str, scene) -> bool:
    text = text.removeprefix("a photo of ")
    objects = [asdict(item) for item in scene.objects]
    axis = max("xy", key=lambda axis: abs(objects[0][axis] - objects[1][axis]))
    first, second = (f"a {item['colour']} {item['shape']}" for item in sorted(objects, key=lambda item: item[axis]))
    before, after = {"x": ("left of", "right of"), "y": ("up above", "down below")}[axis]
    return text in (f"{first} {before} {second}", f"{second} {after} {first}")


class Files:
    """A data set of COUNT pairs of scenes, a scene and the one with swapped colours, and what its images show."""

    def __init__(self, root: Path, name: str):
        self.root, self.scenes, self.images, rng = root, {}, {}, random.Random(name)
        self.pairs = []
        for _ in range(COUNT):
            scene, true, false = draw_pair(World(), rng)
            a, b = scene.objects
            other = replace(scene, objects=(replace(a, colour=b.colour), replace(b, colour=a.colour)))
            assert caption(other.objects, other.relation) == false["swap_att"]
            self.pairs.append((scene, other, true, false))
        self.rng = rng
        getattr(self, name.partition("/")[0])(*name.split("/")[1:])

    def save(self, name: str, scene) -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.images[path.name] = render(scene, 32, self.rng)
        self.images[path.name].save(path)
        self.scenes[path.name] = scene
        return name

    def sugar_crepe_pp(self, subset):
        save_json(self.root / f"{subset}.json", [
            {"id": i, "filename": Path(self.save(f"val2017/{i:012d}.png", scene)).name, "caption": true,
             "caption2": "a {1} {2} a {0}".format(*(item.noun for item in scene.objects), RELATIONS[scene.relation]),
             "negative_caption": false["swap_att"]} for i, (scene, _, true, false) in enumerate(self.pairs)])

    def whatsup(self, subset):
        rows = []
        for i, (scene, _, true, false) in enumerate(self.pairs):
            place = scene.relation.replace("up above", "on").replace(" ", "_")
            if subset == "controlled_images_a":
                image = self.save(f"controlled_images/mug{i}_{place}_plate.jpeg", scene)
                rows.append({"image_path": f"data/{image}", "caption_options": [true, *false.values()]})
            else:
                number, folder = (i, "val2017") if subset == "coco_qa_one_obj" else (f"23{i}", "vg_images")
                self.save(f"{folder}/{i:012d}.jpg" if folder == "val2017" else f"{folder}/{number}.jpg", scene)
                rows.append([number, true, false["replace_rel"]])
        file = "controlled_images_dataset" if subset == "controlled_images_a" else subset
        save_json(self.root / f"{file}.json", rows)

    def negbench(self, subset):
        self.root.mkdir(exist_ok=True)
        with (self.root / "COCO_val_mcq_llama3.1_rephrased.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["image_path", "correct_answer", *(f"caption_{i}" for i in range(4)),
                           "correct_answer_template"])
            for i, (scene, _, true, false) in enumerate(self.pairs):
                captions = list(false.values())
                captions.insert(i % 4, true)
                image = self.save(f"val2017/{i:012d}.png", scene)
                kind = ("positive", "negative", "hybrid")[i % 3]
                rows.writerow([f"data/coco/images/{image}", i % 4, *captions, kind])

    def bivlc(self):
        def cell(scene, name):
            stream = BytesIO()
            self.images[name] = render(scene, 32, self.rng)
            self.images[name].save(stream, "PNG")
            self.scenes[name] = scene
            return {"bytes": stream.getvalue(), "path": None}

        for table in range(2):
            file = f"test-0000{table}-of-00002-abc.parquet"
            rows = []
            for i, (scene, other, true, false) in enumerate(self.pairs[table::2]):
                place = f"{file}#{i // 2}.{i % 2}"
                rows.append({"image": cell(scene, f"{place}.image"), "caption": true,
                             "negative_image": cell(other, f"{place}.negative_image"),
                             "negative_caption": false["swap_att"], "type": ("swap", "add")[i % 2], "subtype": "att"})
            (self.root / "data").mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), self.root / "data" / file, row_group_size=2)

    def cola(self):
        save_json(self.root / "COLA_multiobjects_matching_benchmark.json", [
            [f"https://example.org/vg/{Path(self.save(f'images/{i}0.jpg', scene)).name}", true,
             f"https://example.org/vg/{Path(self.save(f'images/{i}1.jpg', other)).name}", false["swap_att"]]
            for i, (scene, other, true, false) in enumerate(self.pairs)])

    def colorswap(self):
        save_json(self.root / "data" / "test.json", [
            {"id": i, "caption_1": true, "caption_2": false["swap_att"], "image_source": "midjourney",
             "image_1": Path(self.save(f"data/images/img_{i}_1.png", scene)).relative_to("data").as_posix(),
             "image_2": Path(self.save(f"data/images/img_{i}_2.png", other)).relative_to("data").as_posix()}
            for i, (scene, other, true, false) in enumerate(self.pairs)])

    def mmvp_vlm(self):
        self.root.mkdir(exist_ok=True)
        with (self.root / "Questions.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["Question ID", "Type", "Statement"])
            for i, (scene, other, true, false) in enumerate(self.pairs):
                pattern = ("Orientation", "Camera Perspective")[i % 2]
                for number, shown, text in ((2 * i + 1, scene, true), (2 * i + 2, other, false["swap_att"])):
                    self.save(f"MLLM_VLM Images/{pattern}/{number}.jpg", shown)
                    rows.writerow([number, pattern, text])

    def nlvr(self, split):
        rows = []
        for i, (scene, other, true, _) in enumerate(self.pairs):
            for m, shown in enumerate((scene, other)):
                for k in range(6):
                    self.save(f"images/{i % 2}/{split}-{i}-{m}-{k}.png", shown)
                rows.append({"sentence": true, "identifier": f"{i}-{m}", "directory": str(i % 2), "evals": {},
                             "label": str(is_true(true, shown)).lower()})
        (self.root / f"{split}.json").write_text("\n".join(map(json.dumps, rows)) + "\n")

    def truth(self, case: Case) -> np.ndarray:
        """Score 1 where a caption is true of an image, 0 where it is not: [C], or [I, C] of two images."""
        scores = np.array([[float(is_true(text, self.scenes[image.name])) for text in case.captions]
                           for image in case.images])
        return scores if len(scores) > 1 else scores[0]


@pytest.mark.parametrize("name", NAMES)
def test_who_knows_what_is_true_is_right_in_every_case_and_who_lies_in_none(tmp_path, name):
    files = Files(tmp_path / "set", name)
    dataset = build_dataset(name, tmp_path / "set")
    assert len(dataset) == COUNT and dataset.facts == {"cases_left_out": 0}
    assert [len(case.images) for case in dataset.cases] == [1 + (name in TWO_IMAGES)] * COUNT
    scores = [files.truth(case) for case in dataset.cases]
    metrics, _ = selection_metrics(dataset.metric, {"plain": scores, "blind": [-s for s in scores]}, dataset.cases)
    for number in ("text_acc", *(("image_acc", "acc") if name in TWO_IMAGES else ())):
        assert metrics[number] == 1 and metrics[f"{number}_blind"] == 0
    for case, (images, captions) in zip(dataset.cases, dataset, strict=True):
        images = images if isinstance(images, list) else [images]
        for image, source in zip(images, case.images, strict=True):
            unlike = {name: np.asarray(ImageChops.difference(image, drawn), dtype=float).mean()
                      for name, drawn in files.images.items()}
            assert min(unlike, key=unlike.get) == source.name  # but for JPEG's losses it is 0
        assert list(case.captions) == captions


@pytest.mark.parametrize("name", ["sugar_crepe_pp/swap_obj", "whatsup/controlled_images_a", "bivlc"])
def test_every_set_is_scored_by_the_command_plain_blind_and_debiased(runs, clip_benchmark, tmp_path, name):
    Files(tmp_path / "set", name)
    cli.main(["eval", "--model", "mdc", "--pretrained", str(runs / "mdc"), "--dataset", name, "--dataset_root",
              str(tmp_path / "set"), "--num_workers", "0", "--quiet", "--output", "result.json"])
    metrics = json.loads(Path("result.json").read_text())["metrics"]
    assert metrics["cases"] == COUNT and metrics["scorer"] == "heuristic"
    for number in ("text_acc", *(("image_acc", "acc") if name in TWO_IMAGES else ())):
        assert all(0 <= metrics[f"{number}{row}"] <= 1 for row in ("", "_blind", "_debiased"))
    assert name not in TWO_IMAGES or metrics["image_ties_blind"] == COUNT  # it cannot tell images apart


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
        metric = find_row(name).metric
        metrics, _ = selection_metrics(metric, {"plain": scores, "debiased": scores}, cases)
        assert metrics["statement_acc_debiased"] == share and "statement_acc" not in metrics


def test_statements_of_nlvr_are_judged_one_by_one(runs, clip_benchmark, tmp_path):
    files = Files(tmp_path / "set", "nlvr/dev")
    dataset = build_dataset("nlvr/dev", tmp_path / "set")
    assert len(dataset) == 12 * COUNT and dataset[0][1] == [files.pairs[0][2]]
    truth = [files.truth(case) for case in dataset.cases]
    assert [case.right for case in dataset.cases] == [int(score[0]) for score in truth]
    cli.main(["eval", "--model", "mdc", "--pretrained", str(runs / "mdc"), "--dataset", "nlvr/dev", "--dataset_root",
              str(tmp_path / "set"), "--num_workers", "0", "--quiet", "--output", "result.json"])
    metrics = json.loads(Path("result.json").read_text())["metrics"]
    assert metrics["cases"] == 12 * COUNT and metrics["majority"] == 0.5
    assert metrics["auc_blind"] == 0.5  # each sentence is as often true as false
    assert 0 <= metrics["text_acc_debiased"] <= 1 and "text_acc" not in metrics


def test_the_numbers_of_statements_are_counted_by_hand():
    cases = [Case(str(i), (Path(f"{i}.png"),), (sentence,), sentence, right=right)
             for i, (sentence, right) in enumerate((("x", 1), ("x", 0), ("y", 1), ("y", 0), ("z", 1)))]
    scores = [[2.0], [-1.0], [0.5], [1.0], [-3.0]]
    metrics, items = statement_metrics({"plain": scores, "debiased": scores}, cases)
    assert metrics["text_acc_debiased"] == 3 / 5 and items["values"]["text_acc_debiased"] == [1, 1, 1, 0, 0]
    assert metrics["consistency_debiased"] == 1 / 3 and metrics["majority"] == 3 / 5
    assert metrics["auc"] == 3 / 6  # of true against false: 2 is above both, 0.5 above one, -3 above none


def test_a_surface_that_a_right_caption_has_too_gives_nothing_away():
    cases = [Case("0", (Path("x.png"),), ("A dog.", "a dog", "A cat."), "g", right=2),
             Case("1", (Path("x.png"),), ("A dog.", "A hound.", "A cat"), "g", right=2)]
    metrics, items = selection_metrics(find_row("sugar_crepe_pp/swap_obj").metric, {"plain": [[2, 2, 1]] * 2}, cases)
    assert items["full_stop_differs"] == [False, True] and metrics["capital_differs"] == 0


def test_pairs_and_sets_of_whatsup_count_only_when_all_their_places_are_right():
    places = ("left", "right", "on", "under")
    cases = [Case(f"{thing} {place}", (Path("x.png"),), ("a", "b", "c", "d"), f"{thing} {place} table")
             for thing in ("mug", "cap", "pen") for place in places]
    right = dict.fromkeys((case.key for case in cases), True) | {"cap under": False, "pen left": False, "pen on": False}
    scores = [[1, 0, 0, 0] if right[case.key] else [0, 1, 0, 0] for case in cases]
    metrics, _ = selection_metrics(find_row("whatsup/controlled_images_a").metric, {"plain": scores}, cases)
    assert metrics["text_acc"] == 9 / 12
    assert metrics["pair_acc"] == 3 / 6  # of pen none, of cap left and right
    assert metrics["set_acc"] == 1 / 3
    assert [metrics[f"text_acc_{place}"] for place in places] == [2 / 3, 1, 2 / 3, 2 / 3]


def test_the_numbers_of_each_kind_are_the_metrics_of_its_cases():
    cases = [Case(str(i), (Path("a.png"), Path("b.png")), (f"x {i}", f"y {i}"), kind)
             for i, kind in enumerate(("Camera Perspective", "Color", "Color"))]
    scores = [[[2, 1], [1, 2]], [[2, 1], [3, 4]], [[1, 2], [0, 3]]]  # both, text alone, image alone
    metrics, _ = selection_metrics(find_row("mmvp_vlm").metric, {"blind": scores}, cases)
    assert [metrics[f"{name}_camera_perspective_blind"] for name in ("text_acc", "image_acc", "acc")] == [1, 1, 1]
    assert [metrics[f"{name}_color_blind"] for name in ("text_acc", "image_acc", "acc")] == [0.5, 0.5, 0]


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
    Files(tmp_path, name)
    path = tmp_path / file
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        build_dataset(name, tmp_path)
