"""Claims about the compositionality data sets: what is read, what is refused, and what the messages say."""
import json

import pytest
from conftest import picture, refused, write_json
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from clip_benchmark_ext.datasets import known
from clip_benchmark_ext.selection_datasets import build_dataset, find_row

DATASETS = known.names("selection", "captions", "classes")


def save_image(path, color, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (16, 12), color).save(path)


def sugar_crepe(root, images="val2017", keys=("0", "107", "109"), **overrides):
    """Write a folder of SugarCrepe with gaps in the keys of its rows."""
    rows = {key: {"filename": picture(root / images / f"{number:012d}.png", number),
                  "caption": f"a cat on mat {key}", "negative_caption": f"a mat on cat {key}", **overrides}
            for number, key in enumerate(keys)}
    write_json(root / "swap_obj.json", rows)
    return rows


@pytest.mark.parametrize("below, images", [("", "val2017"), ("", "images"), ("sugar_crepe", "val2017")])
def test_sugar_crepe_is_read_in_each_layout_with_gaps_in_its_keys(tmp_path, below, images):
    rows = sugar_crepe(tmp_path / below, images)
    dataset = build_dataset("sugar_crepe/swap_obj", tmp_path)
    assert [(case.key, case.group, case.images[0].name, *case.captions) for case in dataset.cases] == [
        (key, "swap_obj", *row.values()) for key, row in rows.items()]  # the right caption first
    assert dataset.facts == {"cases_left_out": 0}


def test_rows_with_image_restricts_the_set_and_the_number_left_out_is_told(tmp_path, caplog):
    sugar_crepe(tmp_path, keys=[str(i) for i in range(5)])
    write_json(tmp_path / "rows_with_image.json", {"swap_obj": ["3", "1"]})
    (tmp_path / "val2017/000000000000.png").unlink()
    dataset = build_dataset("sugar_crepe/swap_obj", tmp_path)
    assert [case.key for case in dataset.cases] == ["3", "1"]
    assert dataset.facts == {"cases_left_out": 3}
    assert "3 of 5 rows are left out" in caplog.text


def test_missing_images_are_counted_and_the_place_is_named(tmp_path):
    sugar_crepe(tmp_path)
    (tmp_path / "val2017/000000000001.png").unlink()
    message = refused(FileNotFoundError, build_dataset, "sugar_crepe/swap_obj", tmp_path)
    for words in ("1 of 3 rows have no image", str(tmp_path / "val2017"), "000000000001.png", "val2017.zip"):
        assert words in message


@pytest.mark.parametrize("name", DATASETS)
def test_a_missing_file_says_what_to_fetch_from_where_and_the_layout(tmp_path, name):
    message = refused(FileNotFoundError, build_dataset, name, tmp_path)
    assert all(words in message for words in (name, str(tmp_path), "https://", "ROOT/"))


def test_unknown_names_are_refused_with_the_list_of_known_ones(tmp_path):
    for name, rows in (("sugar_crepe/swap", "sugar_crepe/add_att, .*sugar_crepe/swap_obj$"), ("sugar_crepes", "aro, "),
                       ("aro/../../etc", "aro/vg_relation, "), ("valse/../x", "valse/existence, "),
                       ("winoground/x", "winoground$"), ("sugar_crepe_pp/swap", "sugar_crepe_pp/swap_obj, ")):
        with pytest.raises(ValueError, match=f"unknown data set '{name}'.*give one of .*{rows}"):
            find_row(name)
    for name in ("cifar10", "wds/cifar10"):
        with pytest.raises(ValueError, match="sugar_crepe, aro, winoground"):
            build_dataset(name, tmp_path)
    assert all(find_row(name) for name in (*DATASETS, "valse/my-own"))


@pytest.mark.parametrize("filename", ["../secret.png", "/etc/passwd", "", "..\\secret.png", "x\0.png"])
def test_file_names_that_lead_out_of_the_folder_are_refused(tmp_path, filename):
    picture(tmp_path / "secret.png", 0)
    sugar_crepe(tmp_path, filename=filename)
    with pytest.raises(ValueError, match="refused the file name"):
        build_dataset("sugar_crepe/swap_obj", tmp_path)


