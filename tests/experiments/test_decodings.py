"""Claims about `experiments.decodings`, steps against quality."""

import numpy as np
import pytest
from conftest import made_images, png, read_json

from experiments import decodings
from open_clip_mdc.data.shards import tar_writer
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.text.special_tokens import decode_captions


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "0.tar"
    with tar_writer(path) as writer:
        for i in range(4):
            writer.write({"__key__": str(i), "png": png(i), "txt": ["a red circle", "a blue star\na star"][i % 2]})
    return path


def test_steps_are_passes_of_the_decoder_and_captions_are_those_of_the_images(runs, monkeypatch):
    monkeypatch.setattr(decodings, "BATCH", 2)
    model, transform, tokenizer = checkpoints.load(str(runs / "mdc"), captioner=True)
    image = made_images(transform, 3)
    plain = decode_captions(model.generate(image, length=4), tokenizer)
    embs = model.encode_image_tokens(image).detach()
    monkeypatch.setattr(model, "encode_image_tokens", lambda embs: embs)
    for options, steps in ((dict(length=4), 4), (dict(length=4, tokens_per_step=3), 2),
                           (dict(length=4, tokens_per_step=4), 1), (dict(length=4, sampler="ancestral", steps=4), None),
                           (dict(length=4, temperature=1.0, samples=5, select="consensus"), 20)):
        said, found = decodings.say(model, tokenizer, embs, options)
        assert len(said) == 3 and (found == steps if steps else 1 <= found <= 4)
        assert (said == plain) == (options == dict(length=4))
    assert decodings.say(model, tokenizer, embs, dict(length=4)) == (plain, 4)  # no hook stays behind


def test_a_table_and_a_figure_of_what_was_said_and_a_command_that_resumes(runs, shard, tmp_path, monkeypatch, capsys,
                                                                                   no_java):
    monkeypatch.setattr(decodings, "ways", lambda objective, length: {
        "MDC": {decodings.BASE: dict(length=length), "MDC, all at once": dict(length=length, tokens_per_step=length)},
        "ARC": {"ARC, greedy": dict(num_beams=1, length=length)}}[objective])
    argv = ["decodings", "--mdc", runs / "mdc", "--arc", runs / "arc", "--data", shard, "--length", "3", "--out",
            tmp_path / "out/x"]

    def run(*more):
        monkeypatch.setattr("sys.argv", list(map(str, [*argv, *more])))
        try:
            return decodings.main()
        except SystemExit as end:
            return end.code

    assert run() is None
    printed = capsys.readouterr().out
    saved = read_json(tmp_path / "out/x.json")
    assert list(saved) == ["about", decodings.BASE, "MDC, all at once", "ARC, greedy"]
    references = [["a red circle"], ["a blue star", "a star"]] * 2
    cider = decodings.measure(saved["ARC, greedy"]["captions"], references)["CIDEr"]
    base = decodings.measure(saved[decodings.BASE]["captions"], references)["CIDEr"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:]]
    assert [row[:2] for row in rows[:2]] == [[decodings.BASE, "3.0"], ["MDC, all at once", "1.0"]]
    assert rows[2][2] == f"{cider.mean():.3f} ± {np.std(cider, ddof=1) / 2:.3f}"
    assert rows[2][-1] == f"{(cider - base).mean():.3f} ± {np.std(cider - base, ddof=1) / 2:.3f}"
    assert (tmp_path / "out/x.md").read_text() == f"{printed}\n4 images.\n"
    assert (tmp_path / "out/x.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(decodings, "say", None)  # nothing is said again
    assert run() is None and capsys.readouterr().out == printed
    assert "was made with other arguments" in run("--limit", "2")
    with tar_writer(tmp_path / "bare.tar") as writer:
        writer.write({"__key__": "0", "png": png(0)})
    assert "bare.tar has no image with a KEY.txt" in run("--data", tmp_path / "bare.tar", "--out", tmp_path / "y")
