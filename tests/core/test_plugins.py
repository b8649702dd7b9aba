"""Claims about objectives that lie outside the package (tests/plugin_example)."""
import runpy
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import REPO, VOCAB, captions, complaint_of, images, read_json, refused, run, seeded, tiny_captioner
from training import open_clip_train

from open_clip_mdc.integration import arguments, configs, plugins
from open_clip_mdc.integration.patches import register, unregister
from open_clip_mdc.objectives import OBJECTIVES
from open_clip_mdc.objectives.config import CaptionCfg
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.objectives.times import stratified_uniform
from open_clip_mdc.text.special_tokens import target_tokens

SPAN = REPO / "tests/plugin_example/span.py"
MDC = "python -m open_clip_mdc"


@pytest.fixture(scope="module")
def trained(scenes, tmp_path_factory) -> Path:
    """A run of the example's objective, by the real command."""
    logs = tmp_path_factory.mktemp("logs")
    open_clip_train("--dataset-type webdataset --train-num-samples 96 --batch-size 16 --workers 1 --plugin", SPAN,
                    "--val-data", scenes / "val/00000.tar", data=scenes / "train/{00000..00007}.tar", logs=logs,
                    model="Span-ViT-Ti-8")
    return logs / "run"


def test_an_objective_from_outside_is_trained_captioned_and_scored_by_the_real_commands(trained, scenes, tmp_path):
    assert read_json(trained / "checkpoints/results.jsonl")["nelbo_per_token"] > 0
    image = next((scenes / "sugarcrepe/val2017").iterdir())
    flags = f"--plugin {SPAN} --pretrained {trained}"
    run(*f"{MDC} caption {flags} {image} --out {tmp_path}/a.jsonl".split(), fork=True)
    assert read_json(tmp_path / "a.jsonl")["caption"]
    run(*f"python -m clip_benchmark_ext.cli eval --model span {flags} --dataset sugar_crepe/swap_obj --dataset_root "
        f"{scenes}/sugarcrepe --no_amp --num_workers 0 --output {tmp_path}/swap_obj.json".split(), fork=True)
    assert 0 <= read_json(tmp_path / "swap_obj.json")["metrics"]["text_acc"] <= 1


def test_a_run_says_which_plug_in_it_needs_and_nothing_is_imported_because_a_file_names_it(trained, scenes):
    assert "plugin: span\n" in (trained / "params.txt").read_text()
    (trained.parent / "span.py").write_text("raise SystemExit('imported')")  # beside the run, and in no path
    said = run(*f"{MDC} caption --pretrained {trained} {scenes}/val/00000.tar".split(), check=False, fork=True).stderr
    assert "was trained with the plug-in span: give --plugin" in said and len(said.splitlines()) == 1


def test_an_encoder_for_an_objective_from_outside_is_told_with_the_flags():
    register(training=True)
    try:
        args = arguments.parse(["--plugin", str(SPAN), "--model", "Span-timm-resnet18", "--pretrained-image"])
    finally:
        unregister()
    assert args.pretrained_image == "timm:resnet18" and args.image_mean == [0.485, 0.456, 0.406]


def test_a_plug_in_that_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "rows.py").write_text("")
    (tmp_path / "rows.json").write_text('{"rows": {"Odd-*": {"extends": "Nothing-*"}}}')
    for name, reason in {"broken.py": "ZeroDivisionError", "gone.py": "FileNotFoundError", "rows.py": "Nothing-*"
                         }.items():
        said = complaint_of("caption", "--pretrained", tmp_path, "--plugin", tmp_path / name, "a.jpg")
        assert name in said and reason in said and "\n" not in said
    (tmp_path / "rows.json").unlink()
    for name in ("broken.py", "rows.py"):  # mended
        (tmp_path / name).write_text("")
        plugins.load_plugin(str(tmp_path / name))
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "rows.py", tmp_path / "other")
    again = str(tmp_path / "other/rows.py")
    assert "a plug-in rows is loaded already" in refused(ValueError, plugins.load_plugin, again)


def test_a_row_that_extends_another_is_that_row_but_for_what_it_says():
    assert configs.ROWS["MDC-*-mcs"] == {**configs.ROWS["MDC-*"], "condition_drop": 0.1, "condition_mask": 0.1}
    assert plugins.name_of("a/b/span.py") == "span" == plugins.name_of("span")


@pytest.fixture(scope="module")
def next_steps():
    with patch.dict(OBJECTIVES):
        runpy.run_path(str(REPO / "tests/plugin_example/next_steps.py"))
        yield


@pytest.mark.parametrize("name", ("schedule rates views loss backwards prefix blocks any-order two-passes teacher "
                                  "reward eos-padded task-word").split())
def test_twelve_next_steps_of_the_literature_are_objectives_that_train(name, next_steps):
    """One batch is learnt, as far as its noise lets it. (The reward has no loss that falls, so its gradient counts.)"""
    model, text = tiny_captioner(f"step-{name}").train(), captions([5, 9, 11 if name == "task-word" else 12, 8])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(40):
        loss = CaptionLoss()(**model(images(4), text), output_dict=True)["caption_loss"]
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert any(p.grad is not None and p.grad.any() for p in model.text.parameters())
    if name not in ("reward", "teacher"):
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses


def test_the_plugin_of_the_docs_asks_for_every_token_equally():
    """docs/extend.md says so: the expected weight of a target token is 1, at the ends of a caption, too."""
    plugins.load_plugin(str(SPAN))
    text, count = captions([7, 4]), 4000
    many, u = text.repeat_interleave(count, 0), stratified_uniform(count, 0.5)
    found = OBJECTIVES["span"].corrupt(many, VOCAB, CaptionCfg(), u.repeat(2), seeded(0))
    mean = found.weight.view(2, count, -1).mean(1)
    torch.testing.assert_close(mean, target_tokens(text, VOCAB).float(), atol=0.06, rtol=0)
