"""Claims about result files: names, skipping, and strict JSON."""
import json
import os
import re
import shutil
import subprocess
from argparse import Namespace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from conftest import words, write_json
from models import evaluate, flags_of, labelled_webdataset, order_data, other_weights, save_clip, skipped

from clip_benchmark_ext import cli, results
from clip_benchmark_ext.models import resolve
from open_clip_mdc.environment import commit

pytestmark = pytest.mark.usefixtures("clip_benchmark")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = order_data(tmp_path_factory.mktemp("data"), images=4)
    return labelled_webdataset(root, ["red", "blue"], ["a {c}"], per_split=8)


def strict(path) -> dict:
    return json.loads(Path(path).read_text(), parse_constant=pytest.fail)


SELECTION = ("aro/coco_order",)
PROBE = ("wds/tiny", "--task linear_probe")
MONTE_CARLO, MORE = (("--scorer monte_carlo --num_samples", draws) for draws in "48")


@pytest.mark.parametrize("task, before, after", [
    (SELECTION, (), MONTE_CARLO),
    (SELECTION, MONTE_CARLO, MORE),
    (SELECTION, (), ("--alpha 0.5",)),
    (SELECTION, (), ("--no_amp",)),
    (PROBE, (), ("--feature cls",)),
    (PROBE, (), ("--fewshot_epochs 3",)),
], ids=lambda value: " ".join(value))
def test_a_result_is_kept_for_the_very_same_settings_and_no_other(runs, data, caplog, task, before, after):
    command = flags_of(runs, task[0], data, *task[1:])
    first = evaluate(*command, *before)
    assert skipped(*command, *before) and not skipped(*command, *after)
    assert "result of another run" in caplog.text and strict("result.json") == first
    assert evaluate(*command, *after)["settings"] != first["settings"]


def test_a_result_says_when_and_from_which_commit_it_was_made(tmp_path):
    def git(*command):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *command], check=True)

    for folder in ("own", "installed"):  # as a package in a .venv that lies in somebody's checkout
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").touch()
    assert commit(tmp_path / "own") is None
    git("init", "-q")
    git("add", "own")
    git("commit", "-qm", "a")
    assert re.fullmatch("[0-9a-f]{7,}", commit(tmp_path / "own")) and commit(tmp_path / "installed") is None
    before = datetime.now(timezone.utc).replace(microsecond=0)
    results.write(tmp_path / "x.json", {"model": "mdc"}, {"acc": 0.5})
    made = strict(tmp_path / "x.json")["made"]
    assert before <= datetime.fromisoformat(made["date"]) <= datetime.now(timezone.utc) and "commit" in made
    assert "torch" in made["environment"]


def test_our_flags_are_in_the_default_name_so_that_nothing_is_overwritten(runs, data):
    for task, more in ((SELECTION, ()), (SELECTION, MONTE_CARLO), (SELECTION, ("--alpha 0.5",)), (SELECTION, MORE),
                       (PROBE, ()), (PROBE, ("--feature pooled",))):
        cli.main(words("eval", *flags_of(runs, task[0], data, *task[1:], *more), "--num_workers 0 --quiet"))
    names = [path.name for path in Path().glob("*.json")]
    assert len(names) == 6
    assert any(name.endswith("_num_samples-4.json") for name in names)
    assert all("epoch_1.pt" in name and "/" not in name for name in names)


def test_a_result_of_other_weights_under_the_same_path_or_without_settings_is_made_again(runs, data, tmp_path):
    weights = Path(shutil.copy(runs / "mdc/checkpoints/epoch_1.pt", tmp_path))
    command = flags_of(runs, *SELECTION, data, "--model MDC-ViT-Ti-8 --pretrained", weights)
    saved, kept = evaluate(*command), Path("result.json").read_text()
    assert skipped(*command)
    for broken in (json.dumps({k: v for k, v in saved.items() if k != "settings"}), kept[:50],
                   json.dumps(saved | {"metrics": {"text_acc": float("nan")}})):
        Path("result.json").write_text(broken)
        assert not skipped(*command)
    Path("result.json").write_text(kept)
    other_weights(runs, weights)
    assert not skipped(*command)


