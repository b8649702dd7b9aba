"""Claims about the commands of experiments/: the paper's hyperparameters, flags that parse, shards that suffice."""
import argparse
import math
import shlex
import shutil
import subprocess
from pathlib import Path

import documents
import open_clip
import pytest
import torch
from braceexpand import braceexpand
from conftest import REPO, VOCAB, captions
from helpers import dry_run, flags_of, leave_recipe, place, runner

from experiments import commands
from experiments.tables import paper, scales
from experiments.tables.paper_tables import TABLES, Run
from open_clip_mdc.integration.patches import register
from open_clip_mdc.objectives.config import CaptionCfg
from open_clip_mdc.objectives.registry import OBJECTIVES

NAMES = list(runner.TITLES)


def arguments(command: list[str]) -> list[str]:
    """Return the arguments of a program, by whatever launcher it is started."""
    return command[command.index("--") + 1:] if command[0].endswith("torchrun") else command[1:]


def is_training(command: list[str]) -> bool:
    return "open_clip_mdc.train" in command or command[0].endswith("open_clip_train")


def parse_training(command: list[str]) -> argparse.Namespace:
    from open_clip_train.params import parse_args
    register()
    return parse_args(arguments(command))


@pytest.fixture(scope="module")
def paper_trainings() -> dict[str, argparse.Namespace]:
    """Parsed flags by run name, by upstream's own parser."""
    parsed = {}
    for command in filter(is_training, dry_run("paper", Path("/"), *NAMES, data="data")):
        assert command[:3] == ["torchrun", "--nproc_per_node", "8"]
        args = parse_training(command)
        parsed[args.name] = args
    return parsed


def upstream_steps(args: argparse.Namespace, processes: int) -> int:
    """As open_clip_train counts them (data.get_wds_dataset, main)."""
    workers = max(1, args.workers)
    batches = math.ceil(args.train_num_samples / (args.batch_size * processes))
    return math.ceil(batches / workers) * workers // args.accum_freq * args.epochs


def test_paper_scale_trains_with_the_hyperparameters_of_tables_6_to_8(paper_trainings):
    pretrained = {name: a for name, a in paper_trainings.items() if not a.pretrained and a.lr}
    assert len(pretrained) == 44
    for name, a in pretrained.items():
        large, base16 = "ViT-L-14" in name, "ViT-B-16" in name
        expected = dict(
            opt="adamw", lr=4e-4 if large else 5e-4, warmup=9_078 if "cc3m" in name else 10_000,  # of CC12M and Recap
            wd=0.2 if large or base16 else 0.1, beta1=0.9, beta2=0.98, lr_scheduler="cosine", epochs=32,
            accum_freq=2 if large else 1, grad_clip_norm=1.0 if name.startswith("ARC-ViT-L-14--cc12m") else None,
            resume="latest", dataset_type="webdataset")
        assert {flag: getattr(a, flag) for flag in expected} == expected, name
        assert a.batch_size * a.accum_freq * 8 == (2048 if "-x2" in name else 1024), name
        if "-x2" not in name:
            assert a.batch_size == (64 if large else 128), name


def test_paper_scale_trains_every_row_once_on_its_data(paper_trainings):
    rows = {name.rpartition("--s")[0] for name in paper_trainings}
    main = {f"{method}{backbone}--{data}" for backbone in ("ViT-B-32", "ViT-B-16", "ViT-L-14")
            for method in ("", "ARC-", "MDC-") for data in ("cc12m", "recap-10m")}
    main |= {f"{backbone}--recap-10m-x2" for backbone in ("ViT-B-32", "ViT-B-16", "ViT-L-14")}
    ablations = {f"MDC-ViT-B-32-unweighted--{data}" for data in ("cc12m", "recap-10m")}
    ablations |= {f"MDC-ViT-B-32{t}--cc3m" for t in ("", "-t0.0-1.0", "-t0.3-0.8", "-t0.4-0.9")}
    ablations |= {f"{model}--{data}" for data in ("cc12m", "recap-10m")
                  for model in ["Parallel-ViT-B-32", *(f"BERT-ViT-B-32-r{r}" for r in (15, 30, 45, 60, 75, 90))]}
    ablations |= {f"MDC-ViT-B-32--recap-{n}m" for n in (5, 10, 20, 30)}
    tuned = {f"{m}-ViT-B-32--{data}-from-cc12m" for m in ("ARC", "MDC") for data in ("coco", "flickr30k")}
    tuned |= {"coca_ViT-B-32--coco-from-laion2b_s13b_b90k"}
    floor = paper_trainings["MDC-ViT-B-32-untrained--cc12m--s0"]  # one step that moves nothing
    assert (floor.lr, floor.epochs, floor.train_num_samples, floor.warmup) == (0, 1, 1024, 0)
    assert rows == main | ablations | tuned | {"MDC-ViT-B-32-untrained--cc12m"}
    assert paper_trainings["MDC-ViT-B-32--cc12m--s0"].train_data == "/data/cc12m/{00000..01242}.tar"
    assert paper_trainings["MDC-ViT-B-32--coco-from-cc12m--s0"].pretrained == \
        "/out/runs/MDC-ViT-B-32--cc12m--s0/checkpoints/epoch_32.pt"
    coca = paper_trainings["coca_ViT-B-32--coco-from-laion2b_s13b_b90k--s0"]
    assert (coca.pretrained, coca.coca_contrastive_loss_weight) == ("laion2b_s13b_b90k", 0)


