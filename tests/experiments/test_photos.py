"""Claims about SCALE=photos: which recipe is chosen, what is trained on which encoder."""
import open_clip
import pytest
from conftest import REPO
from helpers import dry_run, flags_of, page_of, place, write_result
from test_commands import is_training

from experiments import commands, preflight
from experiments.report import archive
from experiments.tables import photos, scales
from open_clip_mdc.integration.patches import register


def test_locked_towers_keep_their_tokens_in_one_place_and_free_ones_are_trained_later(tmp_path):
    trainings = list(filter(is_training, dry_run("towers", tmp_path, "towers", data="photographs")))
    for words in trainings:
        flags = flags_of(words)
        locked = "--lock-image" in words
        assert flags["--pretrained-image"] == place(tmp_path / "photographs").fill(scales.TOWERS.image)
        assert flags["--cache-features"] == str(tmp_path / "out/tokens")
        assert flags["--force-image-size"] == "128" and words.count("--force-image-size") == 1
        assert flags.get("--unlock-image-after") == (None if locked else "12") and flags["--epochs"] == "20"
        assert flags.get("--image-lr-scale") == (None if locked else "0.1")
    assert {(flags_of(words)["--model"], "--lock-image" in words) for words in trainings} == {
        (f"{objective}-small-timm-tf_efficientnet_lite0", locked)
        for objective in ("MDC", "ARC", "CapPa") for locked in (True, False)}


@pytest.mark.parametrize("scale,base,source,size", [
    ("photos", "timm-tf_efficientnet_lite0", "photographs/../encoders/efficientnet_lite0", "224"),
    ("photos-vit", "timm-vit_small_patch14_dinov2", "photographs/../encoders/vit_small_patch14_dinov2_saliency", "126"),
    ("photos-timm-resnet18", "timm-resnet18", "timm:resnet18", "224")])
def test_photographs_are_captioned_from_any_encoder(scale, base, source, size, tmp_path):
    printed = dry_run(scale, tmp_path, "photos", data="photographs")
    trainings = [flags_of(words) for words in printed if is_training(words)]
    assert [flags["--model"] for flags in trainings] == [
        f"MDC-small-{base}", f"ARC-small-{base}", f"Mix-small-{base}-arc50", f"MDC-small-{base}-b4"]
    assert all(flags["--pretrained-image"].endswith(source) and flags["--force-image-size"] == size
               for flags in trainings)


def test_a_small_decoder_stands_on_any_base():
    register()
    for base in ("timm-resnet18", "ViT-B-32", "ViT-Ti-8"):
        small, paper = (open_clip.get_model_config(f"MDC-{prefix}{base}") for prefix in ("small-", ""))
        assert small["vision_cfg"] == paper["vision_cfg"] and small["caption_cfg"] == paper["caption_cfg"]
        assert (small["text_cfg"]["layers"], small["text_cfg"]["width"]) == (3, 192)
    assert open_clip.get_model_config("MDC-small-nothing") is None
    model = open_clip.create_model("MDC-small-timm-tf_efficientnet_lite0")
    decoder = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("visual."))
    assert 4e6 < decoder < 5e6  # in 16 bit, less than 10 MB


def test_the_recipe_is_chosen_on_validation_photographs(tmp_path):
    """Though another is better on test photographs."""
    scale, scores = scales.PHOTOS, {}
    for number, cell in enumerate(c for c in photos.photos(scale) if c.column == "CIDEr"):
        split, objective, recipe = cell.row.split(", ")
        scores[cell.row] = number if split == "test" else -number
        write_result(tmp_path, commands.variant(cell.evaluation), cell.run.name(0), cell.evaluation.datasets[0],
                     commands.last_epoch(scale, cell.run), CIDEr=scores[cell.row] / 100)
    page = page_of(tmp_path, "photos", scale)
    first = {objective: next(row for row in scores if row.startswith(f"validation, {objective}"))
             for objective in photos.RECIPES}
    assert page.endswith("Chosen on validation photographs:\n\n" + "".join(
        f"- {row.replace('validation', 'test')}\n" for row in first.values()))


def test_missing_photographs_and_weights_are_named_with_what_makes_them(tmp_path):
    found = {need.what: need.fetch for need in preflight.training_data(
        scales.PHOTOS, ["photos"], [photos.run_of(scales.PHOTOS, "MDC")], [0], place(tmp_path / "data"))}
    assert [what.removeprefix(f"{tmp_path}/data/") for what in found] == [
        "../encoders/efficientnet_lite0: the weights of the image encoder", "val", "train", "test"]
    assert all("prepare flickr8k" in fetch or "timm" in fetch for fetch in found.values())


def test_the_page_of_captions_waits_until_both_models_are_there(tmp_path):
    """Runs whose results are in the archive have no checkpoint to caption by."""
    archive.unpack(REPO / "experiments/results/photos.photographs.tar.xz", tmp_path / "out")
    next((tmp_path / "out/results/captioning-caption_length-10").glob("captions*MDC*--s0*.json")).unlink()
    printed = dry_run("photos", tmp_path, "photos")
    assert [flags_of(words)["--model"].partition("-")[0] for words in printed if is_training(words)] == ["MDC"]
    assert not any("--html" in words for words in printed)
    assert any("--html" in words for words in dry_run("photos-unlocked", tmp_path / "unlocked", "photos"))
