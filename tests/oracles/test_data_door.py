"""Claims about what --train-data and --val-data name, told before the model is built."""
import pytest
from conftest import png
from strategies import tar

import open_clip_mdc
from open_clip_mdc import train
from open_clip_mdc.data.images import as_it_is
from open_clip_mdc.integration import check_flags, csv_images

ROWS = 12


@pytest.fixture
def place(here):
    """A folder of photographs, tables of them, and shards, with one thing wrong in each."""
    (here / "photos").mkdir()
    for i in range(ROWS):
        (here / f"photos/p{i}.png").write_bytes(png(0, 16))
    (here / "photos/page.png").write_text("<html>")
    names = [f"photos/p{i}.png" for i in range(ROWS)]
    seventh = {"one": "photos/none.png", "html": "photos/page.png", "folder": "photos", "good": names[6]}
    tables = {name: [*names[:6], image, *names[7:]] for name, image in seventh.items()}
    tables |= {"windows": [name.replace("/", "\\") for name in names],
               "most": [*names[:3], *(f"gone/{i}.png" for i in range(9))]}
    for name, rows in tables.items():
        (here / f"{name}.csv").write_text("filepath,title\n" + "".join(f"{row},a dog\n" for row in rows))
    pairs = [(f"{i}.{kind}", data) for i in range(ROWS) for kind, data in (("png", png(i, 16)), ("txt", b"a dog"))]
    whole = tar(pairs)
    shards = {"whole": whole, "cut": whole[:len(whole) // 2], "photo": png(0, 16), "images": tar(pairs[::2]),
              "apart": tar(pairs[::2] + pairs[1::2]), "empty": bytes(10240),
              "between": tar(pairs[:4])[:-1024]}  # where no member is open
    for name, data in shards.items():
        (here / f"{name}.tar").write_bytes(data)
    open_clip_mdc.register(training=True)
    return here


def parsed(*flags):
    return train.parse(["--model", "MDC-ViT-Ti-8", "--device", "cpu", "--precision", "fp32", *flags])


def problem(*flags) -> str | None:
    return check_flags.find_problem(parsed("--batch-size", "4", "--workers", "1", "--train-num-samples", "12", *flags))


def csv_rows(name: str) -> csv_images.CsvImages:
    return csv_images.CsvImages(f"{name}.csv", as_it_is, "filepath", "title", ",", tokenizer=lambda texts: texts)


@pytest.mark.parametrize("name, word", [
    ("cut.tar", "not a complete tar file"), ("between.tar", "not a complete tar file"),
    ("photo.tar", "not a complete tar file"), ("apart.tar", "tar --sort=name"), ("images.tar", "sample 0 (png)"),
    ("empty.tar", "holds no sample"), ("one.csv", "one.csv, line 8: photos/none.png: no such file"),
    ("html.csv", "html.csv, line 8: photos/page.png: it is no JPEG"), ("folder.csv", "line 8: photos: it is a folder"),
    ("most.csv", "9 of 12 images"), ("whole.tar", None), ("good.csv", None), ("windows.csv", None)])
def test_validation_data_are_opened_before_the_model_is_built(place, name, word):
    found = problem("--train-data", "good.csv", "--val-data", name)
    assert found is None if word is None else found.startswith("--val-data: ") and word in found and "\n" not in found


@pytest.mark.parametrize("name, word", [
    ("photo.tar", "not a complete tar file"), ("apart.tar", "tar --sort=name"), ("images.tar", "sample 0 (png)"),
    ("empty.tar", "holds no sample"), ("most.csv", "9 of 12 images that were looked at cannot be read. The first is "
     "most.csv, line 5: gone/0.png: no such file"), ("one.csv", None), ("html.csv", None), ("whole.tar", None),
    ("windows.csv", None), ("photo.tar::whole.tar", None)])
def test_training_is_refused_if_most_of_what_was_looked_at_is_of_no_use(place, name, word):
    found = problem("--train-data", name)
    assert found is None if word is None else found.startswith("--train-data: ") and word in found


@pytest.mark.parametrize("name, line", [("one", 8), ("html", 8), ("folder", 8), ("good", None), ("windows", None)])
def test_a_row_without_a_usable_image_is_left_out_counted_and_named(place, name, line, caplog):
    rows = csv_rows(name)
    assert len([rows[i] for i in range(len(rows))]) == ROWS
    said = [text for text in check_flags.find_warnings(parsed("--train-data", f"{name}.csv")) if "left out" in text]
    assert len(said) == caplog.text.count("Left out") == bool(line)
    if line:
        assert f"Left out 1 of the rows of {name}.csv" in caplog.text and f"line {line}:" in caplog.text
        assert "--train-data: 1 of 12 images" in said[0] and f"{name}.csv, line {line}:" in said[0]


def test_a_run_stops_where_no_image_can_be_read(place, monkeypatch):
    monkeypatch.setattr(csv_images, "MOST_TRIED", 5)
    with pytest.raises(ValueError, match="most.csv, line 6, and none of 5 rows from there on"):
        csv_rows("most")[4]
