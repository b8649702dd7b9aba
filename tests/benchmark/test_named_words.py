"""Claims about the words that captions name."""
import pytest

from clip_benchmark_ext.metrics import repeats
from clip_benchmark_ext.metrics.hallucination import KINDS, metrics, named
from open_clip_mdc.scenes.plain import COLOURS, RELATIONS, SHAPES


def test_words_are_found_whole_in_singular_and_with_the_longest_relation():
    assert named("Two Dogs and a bluebird, up above a red car in front of people") == {
        "colours": {"red"}, "nouns": {"dog", "car", "person"}, "relations": {"up above", "in front of"}}
    assert named("the upturned boat is down below") == {
        "colours": set(), "nouns": {"boat"}, "relations": {"down below"}}
    assert named("") == {"colours": set(), "nouns": set(), "relations": set()}


def test_the_scenes_vocabulary_is_among_the_words():
    assert set(COLOURS) <= set(KINDS["colours"]) and set(SHAPES) <= set(KINDS["nouns"])
    assert set(RELATIONS) | set(RELATIONS.values()) <= set(KINDS["relations"])


def test_hallucination_and_recall_worked_out_by_hand():
    captions = {"a": "a red dog left of a cat", "b": "two men on a bench", "c": "something"}
    references = {"a": ["a red dog", "a blue dog right of a horse"], "b": ["a man sits"], "c": ["a green star"]}
    found, of_images, weights = metrics(captions, references)
    # In no reference are cat (a) and bench (b), c names nothing. Named: red, dog, cat, man, bench
    assert found == pytest.approx({
        "hallucinating_captions": 2 / 3, "hallucinated_words": 2 / 5,
        "recall_colours": 1 / 3,  # red of red, blue, green
        "recall_nouns": 2 / 4,  # dog, man of dog, horse, man, star
        "recall_relations": 0, "exact_match": 0, "repeated_words": 0})
    assert of_images["hallucinating_captions"] == [1, 1, 0]
    assert of_images["hallucinated_words"] == [1 / 3, 1 / 2, 0] and weights["hallucinated_words"] == [3, 2, 0]
    assert of_images["recall_nouns"] == [1 / 2, 1, 0] and weights["recall_nouns"] == [2, 1, 1]


def test_what_nobody_names_has_no_share():
    found, *_ = metrics({"a": "it is"}, {"a": ["so  It IS", "It  is"]})
    assert found == {"hallucinating_captions": 0, "repeated_words": 0, "exact_match": 1}


@pytest.mark.parametrize("caption, count", [("a a a dog", 2), ("A a", 1), ("a dog a dog", 0), ("", 0), ("the them", 0)])
def test_repeated_words_are_adjacent_ones(caption, count):
    assert repeats.repeated_words(caption) == count
    assert metrics({"x": caption}, {"x": ["y"]})[0]["repeated_words"] == count


def test_a_phrase_is_recalled_where_it_is_true_and_an_alarm_where_it_is_not():
    captions = {"a": "A yellow star left of it", "b": "a yellow starfish", "c": "a yellow star", "d": "a dog", "e": "x"}
    references = {"a": ["x", "one yellow star"], "b": ["the yellow star"], "c": ["a red star"], "d": ["a dog"],
                  "e": ["x"]}
    found, values, weights = metrics(captions, references, "yellow star")
    assert (found["phrase_recall"], found["phrase_false_alarms"]) == (1 / 2, 1 / 3)
    assert values["phrase_recall"] == [1, 0, 1, 0, 0] and weights["phrase_recall"] == [1, 1, 0, 0, 0]
    found, _, weights = metrics({"a": "red"}, {"a": ["a star"]}, "star")
    assert found["phrase_recall"] == 0 and not {"phrase_false_alarms"} & {*found, *weights}
