"""Claims about `clip_benchmark` with captioners, by the real command."""
import csv
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import ANY

import clip_benchmark.cli
import numpy as np
import open_clip
import pytest
import torch
from captioned import captioned
from clip_benchmark.metrics import zeroshot_classification
from conftest import make_image, members, read_json, refused, words, write_run
from models import evaluate, flags_of, labelled_webdataset, save_clip
from strategies import tar
from training import run_ranks

import open_clip_mdc
from clip_benchmark_ext import cli
from clip_benchmark_ext import run as benchmark_run
from clip_benchmark_ext.table import markdown, read_results
from clip_benchmark_ext.tasks.linear_probe import top_k_accuracy
from open_clip_mdc.objectives.registry import OBJECTIVES

pytestmark = pytest.mark.usefixtures("clip_benchmark")


def test_two_gloo_processes_of_three_workers_give_the_numbers_of_one_to_the_digit(scenes, runs, tmp_path):
    data = labelled_webdataset(tmp_path / "data", ["red", "blue", "green"], ["a {c}"], shards=3)
    probe = ("wds/probe", data, "--batch_size 5 --task")
    tasks = {
        "selection": ("sugar_crepe/replace_rel", scenes / "sugarcrepe", "--batch_size 7"),
        "probe": (*probe, "linear_probe"),
        "probes": (*probe, "probe", "--fewshot_epochs 1"),
        "zeroshot": (*probe, "zeroshot_classification"), "few": (*probe, "zeroshot_classification", "--batch_size 64"),
        "retrieval": ("wds/x", captioned(tmp_path), "--task zeroshot_retrieval --batch_size 3"),
    }
    tasks = {name: words(*flags_of(runs, *flags)) for name, flags in tasks.items()}
    each = [["eval", *words("--distributed --num_workers 3 --feature_root", tmp_path / "two", "--output",
                            f"two-{name}.json", *flags)] for name, flags in tasks.items()]
    run_ranks("python", "-c", "import atexit, os, torch\n"
              "atexit.register(lambda: torch.distributed.is_initialized() and os._exit(9))\n"
              "from clip_benchmark_ext import cli, distributed\n"
              f"for argv in {each!r}:\n    assert not cli.main(argv)\n"
              "    distributed.start = lambda device: None  # the processes have met\n")
    for name, flags in tasks.items():
        one = evaluate(*flags, "--feature_root", tmp_path / "one")
        assert read_json(f"two-{name}.json") == one | {"made": ANY}, name


def test_results_of_several_subsets_are_not_overwritten_and_build_makes_a_csv(scenes, runs, tmp_path, capsys):
    for scorer in "", "--scorer monte_carlo --num_samples 4":
        cli.main(words("eval", *flags_of(
            runs, "sugar_crepe/swap_att", scenes / "sugarcrepe", "--dataset sugar_crepe/swap_att sugar_crepe/swap_obj",
            f"--num_workers 0 --task image_caption_selection --fewshot_k 4 --batch_size 8 {scorer}")))
    files = [*map(str, tmp_path.glob("*.json"))]
    assert len(files) == 4
    said = capsys.readouterr().err
    assert "--fewshot_k changes nothing for --task image_caption_selection" in said and said.count("warning: --") == 2
    cli.main(["build", *files, "--output", "all.csv"])
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert len(rows) == 4 and {r["scorer"] for r in rows} == {"heuristic", "monte_carlo"}
    table = markdown(read_results(files))
    assert table.count("sugar_crepe/swap, macro |") == table.count("sugar_crepe/swap, micro |") == 2  # by scorer


def test_a_clip_model_through_our_script_gives_upstreams_numbers_to_the_digit(scenes, tmp_path, monkeypatch):
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":  # which upstream's accuracy does not run with
        monkeypatch.setattr(zeroshot_classification, "accuracy", lambda logits, target, topk: top_k_accuracy(
            logits, target, topk))
    model, checkpoint = save_clip(tmp_path)
    for name, flags in {
        "selection": ("--dataset sugar_crepe/swap_att --dataset_root", scenes / "sugarcrepe"),
        "zeroshot": ("--task zeroshot_classification --dataset wds/probe --dataset_root", scenes / "probe"),
    }.items():
        flags = ("--model", model, "--pretrained", checkpoint, *flags)
        ours = evaluate(*flags)
        open_clip_mdc.unregister()
        sys.argv = ["clip_benchmark", "eval", *words(*flags, "--output theirs.json --num_workers 0")]
        clip_benchmark.cli.main()
        theirs = read_json("theirs.json")
        assert {k: ours[k] for k in theirs if k != "metrics"} == {k: v for k, v in theirs.items() if k != "metrics"}
        if name == "zeroshot":
            assert ours["metrics"] == theirs["metrics"] | {"scorer": "cosine"}
        else:
            assert ours["metrics"]["clip_benchmark_text_acc"] == pytest.approx(theirs["metrics"]["text_acc"], abs=1e-7)
            assert ours["metrics"]["scorer"] == "cosine" and ours["metrics"]["cases"] == 40