@pytest.mark.parametrize("scale,gpus", [("paper", 8), ("paper", 1), ("scenes", 0), ("rich", 0), ("gpu", 1),
                                        ("flickr8k", 0)])
def test_every_training_has_shards_for_its_workers_and_warms_up_for_a_tenth_at_most(scale, gpus, tmp_path):
    trainings = list(map(parse_training, filter(is_training, dry_run(scale, tmp_path, *NAMES, gpus=gpus))))
    assert len(trainings) > 15
    for args in trainings:
        steps = upstream_steps(args, max(gpus, 1))
        assert len(list(braceexpand(args.train_data))) >= args.workers * max(gpus, 1), args.name
        assert args.workers >= 1 and (0 < args.warmup <= steps / 10 or not args.lr), (args.name, args.warmup, steps)


@pytest.mark.parametrize("scale,gpus,others", [("paper", 8, 5), ("scenes", 0, 12), ("rich", 0, 6), ("gpu", 1, 5),
                                               ("flickr8k", 0, 7)])
def test_every_printed_command_parses(scale, gpus, others, tmp_path, monkeypatch):
    """By the real parsers of the programs that it starts. Others are judges by test set and seed, lengths and data."""
    monkeypatch.setenv("JUDGE_URL", "http://localhost:8000/v1")
    printed = dry_run(scale, tmp_path, *NAMES, gpus=gpus, seeds="01")
    for command in printed:
        documents.parse(command)
    programs = [documents.module_and_flags(command)[0] for command in printed]
    assert sum(map(programs.count, ("open_clip_mdc", "experiments.judge", "experiments.lengths"))) == others
    evaluations = [command for command in printed if "eval" in command]
    assert all("--skip_existing" in command for command in evaluations)
    tasks = {flags_of(command)["--task"] for command in evaluations}
    assert tasks >= {"linear_probe", "image_caption_selection", "captioning"}


def test_every_trained_model_has_a_config():
    register()
    for scale in scales.SCALES.values():
        for cell in runner.cells_of(scale, list(scale.tables or TABLES)):
            assert open_clip.get_model_config(cell.run.model) is not None, cell.run.model


def test_the_decoders_of_one_and_of_two_views_see_equally_many_captions():
    """Times the data set is read, times the captions that the objective makes of each."""
    register()
    text, u = captions([4, 7, 9, 12]), torch.linspace(0.1, 1, 4)
    seen = {}
    for run in {cell.run for cell in TABLES["table8"](scales.SCENES)}:
        cfg = CaptionCfg(**open_clip.get_model_config(run.model)["caption_cfg"])
        corrupted = OBJECTIVES[cfg.objective].corrupt(text, VOCAB, cfg, u, None)
        seen[run.model] = run.epochs * len(corrupted.text) / len(text)
    assert len(seen) == 3 and set(seen.values()) == {scales.SCENES.caption_epochs}
    assert not list(TABLES["table8"](scales.FLICKR8K))  # one epoch has no half


def test_mc_diffusion_at_its_own_scale_is_cub_200_with_vq_diffusions_optimiser():
    result = subprocess.run(["make", "-n", "table6", "SCALE=paper", "DATA=/data", "GPUS=8"], cwd=REPO,
                            capture_output=True, text=True, check=True)
    lines = [shlex.split(line) for line in result.stdout.splitlines()]
    assert any(words[1:3] == ["vq", "import"] for words in lines)
    trainings = {args.model: args for args in map(parse_training, filter(is_training, lines))}
    assert len(trainings) == 5
    mcs = trainings["MCD-VQ-ViT-f8-mcs"]
    assert (mcs.batch_size * 8, mcs.epochs, mcs.warmup, mcs.lr, mcs.wd) == (128, 200, 1000, 4.5e-4, 0.045)
    assert (mcs.beta1, mcs.beta2, mcs.pretrained) == (0.9, 0.96, "build/cub/data/vq.pt")
    assert "/data/cub/train/" in mcs.train_data and mcs.val_data == "/data/cub/test/0.tar"


