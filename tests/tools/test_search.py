"""Claims about `open_clip_mdc search`, with real models."""
from pathlib import Path

import open_clip
import pytest
import torch
from caption_files import Page
from conftest import complaint_of, json_lines, made_images, make_image, picture, png, write_tar

import open_clip_mdc
from open_clip_mdc.cli import noted as noted_module
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.likelihood.log_likelihood import mean_image
from open_clip_mdc.models import towers

SENTENCES = ["a red circle left of a blue square", "a star"]
HOSTILE = "<img src=x onerror=alert(1)> & \u202e.png"


@pytest.fixture
def folder(here) -> Path:
    """36 images, one with a hostile name and four in a shard, and a file of sentences."""
    for i in range(32):
        picture(here / "photos" / (HOSTILE if i == 7 else f"{i:02d}.png"), i, 32)
    write_tar(Path("s.tar"), {f"key{i}.png": png(i, 32) for i in range(32, 36)})
    Path("sentences.txt").write_text("\n".join(SENTENCES))
    return here


def search(run, *argv, out="found.jsonl", workers="--workers 0") -> list[dict] | str:
    """The rows, or the complaint."""
    model = () if run is None else ("--pretrained", run)
    said = complaint_of("search", *model, *argv, "--out", out, "--device cpu", workers)
    return said or json_lines(out)


def by_hand(run) -> dict[str, dict[str, tuple[float, float]]]:
    """By sentence and image the score and the debiased score, a pair at a time."""
    model, transform, tokenizer = checkpoints.load(str(run))
    names = [f"s.tar::key{i}" if i >= 32 else f"photos/{HOSTILE if i == 7 else f'{i:02d}.png'}" for i in range(36)]
    images = made_images(transform, 36, 32)
    blind, found = mean_image(model, [images]), {}
    for sentence in SENTENCES:
        text = tokenizer([sentence])
        prior = float(model.log_likelihood(None, text, blind=blind))
        scores = [float(model.log_likelihood(image[None], text)) for image in images]
        found[sentence] = {name: (score, score - prior) for name, score in zip(names, scores, strict=True)}
    return found


@pytest.mark.parametrize("alias", ["mdc", "arc"])
def test_images_come_by_their_likelihood_with_what_they_add_to_no_image(runs, folder, alias, capsys):
    rows = search(runs / alias, "photos", "s.tar", "@sentences.txt", "--top 5 --html page.html")
    expected = by_hand(runs / alias)
    assert [(row["sentence"], row["rank"]) for row in rows] == [(s, r) for s in SENTENCES for r in range(1, 6)]
    for sentence in SENTENCES:
        own = [row for row in rows if row["sentence"] == sentence]
        found, best = expected[sentence], sorted((x for x, _ in expected[sentence].values()), reverse=True)
        for row, score in zip(own, best, strict=False):
            assert row["score"] == pytest.approx(score, abs=1e-3) == pytest.approx(found[row["image"]][0], abs=1e-3)
            assert row["debiased"] == pytest.approx(found[row["image"]][1], abs=2e-3)
            assert row["score"] - row["blind"] == pytest.approx(row["debiased"], abs=1e-6)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == SENTENCES[0] and said[1] == f"{rows[0]['debiased']:+8.1f}  " + rows[0]["image"].replace(
        "\u202e", "\\u202e")
    assert said[-1] == "36 images, 2 sentences: found.jsonl, page.html" and not list(folder.glob("*.part*"))
    page = Page(Path("page.html").read_text())
    assert [source[:11] for source in page.sources] == ["data:image/"] * 10
    assert [tag for tag, _ in page.tags].count("article") == 2
    assert "In brackets" in page.texts["p"][0] and "debiased" in page.texts["p"][0]


def test_a_hostile_name_is_shown_and_not_obeyed(runs, folder):
    rows = search(runs / "arc", f"photos/{HOSTILE}", "photos/00.png", "a <b>star</b>", "--html page.html")
    assert {row["image"] for row in rows} == {f"photos/{HOSTILE}", "photos/00.png"} and "debiased" not in rows[0]
    text = Path("page.html").read_text()
    assert "brackets" not in text and "debiased" not in text  # it has no null image from so few
    assert "\u202e" not in text and "<b>" not in text and "onerror=alert(1)&gt;" in text
    assert [source[:11] for source in Page(text).sources] == ["data:image/"] * 2