def test_a_clip_run_is_evaluated_at_the_image_size_that_it_was_trained_at(scenes, tmp_path, monkeypatch):
    """Given by its folder. Upstream would build it at the config's 48 px and resize the positional embedding."""
    name, _ = save_clip(tmp_path)
    trained = open_clip.create_model(name, force_image_size=32)
    write_run(tmp_path / "run", trained.state_dict(), model=name, force_image_size=32)
    loaded, load = [], benchmark_run.load_model
    monkeypatch.setattr(benchmark_run, "load_model", lambda args: loaded.append(load(args)) or loaded[0])
    result = evaluate("--model", name, "--pretrained", tmp_path / "run",
                      "--dataset sugar_crepe/swap_att --dataset_root", scenes / "sugarcrepe")
    assert result["pretrained"] == str(tmp_path / "run/checkpoints/epoch_1.pt")
    (model, transform, _), = loaded
    image = transform(make_image(0))
    assert image.shape == (3, 32, 32)
    assert torch.equal(model.encode_image(image[None]), trained.eval().encode_image(image[None]))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_was_cut_off_is_named_and_nothing_is_measured(runs, scenes, tmp_path, workers):
    """Cut between two samples, upstream takes it for a whole one and measures half."""
    folder = shutil.copytree(scenes / "probe", tmp_path / "probe")
    shard = folder / "test/0.tar"
    shard.write_bytes(tar([*members(shard).items()][:30])[:-1024])
    with pytest.raises(SystemExit) as error:
        evaluate(*flags_of(runs, "wds/probe", folder, "--num_workers", workers))
    assert str(error.value) == f"error: --dataset_root: {shard}: not a complete tar file. Download or write it again"
    assert not Path("result.json").exists()


def test_help_is_upstreams_then_ours_with_the_names_of_models(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "999")  # no name is broken at its hyphen
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", "--help"])
    theirs, ours = capsys.readouterr().out.split("\ncaptioners:\n")
    assert end.value.code == 0 and theirs.startswith("usage:") and "--dataset_root" in theirs
    about, _, options = ours.partition("--scorer NAME")
    assert set(OBJECTIVES) <= set(re.findall(r"[\w-]+", about)) and "--clipscore_pretrained" in options


def facts(parser) -> dict:
    """All that decides what a parser reads and prints, of each command."""
    commands = next(action for action in parser._actions if action.choices)
    return {name: [command._defaults, command.format_help(), sorted(
                (*action.option_strings, action.dest, str(action.nargs), str(action.default), str(action.type),
                 str(action.const), str(action.choices)) for action in command._actions)]
            for name, command in commands.choices.items()}


def test_the_copy_of_clip_benchmarks_flags_is_true(monkeypatch):
    from clip_benchmark.cli import get_parser_args
    given = "eval --model_type ja_clip --fewshot_k 3 --dataset a b".split()
    monkeypatch.setattr("sys.argv", ["clip_benchmark", *given])
    theirs, args = get_parser_args()
    assert facts(cli.their_parser()) == facts(theirs) and vars(cli.parse(given)[1]) == vars(args)
    assert cli.their_parser().format_help() == theirs.format_help()


@pytest.mark.parametrize("flag", ["--output", "--save_captions", "--save_coco_results", "--save_clf"])
def test_a_file_that_is_read_is_not_written(clip_benchmark, flag):
    for name in ("mine.json", "other.json"):
        Path(name).write_text("mine")
    Path("link.json").symlink_to("mine.json")
    argv = "eval --model mdc --pretrained no --dataset wds/no --cloze_words mine.json".split()
    for out in ("mine.json", "link.json", "other.json"):
        said = refused(SystemExit, cli.main, [*argv, flag, out])
        assert ("would replace mine.json, which is read" in said) == (out != "other.json")
    assert Path("mine.json").read_text() == "mine"
    assert "one file for several --dataset" in refused(SystemExit, cli.main, [*argv, "--dataset", "a", "b", flag, out])
