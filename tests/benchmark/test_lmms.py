"""Claims about lmms-eval's `--model open_clip_mdc`.

What needs lmms-eval (pip install '.[lmms]') is skipped without it.
"""
import json
import re
from importlib import import_module, metadata

import pytest
import torch
from conftest import REPO, make_image, picture, run

from clip_benchmark_ext.lmms import chair, local_tasks
from clip_benchmark_ext.lmms.questions import asks_for_caption, statement
from clip_benchmark_ext.metrics.caption_metrics import score_captions
from open_clip_mdc.integration.pretrained import load

TASKS = REPO / "clip_benchmark_ext/lmms/tasks"
THINGS = ("a dog", "an umbrella", "a red bus", "a man on a bench")
CAPTIONS = "a dog runs in the grass .", "two men on a street .", "a red bus .", "a girl in a blue shirt ."


@pytest.mark.parametrize("question", [
    "Provide a one-sentence caption for the provided image.", "Please describe this image in detail.",  # of lmms-eval
    "Please carefully observe the image and come up with a caption for the image", "Describe the image briefly.",
    "Write a short description of the photo."])
def test_a_question_that_asks_for_a_caption_is_known(question):
    assert asks_for_caption(question) and statement(question) is None


@pytest.mark.parametrize("question", [
    "What is in the image?", "Describe the image. What is behind the dog?", "Is the dog in the image?", "",
    "Provide a short description for this region.", "What does the caption of the image say?"])
def test_any_other_question_is_not_taken_for_one(question):
    assert not asks_for_caption(question) and statement(question) is None


@pytest.mark.parametrize("thing", THINGS)
def test_pope_asks_about_a_thing(thing):
    question = f"Is there {thing} in the image?"
    for end in ("", "\nAnswer the question using a single word or phrase."):  # as lmms-eval adds
        assert statement(question + end) == f"a photo of {thing} ." and not asks_for_caption(question + end)


@pytest.mark.parametrize("form", [tuple, list, lambda pair: str(tuple(pair)), lambda pair: str(list(pair))])
def test_the_choice_of_the_least_loss_is_right_in_each_form_in_which_lmms_eval_hands_it_on(form):
    answers = [form((loss, False)) for loss in (12.5, -3.25, 1e-05)]
    assert [local_tasks.chosen({"answer": i}, answers)["acc"] for i in range(3)] == [0, 1, 0]


def test_chair_counts_mentions_of_objects_that_are_not_there(here):
    (here / "synonyms.txt").write_text("dog, puppy, hound dog\nperson, man, woman\nhot dog\nbus\ncar, truck\n")
    found = []
    for caption, objects, named in (
            ("Two puppies? No: two dogs and a hound dog, a man.", ["dog", "person"], ["dog", "dog", "person"]),
            ("A man eats a hot dog by buses and trucks .", ["person"], ["person", "hot dog", "bus", "car"]),
            ("grass", ["car"], [])):
        one = chair.chair({"objects": objects}, [caption])
        assert one["chair_i"].named == named
        found.append(one["chair_i"])
    assert chair.chair_i(found) == 3 / 7 and chair.chair_s(found) == 1 / 3 and chair.recall(found) == 3 / 4


def test_the_tasks_name_functions_that_are_there():
    named = {name for task in TASKS.glob("*.yaml") for name in re.findall(r"!function (\S+)", task.read_text())}
    own = {name.rpartition(".")[::2] for name in named if name.startswith("clip_benchmark_ext.")}
    assert len(own) == 10 and all(callable(getattr(import_module(module), name)) for module, name in own)


def test_the_folder_of_tasks_is_printed_for_include_path():
    assert run("python", "-m", "clip_benchmark_ext.lmms").stdout.strip() == str(TASKS)


# ---- with lmms-eval


@pytest.fixture
def evaluate(here, monkeypatch):
    """Return a function that evaluates the packaged captioner on 40 images, and its answers in order."""
    pytest.importorskip("lmms_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LMMS_EVAL_DATASETS_CACHE", str(here / "hf"))
    monkeypatch.setenv("LMMS_CACHE_RUN_ID", "run")
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager
    pope, choices = [], []
    for i in range(40):
        picture(here / f"photos/{i}.png", i)
        (here / f"photos/{i}.txt").write_text(f"{CAPTIONS[i % 4]}\n\na picture of {i}")
        pope.append({"question_id": i, "image": f"{i}.png", "text": f"Is there {THINGS[i % 4]} in the image?",
                     "label": ("yes", "no")[i % 2]})
        choices.append({"image": f"{i}.png", "captions": CAPTIONS, "answer": i % 4})
    run("python", "-m", "open_clip_mdc", "prepare", "shards", "--test", "photos", "--out", "data", fork=True)
    monkeypatch.chdir("data")
    (here / "photos").rename("images")
    for name, rows in (("pope", pope), ("choices", choices)):
        (here / f"data/{name}.json").write_text("\n".join(map(json.dumps, rows)))

    def evaluated(task: str, arguments: str, tasks=TASKS, **options) -> tuple[dict, list]:
        found = simple_evaluate("open_clip_mdc", f"pretrained=photo,{arguments}", tasks=[task], batch_size=7,
                                device="cpu", task_manager=TaskManager(include_path=str(tasks)),
                                log_samples=True, **options)
        return found["results"][task], [sample["filtered_resps"] for sample in found["samples"][task]]

    return evaluated