def test_the_papers_numbers_stand_beside_the_row_they_belong_to():
    cells = {(c.row, c.column): c.paper for c in TABLES["table1"](scales.PAPER)}
    assert cells["Recap-10M, ViT-B-16, MDC", "CIFAR-100"] == 81.6
    assert cells["CC12M, ViT-L-14, CLIP", "ImageNet"] == 70.1
    means = [71.7, 69.5, 68.7, 70.9, 69.7, 76.3, 74.6, 78.5, 77.4, 77.2, 76.2, 74.8, 80.6, 80.2,
             81.0, 80.2, 80.6, 77.7, 76.3, 83.3, 83.1]  # the paper's column Average
    assert [number for (_, column), number in cells.items() if column == "Average"] == means
    captions = {(c.row, c.column): c.paper for c in TABLES["table3"](scales.PAPER)}
    assert captions["Flickr30k, MDC-20", "CIDEr"] == 20.6 and captions["MSCOCO, ARC", "LLM"] == 33.9
    assert captions["MSCOCO, CoCa", "ROUGE-L"] == 43.12
    selection = {(c.row, c.column): c.paper for c in TABLES["table2"](scales.PAPER)}
    assert selection["MDC (heuristic)", "SugarCrepe add, micro"] == 97.8  # SugarCrepe's own average
    assert selection["MDC (heuristic)", "SugarCrepe add, macro"] is None
    assert selection["ARC", "ARO relation, macro"] == 82.7 and selection["ARC, blind", "ARO relation, macro"] is None


def test_steps_that_run_side_by_side_neither_wait_for_one_another_nor_share_a_log(tmp_path):
    stages = list(runner.plan(scales.SCENES, NAMES, [0, 1], place(tmp_path)))
    assert [[step.label for step in steps] for title, steps in stages if title == "data"] == [
        [name] for name in "scenes captions big captions-big vq.pt fewshot concept without rates".split()]
    few = runner.plan(scales.SCENES, ["table5"], [0], place(tmp_path))
    assert [step.label for title, steps in few if title == "data" for step in steps] == ["scenes", "captions"]
    for scale in (scales.SCENES, scales.PAPER):
        for _, steps in runner.plan(scale, NAMES, [0, 1], place(tmp_path)):
            assert len({step.label for step in steps}) == len(steps)
            made = {flags_of(step.command)["--name"] for step in steps if "--name" in step.command}
            assert not made & {Path(flag).parts[-3] for step in steps for flag in step.command if flag.endswith(".pt")}


def test_the_clip_that_guides_and_the_one_that_scores_are_trained_whatever_the_seeds(tmp_path):
    """The CLIP run of the same seed guides, that of the next seed scores."""
    stages = list(runner.plan(scales.SCENES, ["table7"], [2, 5], place(tmp_path)))
    made = {step.label for title, steps in stages if title == "training" for step in steps}
    assert made >= {"ViT-Ti-8--short--s2", "ViT-Ti-8--short--s3", "ViT-Ti-8--short--s6", "MDC-ViT-Ti-8--short-e4--s2",
                    "MDC-ViT-Ti-8-64px--big--s2", "MDC-ViT-Ti-8-regions2--big--s2"}
    assert "ViT-Ti-8--short--s0" not in made
    used = set()
    for step in stages[-1][1]:
        models = {Path(part).parts[-3].rpartition("--s")[2] for part in step.command if "," in part}
        for flag, value in zip(step.command, step.command[1:], strict=False):
            if flag in ("--clip", "--clipscore_pretrained"):
                used.add((*models, flag, Path(value).parts[-3]))
    assert used == {(str(seed), *helper) for seed in (2, 5) for helper in (
        ("--clip", f"ViT-Ti-8--short--s{seed}"), ("--clipscore_pretrained", f"ViT-Ti-8--short--s{seed + 1}"))}
    (sized,) = [step.command for _, steps in stages for step in steps if step.label == "MDC-ViT-Ti-8-64px--big--s2"]
    assert flags_of(sized)["--force-image-size"] == "64"


@pytest.mark.parametrize("scale", ["scenes", "flickr8k", "photos"])
def test_evaluations_of_other_flags_have_other_folders(scale):
    """Also where a flag is a path, or a CLIP model scores."""
    tables = scales.SCALES[scale].tables or TABLES
    evaluations = commands.evaluations(runner.cells_of(scales.SCALES[scale], list(tables)))
    places = [(commands.variant(e), e.root, e.datasets) for e, _ in evaluations]
    assert len(set(places)) == len(places) and all("/" not in variant and " " not in variant for variant, *_ in places)


# ---- recipes


