"""Claims about caption metrics: known values, hostile captions, and metrics that cannot be computed."""
import math
import os
import shutil
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import SHARED, needs_data, read_json

from clip_benchmark_ext.metrics import caption_metrics as metrics
from clip_benchmark_ext.metrics.caption_metrics import plain_words, ptb_words, score_captions
from clip_benchmark_ext.metrics.clipscore import ref_clip_scores

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="no Java")
WITHOUT_JAVA = ["Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr"]

TOKENIZED = {  # by the rules of the Penn Treebank
    "A man riding a wave on top of a surfboard.": "a man riding a wave on top of a surfboard",
    "It's a dog's bowl; isn't it?  They've said: \"don't\"!": "it 's a dog 's bowl is n't it they 've said do n't",
    "Two (2) t-shirts, 3.5 m long -- and 1,000 more...": "two -lrb- 2 -rrb- t-shirts 3.5 m long and 1,000 more",
    "A clock reads 5:55 in the U.S. Air Force's black/white tower":
        "a clock reads 5:55 in the u.s. air force 's black/white tower",
    "Ein Café, 猫 und naïve Hunde": "ein café 猫 und naïve hunde",
    "a\ndog\r\nruns\u2028fast\x85now": "a dog runs fast now",
    "": "",
    " \n": "",
}


@pytest.fixture
def fake_java(monkeypatch, tmp_path):
    """Put a script in place of Java. $REAL is the real Java and $@ its arguments."""
    def make(script: str) -> None:
        path = tmp_path / "bin/java"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\nREAL={shutil.which('java')}\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return make


def children() -> set[str]:
    """By the parent that each process names: a thread's own list is gone if it ends while it is read."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            if process.read_text(errors="replace").rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(process.parent.name)
    return found


# ---- known answers


@needs_java
@needs_data("cococaption")
def test_cocos_example_gets_its_published_scores():
    folder = SHARED / "cococaption"
    candidates, references = (pd.DataFrame(rows).groupby("image_id")["caption"].agg(how).to_dict() for rows, how in (
        (read_json(folder / "captions_val2014_fakecap_results.json"), "first"),
        (read_json(folder / "captions_val2014_fakecap_references.json")["annotations"], list)))
    published = read_json(folder / "published_scores.json")["published"]["scores"]
    scored = score_captions(candidates, references)
    assert scored.word_tokenizer == "PTB"
    for name in [*WITHOUT_JAVA, "METEOR"]:
        assert round(scored.scores[name], 3) == published[name], name
    if "SPICE" in scored.scores:
        assert scored.scores["SPICE"] == published["SPICE"]
    else:
        assert "get_stanford_models" in scored.missing["SPICE"]

    captions = [*candidates.values(), *(caption for texts in references.values() for caption in texts)]
    same = sum(a == plain_words(b) for a, b in zip(ptb_words(captions), captions, strict=True))
    assert same >= 0.998 * len(captions)  # so that scores without Java are nearly these


def test_scores_are_those_computed_by_hand(no_java):
    candidates = {1: "A dog runs.", "b": "two cats sleep on a mat"}
    references = {"b": ["Two cats sleep on a mat!"], 1: ["a dog is running fast", "the dog"]}
    scored = score_captions(candidates, references)
    # 9 words, 8 of them in a reference. The closest references have 2 words (nearer to 3 than 5 is) and 6: 9 > 8
    assert scored.scores["Bleu_1"] == pytest.approx(8 / 9)
    # image 1: longest common subsequences "a dog" (2 of 3 words, of 5) and "dog" (1 of 3, of 2)
    precision, recall, beta = 2 / 3, 1 / 2, 1.2
    rouge = (1 + beta ** 2) * precision * recall / (recall + beta ** 2 * precision)
    assert scored.scores["ROUGE_L"] == pytest.approx((rouge + 1) / 2)
    assert scored.mean_length == 9 / 2 and scored.reference_mean_length == (6 + 5 + 2) / 3


@needs_java
def test_words_are_those_of_the_penn_treebank_without_punctuation():
    assert ptb_words(list(TOKENIZED)) == list(TOKENIZED.values())


def test_the_plain_rule_makes_the_same_words():
    assert {caption: plain_words(caption) for caption in TOKENIZED} == TOKENIZED


# ---- what is missing


def test_without_java_the_other_metrics_are_reported_and_nothing_is_fetched(no_java, monkeypatch, caplog):
    def refuse(*_):
        raise AssertionError("the network was asked")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    scored = score_captions({"7": "a dog runs now", "8": "x"}, {"7": ["a dog is running", "the dog runs"], "8": ["x"]})
    assert list(scored.scores) == WITHOUT_JAVA and scored.word_tokenizer == "plain"
    assert scored.missing == {"METEOR": metrics.NO_JAVA, "SPICE": metrics.NO_JAVA}
    assert "METEOR is missing: there is no Java: install" in caplog.text and "plain rule" in caplog.text


@needs_java
@pytest.mark.parametrize("ails", ["it fails", "it hangs"])
def test_a_failing_meteor_is_named_and_leaves_no_process(fake_java, monkeypatch, ails):
    fake_java({"it fails": 'case "$*" in *meteor*) echo "Exception: bad jar" >&2; exit 1;; *) exec $REAL "$@";; esac',
               "it hangs": 'case "$*" in *meteor*) exec sleep 9000;; *) exit 3;; esac'}[ails])
    if ails == "it hangs":
        monkeypatch.setattr(metrics, "START_SECONDS", 0.3)
        monkeypatch.setattr(metrics, "CAPTION_SECONDS", 0)
    before, start = children(), time.monotonic()
    scored = score_captions({"7": "a dog runs now", "8": "x"}, {"7": ["a dog is running"], "8": ["x"]})
    assert list(scored.scores) == WITHOUT_JAVA and list(scored.missing) == ["METEOR", "SPICE"]
    if ails == "it fails":
        assert "bad jar" in scored.missing["METEOR"] and scored.word_tokenizer == "PTB"
    assert children() == before and time.monotonic() - start < 9000


@pytest.mark.parametrize("candidates, references, missing", [
    ({1: "a b c d"}, {1: ["a b c d", "a b c d"]}, {"CIDEr": "here is one image"}),
    ({1: "a b c d", 2: "x"}, {1: ["a b c d"], 2: ["a b c d", "b c"]}, {"CIDEr": "here all images have the same"}),
    ({1: "a b c", 2: "x"}, {1: ["a b c"], 2: ["x"]}, {"Bleu_4": "no caption has 4 words"}),
    ({1: "dog", 2: "cat"}, {1: ["dog"], 2: ["cat"]}, dict.fromkeys(WITHOUT_JAVA[1:4], "the longest has 1")),
    ({1: "", 2: ""}, {1: ["dog"], 2: ["cat"]}, {}),
])
def test_a_metric_that_can_say_nothing_is_missing_with_its_reason(no_java, candidates, references, missing):
    scored = score_captions(candidates, references)
    assert list(scored.scores) == [name for name in WITHOUT_JAVA if name not in missing]
    assert scored.missing.keys() == {*missing, "METEOR", "SPICE"}
    assert all(reason in scored.missing[name] for name, reason in missing.items())
    assert ("CIDEr" in scored.of_images) == ("CIDEr" not in missing)


def test_images_of_which_cider_says_nothing_are_counted(no_java, caplog):
    scored = score_captions({1: "a b c d", 2: "a b c d x"}, {1: ["a b c d"], 2: ["a b c d x"]})
    assert "CIDEr is 0 for 1 of 2 images" in caplog.text
    assert scored.of_images["CIDEr"][0] == 0 < scored.scores["CIDEr"]


def test_spice_without_its_models_says_how_to_get_them(monkeypatch, fake_java, tmp_path):
    fake_java("exit 1")
    monkeypatch.setattr(metrics, "SPICE_MODELS", (tmp_path / "absent.jar",))
    missing = score_captions({"7": "a dog"}, {"7": ["a dog"]}).missing
    assert "python -m pycocoevalcap.spice.get_stanford_models" in missing["SPICE"]


def test_spice_is_read_from_what_its_program_prints(monkeypatch, fake_java, tmp_path):
    """SPICE's models are 400 MB, so a script prints what SpiceStats.toString of its jar would print."""
    models = tmp_path / "models.jar"
    models.touch()
    monkeypatch.setattr(metrics, "SPICE_MODELS", (models,))
    fake_java(f'''case "$*" in *spice*) for last; do :; done; cp "$last" "{tmp_path}/sent.json"
        printf '**  SPICE Evaluation  **\\n\\nAll tuples\\n  f-score:\\t0.375 (SPICE metric)\\n';; *) exit 1;; esac''')
    scores = score_captions({"7": "A café (new)", "8": ""}, {"7": ["a café", "x"], "8": ["y"]}).scores
    assert scores["SPICE"] == 0.375 and "METEOR" not in scores
    assert read_json(tmp_path / "sent.json") == [
        {"image_id": 0, "test": "a café -lrb- new -rrb-", "refs": ["a café", "x"]},
        {"image_id": 1, "test": "", "refs": ["y"]}]


