"""Claims about lists in text files that common programs have saved."""
import pytest

from clip_benchmark_ext.metrics import diversity
from experiments import judge
from experiments import prepare_cub as cub
from open_clip_mdc.cli import caption, score
from open_clip_mdc.data.text import read_lines, read_names

SAVED = {"UTF-8 with a mark": lambda text: text.encode("utf-8-sig"), "UTF-16": lambda text: text.encode("utf-16"),
         "Windows": lambda text: text.replace("\n", "\r\n").encode(),
         "old Mac": lambda text: text.replace("\n", "\r").encode(),
         "blanks": lambda text: text.replace("\n", "  \n").encode() + b" \n\n"}
READERS = [
    ("c.txt", "a café\na star\n", score.read_captions, ["a café", "a star"]),
    ("c.txt", "a café\na star\n", diversity.read_train_captions, {"a café", "a star"}),
    ("c.jsonl", '{"image": "0.jpg", "caption": "a café", "tokens": []}\n', judge.read_captions, {"0": "a café"}),
    ("c.json", '{"captions":\n {"0": "a café"}}\n', judge.read_captions, {"0": "a café"}),
    ("c.jsonl", '{"image": "0.jpg", "caption": "a café", "tokens": []}\n',
     lambda path: [row["caption"] for row in caption.read_captions(path).values()], ["a café"]),
    ("c.txt", "001.A\n002.B\n", lambda path: cub.reed_split([(1, "x"), (3, "y")], [path, f"{path}.test"]),
     {(1, "x"): "train"}),
    ("c.txt", "dog\na café\n", read_names, ["dog", "a café"]),
]


@pytest.mark.parametrize("program", SAVED)
@pytest.mark.parametrize("name, text, read, expected", READERS)
def test_a_list_is_the_same_whoever_saved_it(name, text, read, expected, program, tmp_path):
    (tmp_path / name).write_bytes(SAVED[program](text))
    (tmp_path / f"{name}.test").write_text("005.C\n")
    assert read(str(tmp_path / name)) == expected


def test_a_blank_line_among_class_names_is_refused_and_a_second_one_said(tmp_path, caplog):
    (tmp_path / "classnames.txt").write_text("dog\n\ncat\n")
    with pytest.raises(ValueError, match="classnames.txt, line 2 is blank"):
        read_names(tmp_path / "classnames.txt")
    (tmp_path / "classnames.txt").write_text("dog\ncat\ndog\n\n")
    assert read_names(tmp_path / "classnames.txt") == ["dog", "cat", "dog"]
    assert "1 lines more than once, such as 'dog'" in caplog.text


def test_a_zero_byte_is_a_letter_of_a_caption(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a dog\0 on a bike\na cat\n")
    assert read_lines(tmp_path / "a.txt") == ["a dog\0 on a bike", "a cat"]
