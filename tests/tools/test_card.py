"""Claims about `open_clip_mdc card`: what each row is, what the page says, and that a killed run ends as a whole one.
"""
import json
from html import escape
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import complaint_of, killed_when, read_json, run_tool, seeded, times
from training import state_of, tower

import open_clip_mdc
from open_clip_mdc import register, unregister
from open_clip_mdc.cli import card
from open_clip_mdc.cli.page import printable
from open_clip_mdc.data.shards import read_samples, tar_writer
from open_clip_mdc.models.towers import patch_tokens

FEW = 64, 64  # captions that a training reads
ROWS = "encoder", "random", "pixels"
PARTS = "", "untrained/", "pixels/"  # the same of a probe
RUN = "import sys\nfrom open_clip_mdc import cli\nfrom open_clip_mdc.cli import card\ncard.CAPTIONS = 64, 64\n" \
      "cli.main(sys.argv[1:])"


def write_shard(path: Path, scenes: Path, count: int, *added: str) -> None:
    with tar_writer(path) as writer:
        for sample in islice(read_samples(str(scenes / "train/00000.tar")), count):
            texts = [sample["txt"].decode().strip(), *added]
            writer.write({"__key__": sample["__key__"], "png": sample["png"], "txt": "\n".join(texts),
                          "json": json.dumps({"captions": texts})})


@pytest.fixture(scope="module")
def argv(scenes, runs, tmp_path_factory) -> list:
    """The command without --out: an encoder that is a run, 16 scenes with two captions each, and two probes."""
    folder = tmp_path_factory.mktemp("card")
    write_shard(folder / "train.tar", scenes, 16, "it stands behind a red table")
    return ["card", runs / "arc", folder / "train.tar", "--model", "MDC-ViT-Ti-8", "--test", "0.5", "--probe",
            scenes / "probe"]