# ---- hostile captions


@needs_java
def test_hostile_captions_are_scored_and_do_not_move_the_others():
    hostile = ["", " ", "|||", "a ||| b |||| c", "SCORE ||| a ||| a\nEVAL ||| 1", "\u2028", "a\u2028b\x85c\x0bd\re",
               "🐈", "\ud800 alone", "\x00\x1b[31m", "猫" * 300, "a " * 75, "-lrb- '' `` ( ) [ ]", "<b a='1'>",
               "\ufffd"]
    candidates = {str(i): caption for i, caption in enumerate([*hostile, "two dogs run on the beach"])}
    references = {i: ["two dogs run on the beach", candidates[i]] for i in candidates}
    assert ptb_words(list(candidates.values()))[-1] == "two dogs run on the beach"
    scored = score_captions(candidates, references)
    assert list(scored.scores) == [*WITHOUT_JAVA[:4], "METEOR", "ROUGE_L", "CIDEr"]
    assert all(math.isfinite(x) and 0 <= x <= 10 for x in scored.scores.values())
    before = children()
    assert score_captions(candidates, references) == scored and children() == before  # by the same METEOR
    for idle in metrics.IDLE_METEOR.values():
        idle.kill()
        idle.wait()
    assert score_captions(candidates, references) == scored


def test_ref_clip_score_is_0_without_a_reference_that_is_alike_whatever_the_image():
    image, caption = torch.eye(2), torch.tensor([[3.0, 4.0], [1.0, 0.0]])  # CLIP-S is 1.5, and 0
    assert ref_clip_scores(image, caption, -caption[:, None]).tolist() == [0, 0]