def test_an_interrupted_search_resumes_and_finds_the_same(runs, folder, monkeypatch):
    command = (runs / "arc", "photos", "s.tar", "@sentences.txt", "--batch-size 8")
    whole = search(*command, out="whole.jsonl")
    append, left = noted_module.Journal.note, [20]

    def stop(journal, row):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        append(journal, row)

    with monkeypatch.context() as patch:
        patch.setattr(noted_module.Journal, "note", stop)
        assert "again to resume" in search(*command)
    assert len(Path("found.jsonl.part").read_text().splitlines()) == 21
    assert "begun with another sentences" in search(runs / "arc", "photos", "a star")
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(noted_module.Journal, "note", lambda journal, row: asked.append(row) or append(journal, row))
        assert search(*command) == whole
    assert len(asked) == 16 and not Path("found.jsonl.part").exists()


@pytest.mark.parametrize("alias, by", [("arc", ("--clip ViT-Ti-8:clip.pt",)), ("mdc", ())])
def test_a_shortlist_is_chosen_by_clip_or_in_one_pass_and_ordered_by_likelihood(runs, folder, alias, by):
    open_clip_mdc.register()
    torch.manual_seed(0)
    torch.save(open_clip.create_model("ViT-Ti-8").state_dict(), "clip.pt")
    rows = search(runs / alias, "photos", "s.tar", "@sentences.txt", *by, "--shortlist 6 --top 6")
    model, transform, tokenizer = checkpoints.load(*(("clip.pt", "ViT-Ti-8") if by else (str(runs / alias),)))
    images, expected = made_images(transform, 36, 32), by_hand(runs / alias)
    for sentence in SENTENCES:
        text = tokenizer([sentence]).expand(36, -1)
        with torch.no_grad():
            rough = torch.cosine_similarity(model.encode_image(images), model.encode_text(text)) if by else \
                model.log_likelihood(images, text, "parallel")
        names = [list(expected[sentence])[i] for i in rough.topk(6).indices.tolist()]
        own = [row for row in rows if row["sentence"] == sentence]
        assert {row["image"] for row in own} == {*names}
        assert [row["score"] for row in own] == pytest.approx(
            sorted((expected[sentence][name][0] for name in names), reverse=True), abs=1e-3)
    assert not list(folder.glob("*.part*"))


@pytest.mark.parametrize("more", [(), ("--shortlist 6",)])
def test_kept_tokens_are_those_of_the_images_and_the_tower_does_not_run_again(runs, folder, more, monkeypatch):
    """A second sentence, files that moved, and one more image, which alone is encoded. The null image is kept, too."""
    encoded, tower = [], towers.ViT.tokens
    monkeypatch.setattr(towers.ViT, "tokens", lambda self, image, masked=None: (
        encoded.append(len(image)) or tower(self, image, masked)))
    more = (*more, "--top 3")
    kept = (*more, "--cache-features kept --batch-size 8")
    plain = search(runs / "mdc", "photos", "s.tar", SENTENCES[0], *more)
    encoded.clear()
    Path("photos", "broken.png").write_bytes(b"no image")
    assert "cannot read the image photos/broken.png" in search(runs / "mdc", "photos", "s.tar", SENTENCES[0], *kept)
    assert sum(encoded) == 36
    for row, other in zip(json_lines("found.jsonl"), plain, strict=True):
        assert row["image"] == other["image"]
        assert [row[name] for name in ("score", "blind", "debiased")] == pytest.approx(
            [other[name] for name in ("score", "blind", "debiased")], abs=0.01)
    Path("photos").rename("moved")
    Path("moved", "broken.png").unlink()
    encoded.clear()
    found = search(runs / "mdc", "moved", "s.tar", SENTENCES[1], *kept, workers="--workers 1")
    assert not encoded
    assert names(found) == names(search(runs / "mdc", "moved", "s.tar", SENTENCES[1], *more))
    make_image(99, 32).save("moved/new.png")
    encoded.clear()
    search(runs / "mdc", "moved", "s.tar", SENTENCES[1], *kept)
    assert 1 <= sum(encoded) <= 8  # its batch


def names(rows: list[dict]) -> list[str]:
    return [row["image"] for row in rows]