def test_a_run_of_other_hyperparameters_is_named_and_nothing_is_done(tmp_path, capsys):
    run = Run("MDC-ViT-Ti-8", "short")
    folder = leave_recipe(tmp_path, scales.SCENES, run)
    checkpoint = commands.checkpoint(scales.SCENES, run, 0, place(tmp_path))
    checkpoint.parent.mkdir()
    checkpoint.touch()
    assert commands.changed(scales.SCENES, run, 0, place(tmp_path)) is None
    slower = scales.SCENES._replace(warmup=7)
    assert commands.changed(slower, run, 0, place(tmp_path)) == "50, now 7"
    with pytest.raises(ValueError, match=r"1 runs .* such as MDC-ViT-Ti-8--short--s0 \(50, now 7\)"):
        commands.check_recipes(slower, [run], [0, 1], place(tmp_path))
    (folder / "command.txt").unlink()
    with pytest.raises(SystemExit, match="it has no command.txt"):
        runner.main(["--scale", "scenes", "--tables", "table5", "--out", str(tmp_path), "--seeds", "0", "--dry-run"])
    assert capsys.readouterr().out == ""
    shutil.rmtree(checkpoint.parent)  # a run that was killed before its first file is of no other recipe
    assert commands.changed(scales.SCENES, run, 0, place(tmp_path)) is None


def test_a_recipe_is_of_the_hyperparameters_not_of_the_machine(tmp_path):
    run = Run("MDC-ViT-B-32", "coco", start=Run("MDC-ViT-B-32", "cc12m"))
    recipe = commands.recipe(scales.PAPER, run, 0)
    assert recipe.count("\n") == 2 and "--batch-size 1024" in recipe and "--nproc" not in recipe
    assert str(tmp_path) not in recipe
    longer = scales.PAPER._replace(epochs=33)  # what it starts from counts
    assert commands.recipe(longer, run, 0) != recipe
    assert commands.train(scales.PAPER, run, 0, commands.Place(tmp_path, tmp_path, "", 8)) != \
        commands.train(scales.PAPER, run, 0, commands.Place(tmp_path, tmp_path, "x/", 4))


# ---- preflight


def test_preflight_lists_everything_that_is_missing_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JUDGE_URL", raising=False)
    with pytest.raises(SystemExit, match="things are missing, listed above: nothing was run"):
        runner.main(["--scale", "paper", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--tables", *NAMES])
    told = capsys.readouterr().err
    fatal = [line for line in told.splitlines() if line.startswith("missing: ")]
    for data in ("cc3m", "cc12m", "recap-5m", "recap-10m", "recap-20m", "recap-30m", "coco/train", "flickr30k/train"):
        assert any(f"{tmp_path}/{data}/00000.tar" in line for line in fatal), data
    for needed in ("probe/imagenet1k/train/0.tar", "probe/vtab-pets/test/0.tar", "aro/vg_relation", "aro/coco_order",
                   "sugar_crepe/add_att", "coco/test/0.tar", "8 GPUs", "laion2b_s13b_b90k", "en_core_web_sm"):
        assert any(needed in line for line in fatal), needed
    for fetch in ("img2dataset --url_list cc3m.tsv", "prepare_recap", "--pairs 30000000", "prepare flickr30k",
                  "hf download clip-benchmark/wds_food101", "visual_genome_relation.json from https",
                  "spacy download en_core_web_sm"):
        assert fetch in told, fetch
    columns = [line for line in told.splitlines() if line.startswith("not there: ")]
    assert [line.split()[2].rstrip(":") for line in columns] == ["Java", "SPICE's", "a"]
    assert not (tmp_path / "out").exists()


def test_preflight_asks_for_no_data_that_is_there_or_not_needed(tmp_path, capsys):
    from experiments import preflight
    (tmp_path / "cc3m").mkdir()
    (tmp_path / "cc3m/00000.tar").touch()
    for split in ("train", "test"):
        (tmp_path / "probe/imagenet1k" / split).mkdir(parents=True)
        (tmp_path / "probe/imagenet1k" / split / "0.tar").touch()
    cells = runner.cells_of(scales.PAPER, ["table5"])
    assert preflight.missing(scales.PAPER, ["table5"], cells, [0], place(tmp_path)) == []
    cells = runner.cells_of(scales.SCENES, ["table5"])
    preflight.check(scales.SCENES, ["table5"], cells, [0], place(tmp_path))  # makes its data itself
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="4 things are missing"):
        preflight.check(scales.FLICKR8K, ["table5"], runner.cells_of(scales.FLICKR8K, ["table5"]), [0],
                        place(tmp_path / "nothing"))


def test_the_layout_of_data_is_described():
    page = (REPO / "docs/reproduce.md").read_text(encoding="utf-8")
    roots = {data.folder for data in scales.PAPER.data.values()}
    roots |= {selection.root for selection in scales.PAPER.selection}
    roots |= {captioning.root for captioning in scales.PAPER.captioning} | {"{data}/probe/imagenet1k"}
    for root in roots:
        assert f"`{root.format(data='DATA')}" in page, root
    assert paper.PROBES == tuple(scales.PAPER.probes)
