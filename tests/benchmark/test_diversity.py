"""Claims about the diversity of captions."""
import pytest

from clip_benchmark_ext.metrics import diversity
from clip_benchmark_ext.metrics.diversity import m_bleu, metrics, read_train_captions
from open_clip_mdc.data.captions import CAPTION_SEPARATOR
from open_clip_mdc.data.shards import tar_writer


def test_n_equal_captions_have_the_least_diversity():
    """Those without a word in common are in oracles/test_words_of_captions.py."""
    assert metrics({"a": ["a dog runs on grass"] * 5})[0] == pytest.approx(
        {"div_1": 5 / 25, "div_2": 4 / 25, "distinct_captions": 1 / 5, "mBLEU_4": 1.0})


def test_m_bleu_by_hand():
    """"a b c d e" and "a b c d f" share 4 of 5, 3 of 4, 2 of 3 and 1 of 2 n-grams, without a brevity penalty."""
    expected = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert m_bleu({"x": ["a b c d e", "a b c d f"]}) == pytest.approx(expected, rel=1e-6)
    # the third's references are both others: a b c d of the first, e of neither
    assert m_bleu({"x": ["a b c d e"] * 2 + ["a b c d f"]}) == pytest.approx((1 + 1 + expected) / 3, rel=1e-6)


def test_novel_captions_are_those_that_training_lacks(tmp_path):
    with tar_writer(tmp_path / "0.tar") as writer:
        writer.write({"__key__": "0", "txt": CAPTION_SEPARATOR.join(["A  red dog", "a cat"]), "json": "{}"})
    (tmp_path / "train.txt").write_text("a red dog\n\na cat\n")
    for train in (str(tmp_path / "0.tar"), str(tmp_path / "train.txt")):
        known = read_train_captions(train)
        assert known == {"a red dog", "a cat"}
        found, of_images = metrics({"x": ["a red dog", "A Cat"], "y": ["a cat", "a red cat"]}, known)
        assert found["novel_captions"] == 0.25 and of_images["novel_captions"] == [0, 0.5]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="empty.txt holds no caption"):
        read_train_captions(str(tmp_path / "empty.txt"))
    with pytest.raises(FileNotFoundError):
        diversity.read_train_captions(str(tmp_path / "{0..1}.tar"))
