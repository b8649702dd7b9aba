"""Claims about the LLM judge, made against a real HTTP server on this machine."""
import json
import tarfile
from collections import Counter
from itertools import chain, permutations
from pathlib import Path

import judge_server
import pytest
from conftest import png, run_tool, write_tar
from judge_server import KEY, always, choices, choose, failure, image_of, results, write_captions
from scipy.stats import chisquare

from experiments import judge
from experiments.judge_answers import assign_letters, parse_letter, summarise

server, data = pytest.fixture(judge_server.server), pytest.fixture(judge_server.data)
QUESTION = "Which caption best depicts the image and is also coherent (no duplicate words or awkward phrasing)?"


# ---- what is asked -------------------------------------------------------------------------------------------------


def test_the_request_is_the_papers_question_the_lettered_captions_and_the_file_itself(server, data, tmp_path):
    arguments = data(6, "ARC", "MDC-10", "MDC-15", "MDC-20", caption="{name} is “two\nwords” é犬 {i}")
    server.reply = choose("MDC-15")
    run_tool(arguments)
    assert len(server.requests) == 6
    for request in server.requests:
        assert request["path"] == "/v1/chat/completions" and request["key"] == f"Bearer {KEY}"
        assert request["model"] == "the-judge" and request["temperature"] == 0
        (message,) = request["messages"]
        assert message["role"] == "user" and [part["type"] for part in message["content"]] == ["image_url", "text"]
        i = next(i for i in range(6) if png(i) == image_of(request))  # the file's bytes, not a new encoding of them
        lines = message["content"][1]["text"].split("\n")
        assert lines[0] == QUESTION == judge.QUESTION
        assert [line[:3] for line in lines[1:]] == ["A. ", "B. ", "C. ", "D. "]
        # a line break in a caption cannot begin another choice
        assert sorted(line[3:] for line in lines[1:]) == [
            f"{name} is “two words” é犬 {i}" for name in ("ARC", "MDC-10", "MDC-15", "MDC-20")]
    assert len({image_of(request) for request in server.requests}) == 6
    assert results(tmp_path)["selection_rate"] == {"ARC": 0, "MDC-10": 0, "MDC-15": 1, "MDC-20": 0}


def test_the_order_hangs_on_seed_and_id_alone_and_every_order_comes_equally_often():
    captions = {"a": "1", "b": "2", "c": "3"}
    orders = [tuple(caption for caption, _ in assign_letters(captions, 0, str(i))) for i in range(6000)]
    backwards = dict(reversed(captions.items()))
    assert [tuple(c for c, _ in assign_letters(backwards, 0, str(i))) for i in range(50)] == orders[:50]
    assert [tuple(c for c, _ in assign_letters(captions, 1, str(i))) for i in range(50)] != orders[:50]
    assert set(orders) == set(permutations("123"))
    assert chisquare(list(Counter(orders).values())).pvalue > 1e-3


def test_equal_captions_are_shown_once_and_share_the_vote(server, tmp_path, data):
    arguments = data(3, "a", "b", "c")
    write_captions(tmp_path / "a.json", {"0": "a dog", "1": "a cat", "2": "the sea"})
    write_captions(tmp_path / "b.json", {"0": "a  dog ", "1": "a bat", "2": "the sea"})
    write_captions(tmp_path / "c.json", {"0": "a hat", "1": "a cat", "2": "the sea"})
    answers = {png(0): "a dog", png(1): "a bat"}
    server.reply = lambda server, request: choose(answers[image_of(request)])(server, request)
    run_tool(arguments)
    assert sorted(sorted(choices(request).values()) for request in server.requests) == [  # nothing to ask about the sea
        ["a bat", "a cat"], ["a dog", "a hat"]]
    summary = results(tmp_path)
    assert summary["selection_rate"] == pytest.approx(
        {"a": (1 / 2 + 0 + 1 / 3) / 3, "b": (1 / 2 + 1 + 1 / 3) / 3, "c": (0 + 0 + 1 / 3) / 3})
    assert (summary["judged"], summary["malformed"], summary["all_equal"]) == (3, 0, 1)


# ---- what is answered ----------------------------------------------------------------------------------------------

# Answers with the letter that each chooses, by kind.
ANSWERS = json.loads((Path(__file__).parent / "fixtures/answers.json").read_text(encoding="utf-8"))
CAPTIONS = ["a man riding a wave", "a surfer on a board", "surfer surfer", "two dogs run in the snow"]