@pytest.fixture
def images():
    return [make_image(i) for i in range(40)]


def test_captions_and_their_cider_are_those_of_python_and_clip_benchmark(evaluate, images):
    found, answers = evaluate("local_captions", "length=6,repeats=allow")
    captions = load("photo", device="cpu").caption(images, length=6, repeats="allow")
    order = sorted(range(40), key=lambda i: f"{i}.png")
    assert sorted(sum(answers, [])) == sorted(captions)
    references = {i: [CAPTIONS[i % 4], f"a picture of {i}"] for i in order}
    expected = score_captions({i: captions[i] for i in order}, references, ["CIDEr"]).scores["CIDEr"]
    assert found["flickr_CIDEr,none"] == pytest.approx(expected, abs=1e-12)


def test_yes_is_what_the_image_makes_more_probable_and_choices_go_by_the_kind(evaluate, images):
    captioner = load("photo", device="cpu")
    things = [[f"a photo of {THINGS[i % 4]} ."] for i in range(40)]
    scores = captioner.score(images, things, kind="debiased").flatten()
    found, answers = evaluate("local_pope", "kind=debiased")
    assert sum(answers, []) == ["yes" if score > 0 else "no" for score in scores]
    assert len({*sum(answers, [])}) == 2
    right = sum((score > 0) == (i % 2 == 0) for i, score in enumerate(scores.tolist()))
    assert found["pope_accuracy,none"] == pytest.approx(right / 40)
    for kind in ("plain", "debiased"):
        expected = captioner.score(images, CAPTIONS, kind=kind)
        found, answers = evaluate("local_choices", f"kind={kind}")
        losses = [[float(re.search(r"-?[\d.]+", str(pair))[0]) for pair in pairs] for pairs in answers]
        assert torch.tensor(losses).allclose(-expected, atol=1e-3)
        right = sum(i % 4 == choice for i, choice in enumerate(expected.argmax(1).tolist()))
        assert found["acc,none"] == pytest.approx(right / 40)


def test_a_run_that_is_killed_goes_on_from_its_last_batch(evaluate, tmp_path, monkeypatch):
    from clip_benchmark_ext.lmms.model import OpenClipMdc
    whole, captions = evaluate("local_captions", "length=6")
    seen = []
    picture = OpenClipMdc._picture

    def interrupted(self, request):
        seen.append(request.doc_id)
        if len(seen) == 20:  # in the third batch of 7
            raise KeyboardInterrupt
        return picture(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(OpenClipMdc, "_picture", interrupted)
        pytest.raises(KeyboardInterrupt, evaluate, "local_captions", "length=6", use_cache=str(tmp_path / "cache"))
    seen.clear()
    monkeypatch.setattr(OpenClipMdc, "_picture", lambda self, request: seen.append(request.doc_id) or picture(
        self, request))
    assert evaluate("local_captions", "length=6", use_cache=str(tmp_path / "cache")) == (whole, captions)
    assert seen == list(range(14, 40))


@pytest.mark.parametrize("task, arguments, line", [
    ("local_pope", "kind=plain", "task local_pope asks yes or no, which needs kind=debiased"),
    ("local_choices", "kind=best", "kind is 'best': it must be one of plain, blind, debiased"),
    ("local_captions", "lenght=6", "caption\\(\\) has no option 'lenght'"),
    ("local_captions", "pretrained=nowhere", "nowhere"),
    ("vqa", "length=6", "task vqa asks 'What is it\\?': a captioner answers no question but"),
    ("quiz", "length=6", "task quiz asks 'What is it\\?': a captioner compares choices that are captions")])
def test_what_a_captioner_cannot_do_ends_the_run_with_one_line(task, arguments, line, evaluate, tmp_path, capsys):
    for name, like in (("vqa", "local_captions"), ("quiz", "local_choices")):
        text = (TASKS / f"{like}.yaml").read_text().replace(f"task: {like}", f"task: {name}")
        (tmp_path / f"{name}.yaml").write_text(re.sub("doc_to_text: .*", "doc_to_text: What is it?", text))
    with pytest.raises(SystemExit) as ended:
        evaluate(task, arguments, tasks=tmp_path if task in ("vqa", "quiz") else TASKS)
    said = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert ended.value.code == 2 and len(said) == 1 and re.search(line, said[0])


def test_lmms_eval_finds_the_model_by_the_entry_point():
    pytest.importorskip("lmms_eval")
    (point,) = metadata.entry_points(group="lmms_eval.models", name="open_clip_mdc")
    assert point.load()().simple_class_path == "clip_benchmark_ext.lmms.model.OpenClipMdc"