@pytest.mark.parametrize("content, message", [
    ("{", "is not JSON"),
    ("3", "should hold a JSON list or dict"),
    ("[]", "has no rows"),
    ('{"0": {"filename": "x.png", "caption": "a"}}', "row 0: 'negative_caption' is missing"),
    ("{}", "has no rows"),
])
def test_files_of_another_format_are_refused_with_the_row(tmp_path, content, message):
    (tmp_path / "images").mkdir()
    (tmp_path / "swap_obj.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        build_dataset("sugar_crepe/swap_obj", tmp_path)


def test_a_broken_image_is_named(tmp_path):
    sugar_crepe(tmp_path)
    (tmp_path / "val2017/000000000000.png").write_bytes(b"not an image")
    dataset = build_dataset("sugar_crepe/swap_obj", tmp_path)
    with pytest.raises(ValueError, match="000000000000.png"):
        dataset[0]


@pytest.mark.parametrize("part, file, group", [
    ("vg_relation", "visual_genome_relation.json", "to the left of"),
    ("vg_attribution", "visual_genome_attribution.json", "red_big"),
])
def test_aro_visual_genome_cuts_the_box_and_puts_the_true_caption_first(tmp_path, part, file, group):
    image = Image.new("RGB", (16, 12), (0, 0, 255))
    image.paste((255, 0, 0), (4, 2, 12, 8))
    (tmp_path / "images").mkdir()
    image.save(tmp_path / "images/1.png")
    row = {"image_path": "1.png", "bbox_x": 4, "bbox_y": 2, "bbox_w": 8, "bbox_h": 6, "true_caption": "the dog on a",
           "false_caption": "a on the dog", "relation_name": "to the left of", "attributes": ["red", "big"]}
    write_json(tmp_path / file, [row, row | {"bbox_x": 0.4, "bbox_w": 3.7}])
    dataset = build_dataset(f"aro/{part}", tmp_path)
    cut, captions = dataset[0]
    assert cut.size == (8, 6) and cut.getcolors() == [(48, (255, 0, 0))]  # the box and nothing else
    assert captions == ["the dog on a", "a on the dog"]
    assert [(case.group, case.box) for case in dataset.cases] == [(group, (4, 2, 12, 8)), (group, (0, 2, 4, 8))]


def test_winoground_stacks_two_images_and_keeps_captions_in_the_order_of_the_images(tmp_path):
    for image, color in (("ex_0_img_0", (255, 0, 0)), ("ex_0_img_1", (0, 0, 255))):
        save_image(tmp_path / f"images/{image}.png", color)
    line = {"id": 0, "image_0": "ex_0_img_0", "image_1": "ex_0_img_1", "caption_0": "red on blue",
            "caption_1": "blue on red", "collapsed_tag": "Object"}
    (tmp_path / "examples.jsonl").write_text(json.dumps(line) + "\n\n")
    dataset = build_dataset("winoground", tmp_path, ToTensor())
    assert len(dataset) == 1 and dataset.cases[0].group == "Object"
    (batch, texts), = DataLoader(dataset, collate_fn=dataset.collate_fn)
    assert batch.shape == (1, 2, 3, 12, 16) and texts == (["red on blue", "blue on red"],)
    assert batch.mean((3, 4)).tolist() == [[[1, 0, 0], [0, 0, 1]]]  # red, then blue
    assert [x.size for x in build_dataset("winoground", tmp_path)[0][0]] == [(16, 12)] * 2
    (tmp_path / "examples.jsonl").write_text("{")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        build_dataset("winoground", tmp_path)


def test_valse_keeps_rows_that_two_annotators_confirmed(tmp_path):
    save_image(tmp_path / "images/v7w_1.png", 9, "L")
    rows = {f"row{votes}": {"image_file": "v7w_1.png", "caption": "There are no dogs.", "foil": "There are dogs.",
                            "mturk": {"caption": votes, "foil": 3 - votes, "other": 0}} for votes in range(4)}
    write_json(tmp_path / "existence.json", rows)
    dataset = build_dataset("valse/existence", tmp_path)
    assert [case.key for case in dataset.cases] == ["row2", "row3"]
    assert dataset.facts == {"cases_left_out": 0, "rows_not_validated": 2}
    assert dataset[0][1] == ["There are no dogs.", "There are dogs."] and dataset[0][0].mode == "RGB"
    rows["row1"]["mturk"] = {}
    write_json(tmp_path / "existence.json", rows)
    with pytest.raises(ValueError, match="row1, mturk: 'caption' is missing"):
        build_dataset("valse/existence", tmp_path)