@pytest.mark.parametrize("answer, letter", chain.from_iterable(ANSWERS.values()))
def test_an_answer_is_a_letter_or_malformed(answer, letter):
    assert parse_letter(answer, CAPTIONS) == letter


def test_an_answer_that_only_repeats_a_caption_with_an_article_before_it_chooses_no_letter():
    assert parse_letter("A man riding a wave", ["man riding a wave", "dog at sea"]) is None


def test_malformed_answers_are_counted_and_belong_to_nobody(server, data, tmp_path):
    server.reply = lambda server, request: (200, {}, {png(0): "A or B", png(1): None, png(2): "Z"}.get(
        image_of(request), next(k for k, v in choices(request).items() if "x" in v)))
    run_tool(data(5, "x", "y"))
    summary = results(tmp_path)
    assert (summary["images"], summary["judged"], summary["malformed"]) == (5, 2, 3)
    assert summary["selection_rate"] == {"x": 1, "y": 0}
    requests = len(server.requests)
    run_tool(data(5, "x", "y"))  # at temperature 0 they would be the same again
    assert len(server.requests) == requests and results(tmp_path) == summary


def test_a_judge_that_never_answers_properly_gives_no_rates(server, data, tmp_path):
    server.reply = always("I am a teapot")
    assert "none of 3 answers names exactly one caption" in failure(data(3, "x", "y"))
    assert results(tmp_path)["malformed"] == 3 and results(tmp_path)["selection_rate"] == {"x": None, "y": None}


def test_rates_errors_and_letters_are_those_counted_by_hand():
    votes = [{"shown": [["a"], ["b", "c"]], "chosen": ["b", "c"]}, {"shown": [["c"], ["a"], ["b"]], "chosen": ["c"]},
             {"shown": [["a"], ["b"], ["c"]], "chosen": []}, {"shown": [["a", "b", "c"]], "chosen": ["a", "b", "c"]},
             {"shown": [["b"], ["a", "c"]], "chosen": ["b"]}]
    summary = summarise(votes, ["a", "b", "c"])
    rates = {"a": 1 / 12, "b": (1 / 2 + 1 / 3 + 1) / 4, "c": (1 / 2 + 1 + 1 / 3) / 4}
    assert summary["selection_rate"] == pytest.approx(rates)
    assert summary["standard_error"] == pytest.approx({k: (p * (1 - p) / 4) ** 0.5 for k, p in rates.items()})
    assert summary["letters"] == {"A": 2, "B": 1} and summary["malformed"] == summary["all_equal"] == 1


# ---- captions and images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [["d/k0", "k1", "k2", "k1#3"], ["0", "1", "2"]], ids=["keys", "numbers"])
def test_images_of_shards_are_found_by_key_or_by_number(server, tmp_path, ids):
    write_tar(tmp_path / "0.tar", {"d/k0.txt": b"no", "d/k0.PNG": png(0), "d/k0.json": b"{}", "x.txt": b"no image",
                                   "k1.png": png(1)})
    write_tar(tmp_path / "1.tar", {"k2.png": png(2), "k1.png": png(3)})
    files = [write_captions(tmp_path / f"{name}.json", {id: f"{name} {i}" for i, id in enumerate(ids)})
             for name in ("u", "v")]
    server.reply = always("B")
    images, out = f"{tmp_path}/{{0..1}}.tar", str(tmp_path / "j.jsonl")
    run_tool(["judge", "--images", images, "--out", out, "--captions", *files])
    assert len(server.requests) == len(ids)
    for request in server.requests:
        assert {image_of(request)} == {png(int(caption[-1])) for caption in choices(request).values()}


def test_the_lines_of_the_caption_tool_are_captions_too(tmp_path):
    lines = [{"image": "photos/holiday.1.jpg", "caption": "a\u2028dog"}, {"image": "s/0.tar::d/k.7", "caption": "b"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines),
                                      encoding="utf-8")
    assert judge.read_captions(str(tmp_path / "c.jsonl")) == {"holiday.1": "a dog", "d/k.7": "b"}


def test_a_tar_that_leads_back_to_itself_is_refused(server, data, tmp_path):
    endless = tarfile.TarInfo("0.png")
    endless.size = -512
    (tmp_path / "endless.tar").write_bytes(endless.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    assert "a size below 0" in failure([*data(2, "x", "y"), "--images", str(tmp_path / "endless.tar")])


def test_a_key_that_no_header_can_hold_is_named_and_not_shown_before_anything_is_asked(server, data, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-two\nlines")
    message = failure(data(2, "x", "y"))
    assert "$OPENAI_API_KEY has characters" in message and "sk-two" not in message and not server.requests