@pytest.fixture(scope="module")
def whole(argv) -> Path:
    """Return what the command writes if nobody disturbs it."""
    out = argv[2].with_name("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "CAPTIONS", FEW)
        run_tool([*argv, "--out", out])
    unregister()
    return out


def percent(out: Path, row: str, name: str, metric: str) -> float:
    return round(100 * read_json(out / "results" / row / f"{name}.json")["metrics"][metric], 1)


def test_the_table_has_the_numbers_of_the_result_files_in_their_places(whole):
    content = read_json(whole / "card.json")
    assert (content["model"], content["train"], content["test"]) == ("MDC-ViT-Ti-8", 8, 8)
    table = {row.pop("measure"): row for row in content["measures"]}
    places = {"captions, CIDEr": ("data-captioning", "CIDEr", None),
              "filled in, colour": ("data-cloze", "cloze_acc_colour", "cloze_acc_colour_blind"),
              "chosen, colour": ("data-cloze", "choice_acc_colour", "choice_acc_colour_blind"),
              "pairs, replace_att, debiased": ("sugar_crepe_replace_att-image_caption_selection", "text_acc_debiased",
                                               "text_acc_blind"),
              "image retrieval, R@1": ("gallery-zeroshot_retrieval", "image_retrieval_recall@1", None),
              "text retrieval, R@1": ("gallery-zeroshot_retrieval", "text_retrieval_recall@1_debiased", None)}
    for name, (file, metric, blind) in places.items():
        for row in ROWS:
            assert table[name][row] == percent(whole, row, file, metric), (name, row)
        assert table[name]["blind"] == (blind and percent(whole, "encoder", file, blind))
    assert [table["probe, linear probe"][row] for row in ROWS] == [
        percent(whole, "probes/probe", "probe-probe", f"{part}linear_acc1") for part in PARTS]
    assert table["pairs, replace_att, debiased"]["floor"] == 50 and table["image retrieval, R@1"]["floor"] == 12.5
    assert table["filled in, colour"]["floor"] == percent(whole, "encoder", "data-cloze", "majority_acc_colour")
    assert table["pairs, replace_rel, debiased"]["cases"] == 8 and "pairs, swap_obj, debiased" not in table
    assert table["probe, linear probe"]["cases"] == 96


def test_the_page_shows_the_table_and_the_captions_of_each_row(whole):
    page = (whole / "index.html").read_text(encoding="utf-8")
    for row in read_json(whole / "card.json")["measures"]:
        cells = "".join(f"<td>{'' if row[name] is None else row[name]}" for name in (*ROWS, "blind", "floor", "cases"))
        assert f"<th>{row['measure']}{cells}" in page
    for row in ROWS:
        said = read_json(whole / "results" / row / "captions/data-captioning.json")["captions"]
        assert len(said) == 8
        assert all(f'<h2 dir="auto">{escape(printable(one)) or "(no words)"}</h2>' in page for one in said.values())
    assert page.count("<article>") == 8 and page.count("data:image/png") == 8 and str(whole.parent) not in page


def test_the_export_is_the_encoder_with_the_decoder_that_was_measured(whole, runs):
    loaded = open_clip_mdc.load(str(whole / "captioner"))
    unregister()
    begun, ended = state_of(runs / "arc/checkpoints/epoch_1.pt"), loaded.model.state_dict()
    same = {name for name in begun if torch.equal(ended[name], begun[name])}
    assert tower(begun).keys() <= same < begun.keys()
    images = [sample["png"] for sample in read_samples(str(whole / "data/test/0.tar"))]
    (whole.parent / "first.png").write_bytes(images[0])
    said = read_json(whole / "results/encoder/captions/data-captioning.json")
    assert loaded.caption(whole.parent / "first.png", length="auto", repeats="avoid") == [said["captions"]["00000000"]]
    assert sorted(path.name for path in whole.iterdir()) == [
        "captioner", "card.json", "card.jsonl", "data", "index.html", "results"]
    train, test = ({sample["png"] for sample in read_samples(str(whole / "data" / name))}
                   for name in ("train/00000.tar", "test/0.tar"))
    assert len(train) == len(test) == 8 and not train & test


def test_a_killed_run_ends_as_the_whole_one_and_its_floors_are_what_they_are_called(argv, whole, runs):
    out = whole.parent / "killed"
    moment = out / f"work/pixels/checkpoints/epoch_{card.EPOCHS}.pt"
    killed_when(moment.exists, "-c", RUN, *argv, "--out", out)
    assert moment.exists() and not (out / "index.html").exists()
    found = {row: state_of(out / "work" / row / f"checkpoints/epoch_{card.EPOCHS}.pt")
             for row in ROWS}
    towers = {row: tower(own) for row, own in found.items()}
    weight = "visual.conv1.weight"
    assert torch.equal(towers["encoder"][weight], state_of(runs / "arc/checkpoints/epoch_1.pt")[weight])
    assert towers["random"].keys() == towers["encoder"].keys()
    assert not torch.equal(towers["random"][weight], towers["encoder"][weight])
    assert towers["pixels"][weight].shape == (768, 3, 32, 32) and not any("resblocks" in x for x in towers["pixels"])
    decoders = [{name: x.shape for name, x in own.items() if name.startswith("text.") and "cross" not in name}
                for own in found.values()]
    assert decoders[0] == decoders[1] and decoders[0].keys() == decoders[2].keys()
    kept = times((out / "results/random").glob("*.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "CAPTIONS", FEW)
        assert "begun with another test: give another --out" in complaint_of(*argv, "--test", "0.4", "--out", out)
        run_tool([*argv, "--out", out])
        assert times(kept) == kept and len(kept) > 4
        for name in ("card.json", "index.html", "card.jsonl"):
            assert (out / name).read_bytes() == (whole / name).read_bytes(), name
        # Another probe later costs nothing but itself.
        more = whole.parent / "more"
        run_tool(["scenes", "--out", more, "--num-train 16 --num-val 2 --num-probe 24 --num-pairs 1 --masks"])
        run_tool([*argv, "--probe", more / "masks", "--out", out])
    unregister()
    [row] = [row for row in read_json(out / "card.json")["measures"] if "mIoU" in row["measure"]]
    assert [row[name] for name in ROWS] == [
        percent(out, "probes/masks", "masks-segmentation", f"{part}miou") for part in PARTS]
    assert times(kept) == kept


def test_pixels_keep_each_patch_apart(argv, tmp_path):
    """A patch's token depends on its own pixels and place alone, so that no network helps."""
    import open_clip
    register()
    card.starts(card.argparse.Namespace(encoder=str(argv[1]), image_size=None), "MDC-ViT-Ti-8", tmp_path)
    visual = open_clip.create_model("pixels").visual.eval()
    image = torch.randn(1, 3, 224, 224, generator=seeded(0))
    other = image.clone()
    other[..., 32:64, 64:96] += 1  # row 1, column 2
    with torch.no_grad():
        differs = (patch_tokens(visual, image) != patch_tokens(visual, other)).any(2)[0]
    unregister()
    assert differs.nonzero().flatten().tolist() == [7 + 2]


@pytest.mark.parametrize("model, flags", [
    ("MDC-ViT-Ti-8", {"captions": "--caption_length auto --repeats avoid", "retrieval": "--recall_k 1 --shortlist 10"}),
    ("ARC-ViT-Ti-8", {"captions": "--caption_length auto", "retrieval": "--recall_k 1"}),
    ("MDC-ViT-Ti-8-b4", {"captions": "--caption_length auto", "retrieval": "--recall_k 1"})])
def test_each_objective_is_asked_in_the_way_that_it_can_answer(model, flags, tmp_path):
    register()
    asked = {one.name: " ".join(one.flags) for one in card.evaluations(model, tmp_path, ["swap_att"])}
    assert asked == {"captions": flags["captions"], "cloze": "", "pairs": "", "retrieval": flags["retrieval"]}
    assert [one.name for one in card.evaluations(model, tmp_path, [])] == ["captions", "cloze", "retrieval"]
    unregister()


def test_an_autoregressive_decoder_chooses_the_words_and_its_card_says_so(argv, scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "CAPTIONS", (16, 16))
    write_shard(tmp_path / "few.tar", scenes, 10)
    run_tool([*argv[:2], tmp_path / "few.tar", "--out", tmp_path / "arc"])  # of the encoder's own run
    unregister()
    table = {row["measure"]: row for row in read_json(tmp_path / "arc/card.json")["measures"]}
    assert table["chosen, colour"]["encoder"] == percent(tmp_path / "arc", "encoder", "data-cloze", "choice_acc_colour")
    assert not any(name.startswith("filled in") or "probe" in name for name in table)
    assert "ARC-ViT-Ti-8" in (tmp_path / "arc/index.html").read_text()
