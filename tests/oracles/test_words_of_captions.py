"""Metrics that count words, with counts by hand. A full stop is no word."""
import pytest

from clip_benchmark_ext.metrics import diversity, repeats


@pytest.mark.parametrize("stop", ["", " .", ".", " !", " . ."])
def test_a_caption_has_the_same_words_with_any_end(stop):
    captions = {"a": f"A dog in the{stop}", "b": f"a dog on on a bike{stop}", "c": stop, "d": f"two cats{stop}"}
    found, of_images = repeats.metrics(captions)
    assert of_images == {"cut_captions": [1, 0, 0, 0], "repeating_captions": [0, 1, 0, 0],
                         "empty_captions": [0, 0, 1, 0], "distinct_words": [4, 4, 0, 2]}
    assert found == {name: sum(values) / 4 for name, values in of_images.items()}
    assert [repeats.repeated_words(caption) for caption in captions.values()] == [0, 1, 0, 0]


@pytest.mark.parametrize("stop", ["", " .", "."])
def test_diversity_is_of_words(stop):
    found, _ = diversity.metrics({0: [f"a dog runs fast{stop}", f"a dog sits here{stop}"]})
    assert found["div_1"] == 6 / 8  # a dog runs fast sits here
    assert found["div_2"] == 5 / 8  # a-dog dog-runs runs-fast dog-sits sits-here
    assert found["distinct_captions"] == 1 and found["mBLEU_4"] < 1e-3
    too_short, _ = diversity.metrics({0: [f"two brown dogs{stop}"] * 2})
    assert too_short["mBLEU_4"] is None