@pytest.mark.parametrize("option", ["--custom_template_file", "--load_clfs"])
def test_a_result_of_a_file_that_has_been_overwritten_is_made_again(runs, data, tmp_path, option):
    """Files are told by their content, whichever option names them."""
    file = tmp_path / "file"
    command = flags_of(runs, "wds/tiny", data)
    if option == "--load_clfs":
        clip, weights = save_clip(tmp_path)
        command = (*command, "--model", clip, "--pretrained", weights)
        evaluate(*command, "--save_clf", file)
    else:
        write_json(file, {"wds/tiny": ["a {c}"], "tiny": ["a {c}"]})
    evaluate(*command, option, file)
    assert skipped(*command, option, file)
    os.utime(file, (1, 1))
    assert skipped(*command, option, file)
    file.write_bytes(file.read_bytes() + b" ")
    assert not skipped(*command, option, file)


def test_skipping_works_for_clip_models_with_the_task_left_to_the_data_set(data, tmp_path):
    model, weights = save_clip(tmp_path)
    for dataset in ("aro/coco_order", "wds/tiny"):
        command = ("--model", model, "--pretrained", weights, "--dataset", dataset, "--dataset_root", data,
                   "--output", results.DEFAULT_OUTPUT)
        cli.main(words("eval", *command, "--num_workers 0"))
        assert skipped(*command)
        assert skipped(*command, "--scorer monte_carlo")  # which a CLIP model does not have
        assert not skipped(*command, "--no_amp")
    assert len(list(tmp_path.glob("*_tiny-clip-vit.pt_*.json"))) == 2  # the names that upstream gives


def test_numbers_that_are_none_are_null_with_a_reason(runs, data):
    for task in ("linear_probe", "zeroshot_classification"):
        evaluate(*flags_of(runs, "wds/tiny", data, "--task", task), name=task)
    probe, zeroshot = (strict(f"{task}.json")["metrics"] for task in ("linear_probe", "zeroshot_classification"))
    assert probe["feature"] == "gap" and probe["lp_acc5"] is None
    assert probe["lp_acc5_missing"] == "there are only 2 classes"
    assert zeroshot["acc5"] is None and zeroshot["acc5_missing"] == "only 2 classes"
    results.write(Path("nan.json"), {}, {"recall": float("nan"), "loss": float("inf"), "acc": 1.0, "name": "x"})
    assert strict("nan.json")["metrics"] == {
        "recall": None, "recall_missing": "it came out as nan", "loss": None, "loss_missing": "it came out as inf",
        "acc": 1.0, "name": "x"}
    cli.main(["build", "linear_probe.json", "zeroshot_classification.json", "--output", "all.csv"])
    assert "nan" not in Path("all.csv").read_text().lower()


def test_results_of_the_packaged_captioner_are_of_photo_wherever_it_is_installed(data):
    name, weights = resolve("mdc", "photo")
    args = Namespace(model=name, pretrained=weights, dataset="wds/tiny", task="linear_probe", language="en", amp=False,
                     dataset_root=str(data), split="test", model_type="open_clip", device="cpu", fewshot_k=-1, seed=3,
                     output=results.DEFAULT_OUTPUT)
    about = results.describe(args, (), {}, {})
    assert Path(name.removeprefix("local-dir:")).is_absolute() and about["settings"]["weights_sha256"]
    assert about["model"] == about["pretrained"] == "photo" and results.named_files("clip", name)
    assert results.file_name("{pretrained_full_path}_{model}_{dataset}.json", args) == "photo_photo_tiny.json"
    assert results.output_file(args, results.Flags(alpha=0.5), ("scorer", "alpha"), True) == Path(
        "tiny_photo_photo_en_linear_probe_alpha-0.5_seed-3.json")


def test_a_result_of_a_version_with_another_flag_is_kept_if_the_flag_was_not_given(tmp_path):
    about = {"model": "m", "settings": {"alpha": 1.0}}
    for value, kept in ((None, True), (0.9, False)):
        settings = {**about["settings"], "stop_confidence": value}
        write_json(tmp_path / "result.json", {**about, "settings": settings, "metrics": {}})
        assert results.is_there(tmp_path / "result.json", about) is kept
