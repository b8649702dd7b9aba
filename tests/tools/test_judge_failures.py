"""Claims about a judge that fails, and about resuming after a stop."""
import judge_server
import pytest
from conftest import complaint_of, run_tool
from judge_server import KEY, always, choices, choose, failure, image_of, results

from experiments import judge

server, data = pytest.fixture(judge_server.server), pytest.fixture(judge_server.data)


# ---- failures ------------------------------------------------------------------------------------------------------


def test_too_many_requests_and_server_errors_are_tried_again_after_the_time_they_ask_for(server, data, tmp_path):
    replies = [(429, {"Retry-After": 1}, {}), (500, {}, {}), (200, {}, "A")]
    server.reply = lambda server, request: replies[len(server.requests) - 1]
    run_tool(data(1, "x", "y"))
    assert results(tmp_path)["judged"] == 1 and len(server.requests) == 3
    first, second, third = [request.pop("time") for request in server.requests]
    assert second - first >= 1  # Retry-After
    assert third - second >= 1  # back-off: the second failure in a row
    assert server.requests[0] == server.requests[1] == server.requests[2]


@pytest.mark.parametrize("reply, message", [
    (always({"error": f"bad key\n{KEY}"}, 401), r'/v1 answers 401: {"error": "bad key\n***"}'),
    (always({"": 290 * "x" + KEY}, 400), 290 * "x" + "***"),
    (always({}, 404), "answers 404"),
    (always({}, 307, Location="http://127.0.0.1:9/"), "answers 307"),  # the key goes nowhere else
    (always(b"<html>\nwelcome</html>"), "does not answer with a chat completion: <html> welcome</html>"),
    (always(b'{"choices": []}'), "does not answer with a chat completion"),
    (always(["B"]), "does not answer with a chat completion"),
], ids=["wrong key", "long answer", "wrong path", "moved", "a web page", "no choices", "no text"])
def test_a_refusal_stops_at_once_with_one_line(server, data, reply, message):
    server.reply = reply
    assert message in failure([*data(40, "x", "y"), "--workers", "1"])
    assert len(server.requests) == 1


def test_an_answer_without_end_is_one_line(server, data, monkeypatch):
    monkeypatch.setattr(judge, "ANSWER_BYTES", 1000)
    server.reply = always("A" * 2000)
    assert "sends an endless answer" in failure(data(1, "x", "y"))


def test_a_server_that_is_not_there_is_named(data, monkeypatch, server, tmp_path):
    monkeypatch.setattr(judge, "RETRIES", 1)
    assert "http://127.0.0.1:9/v1 cannot be reached" in failure([*data(1, "x", "y"), "--url", "http://127.0.0.1:9/v1"])
    assert not (tmp_path / "judge.json").exists()


def test_without_a_key_none_is_sent(server, data, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    server.reply = always("A")
    run_tool([*data(1, "x", "y"), "--url", server.url + "/"])
    assert server.requests[0]["key"] is None and server.requests[0]["path"] == "/v1/chat/completions"


# ---- stopping and going on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["1", "4"])
def test_no_answer_is_asked_for_twice_after_a_stop_and_the_result_is_that_of_one_run(server, data, tmp_path, workers):
    arguments = [*data(20, "x", "y"), "--workers", workers]
    server.reply = lambda server, request: (
        choose("x")(server, request) if len(server.requests) <= 9 else (403, {}, {"error": "no more"}))
    assert "403" in failure(arguments)
    answered = {image_of(request) for request in server.requests[:9]}
    assert not (tmp_path / "judge.json").exists()

    lines = (tmp_path / "judge.jsonl").read_bytes()
    assert len(lines.splitlines()) == 1 + 9
    (tmp_path / "judge.jsonl").write_bytes(lines + b'{"id": "19", "shown": [["x')  # killed while writing
    server.requests.clear()
    server.reply = choose("x")
    run_tool(arguments)
    asked = [image_of(request) for request in server.requests]
    assert len(asked) == 11 and not answered & set(asked)
    assert len((tmp_path / "judge.jsonl").read_text().splitlines()) == 1 + 20
    resumed = results(tmp_path)
    orders = {image_of(r): choices(r) for r in server.requests}

    (tmp_path / "judge.jsonl").unlink()
    assert "judge.json, which exists already" in complaint_of(*arguments)  # no flag names it
    (tmp_path / "judge.json").unlink()
    server.requests.clear()
    run_tool(arguments)
    assert results(tmp_path) == resumed and resumed["selection_rate"] == {"x": 1, "y": 0}
    assert orders.items() <= {image_of(r): choices(r) for r in server.requests}.items()  # same letters for same images
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_a_run_with_other_settings_is_not_mixed_in(server, data, tmp_path):
    arguments = data(2, "x", "y")
    server.reply = always("A")
    run_tool(arguments)
    before = (tmp_path / "judge.jsonl").read_bytes()
    for flag, value in (("model", "other"), ("seed", "1")):
        assert f"begun with another {flag}: give another --out" in failure([*arguments, f"--{flag}", value])
    arguments = data(2, "x", "y", caption="new {name}")
    assert "begun with another systems" in failure(arguments)
    assert (tmp_path / "judge.jsonl").read_bytes() == before and len(server.requests) == 2
