"""Claims about experiments/: the paper's commands, a pipeline in miniature, the collected tables."""
import csv
import gzip
import hashlib
import io
import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from conftest import REPO, needs_shared_data, shared_data
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image

from open_clip_mdc.data.shards import tar_writer
from open_clip_mdc.integration import register

sys.path.insert(0, str(REPO / "experiments"))
import collect  # noqa: E402
import commands  # noqa: E402
import flickr8k  # noqa: E402
import paper  # noqa: E402
import run as runner  # noqa: E402
import scales  # noqa: E402
from tables import TABLES  # noqa: E402

NAMES = list(collect.TITLES)
PAIRS_SHA256 = "abd1bee79e642a443e0b9239310391eaf34d1b4108a962a9dfb80816794e2da1"  # of the five files, in order


def dry_run(*flags: str) -> list[list[str]]:
    with redirect_stdout(StringIO()) as output:
        runner.main([*flags, "--dry-run"])
    return [shlex.split(line) for line in output.getvalue().splitlines()]


@pytest.fixture(scope="module")
def paper_trainings() -> dict[str, object]:
    """Parsed flags by run name, by upstream's own parser."""
    register()
    from open_clip_train.params import parse_args
    parsed = {}
    for command in dry_run("--scale", "paper", "--data", "/data", "--out", "/out", "--tables", *NAMES):
        if "open_clip_mdc.train" in command:
            assert command[:3] == ["torchrun", "--nproc_per_node", "8"]
            args = parse_args(command[command.index("--") + 1:])
            parsed[args.name] = args
    return parsed


def test_paper_scale_trains_with_the_hyperparameters_of_tables_6_to_8(paper_trainings):
    pretrained = {name: a for name, a in paper_trainings.items() if not a.pretrained}
    assert len(pretrained) == 44
    for name, a in pretrained.items():
        large, base16 = "ViT-L-14" in name, "ViT-B-16" in name
        assert a.opt == "adamw", name
        assert a.lr == (4e-4 if large else 5e-4), name
        assert a.warmup == 10_000, name
        assert a.wd == (0.2 if large or base16 else 0.1), name
        assert (a.beta1, a.beta2) == (0.9, 0.98), name
        assert a.lr_scheduler == "cosine", name
        assert a.epochs == 32, name
        assert a.batch_size * a.accum_freq * 8 == (2048 if "-x2" in name else 1024), name
        assert a.accum_freq == (2 if large else 1), name
        if "-x2" not in name:
            assert a.batch_size == (64 if large else 128), name
        assert a.grad_clip_norm == (1.0 if name.startswith("ARC-ViT-L-14--cc12m") else None), name
        assert a.resume == "latest" and a.dataset_type == "webdataset", name


def test_paper_scale_trains_every_row_once_on_its_data(paper_trainings):
    rows = {name.rpartition("--s")[0] for name in paper_trainings}
    main = {f"{method}{backbone}--{data}" for backbone in ("ViT-B-32", "ViT-B-16", "ViT-L-14")
            for method in ("", "ARC-", "MDC-") for data in ("cc12m", "recap-10m")}
    main |= {f"{backbone}--recap-10m-x2" for backbone in ("ViT-B-32", "ViT-B-16", "ViT-L-14")}
    ablations = {f"MDC-ViT-B-32-unweighted--{data}" for data in ("cc12m", "recap-10m")}
    ablations |= {f"MDC-ViT-B-32{t}--cc3m" for t in ("", "-t0.0-1.0", "-t0.3-0.8", "-t0.4-0.9")}
    ablations |= {f"{model}--{data}" for data in ("cc12m", "recap-10m")
                  for model in ["Parallel-ViT-B-32", *(f"BERT-ViT-B-32-r{r}" for r in scales.RATIOS)]}
    ablations |= {f"MDC-ViT-B-32--recap-{n}m" for n in (5, 10, 20, 30)}
    tuned = {f"{m}-ViT-B-32--{data}-from-cc12m" for m in ("ARC", "MDC") for data in ("coco", "flickr30k")}
    assert rows == main | ablations | tuned
    assert paper_trainings["MDC-ViT-B-32--cc12m--s0"].train_data == "/data/cc12m/{00000..01242}.tar"
    assert paper_trainings["MDC-ViT-B-32--coco-from-cc12m--s0"].pretrained == \
        "/out/runs/MDC-ViT-B-32--cc12m--s0/checkpoints/epoch_32.pt"


def test_every_trained_model_has_a_config():
    register()
    import open_clip
    for scale in scales.SCALES.values():
        for cell in runner.cells_of(scale, list(TABLES)):
            assert open_clip.get_model_config(cell.run.model) is not None, cell.run.model


def test_make_dry_run_prints_the_commands_and_runs_nothing(tmp_path):
    result = subprocess.run(["make", "-n", "table1", "SCALE=paper", "DATA=/data", "GPUS=4", "SEEDS=0 1"], cwd=REPO,
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "open_clip_mdc.train" in line]
    assert len(lines) == 2 * 21 and all("--nproc_per_node 4" in line for line in lines)
    assert sum("--batch-size 256" in line for line in lines) == 2 * (12 + 1)
    assert not (REPO / "build" / "paper").exists()


def test_the_papers_numbers_stand_beside_the_row_they_belong_to():
    cells = {(c.row, c.column): c.paper for c in TABLES["table1"](scales.PAPER)}
    assert cells["Recap-10M, ViT-B-16, MDC", "CIFAR-100"] == 81.6
    assert cells["CC12M, ViT-L-14, CLIP", "ImageNet"] == 70.1
    assert {(c.row, c.column): c.paper for c in TABLES["table3"](scales.PAPER)}["Flickr30k, MDC-20", "CIDEr"] == 20.6
    assert {c.row: c.paper for c in TABLES["table5"](scales.SCENES)} == paper.TABLE5


# ---- collect.py


def place(folder: Path) -> commands.Place:
    return commands.Place(folder, folder, "", 0)


def write_result(folder: Path, kind: str, name: str, dataset: str, **metrics) -> None:
    path = folder / kind / f"{dataset.replace('/', '_')}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"dataset": dataset, "model": "m", "task": "t", "metrics": metrics,
                                "pretrained": f"out/runs/{name}/checkpoints/epoch_1.pt"}))


def test_hand_written_results_give_the_hand_computed_table(tmp_path):
    results = tmp_path / "results"
    for seed, (wide, narrow) in enumerate(((0.50, 0.60), (0.54, 0.62), (0.55, 0.70))):
        write_result(results, "linear_probe", f"MDC-ViT-Ti-8-t0.0-1.0--short--s{seed}", "wds/probe", lp_acc1=wide)
        write_result(results, "linear_probe", f"MDC-ViT-Ti-8--short--s{seed}", "wds/probe", lp_acc1=narrow)
    write_result(results, "linear_probe", "MDC-ViT-Ti-8-t0.4-0.9--short--s0", "wds/probe", lp_acc1=0.58)
    pages = collect.collect(scales.SCENES, place(tmp_path), ["table5"])
    page = pages["table5"]
    # 50, 54, 55: mean 53, squares 9 + 1 + 4 = 14, variance 7; 60, 62, 70: mean 64, squares 16 + 4 + 36, variance 28
    assert f"| [0.0, 1.0] | 53.0 ± {math.sqrt(7):.1f} [29.3] |" in page
    assert "| [0.3, 0.8] | missing [36.1] |" in page
    assert "| [0.4, 0.9] | 58.0 [38.6] |" in page
    assert f"| [0.5, 1.0] | **64.0 ± {math.sqrt(28):.1f}** [39.2] |" in page
    assert "Seeds: 1 to 3" in page and page == (tmp_path / "tables" / "table5.md").read_text()
    rows = {row["row"]: row for row in csv.DictReader((tmp_path / "tables" / "table5.csv").open())}
    assert float(rows["[0.0, 1.0]"]["mean"]) == pytest.approx(53) and rows["[0.0, 1.0]"]["seeds"] == "3"
    assert float(rows["[0.5, 1.0]"]["std"]) == pytest.approx(math.sqrt(28)) and rows["[0.3, 0.8]"]["mean"] == ""


def test_tables_are_renewed_where_a_page_has_their_place(tmp_path):
    page = tmp_path / "RESULTS.md"
    page.write_text("before\n<!-- scenes table5 -->\nold\n<!-- end -->\nafter\n<!-- scenes table4 -->\n<!-- end -->\n")
    collect.insert({"table5": "| new |\n"}, "scenes", page)
    assert page.read_text() == ("before\n<!-- scenes table5 -->\n| new |\n<!-- end -->\nafter\n"
                                "<!-- scenes table4 -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="no <!-- paper table5 -->"):
        collect.insert({"table5": "| new |\n"}, "paper", page)


def test_a_mean_over_subsets_needs_all_of_them_from_the_same_seed(tmp_path):
    name, kind = "MDC-ViT-B-32--cc12m--s{}", "image_caption_selection"
    for seed, (att, obj) in enumerate(((0.7, 0.5), (0.9, None))):
        write_result(tmp_path / "results", kind, name.format(seed), "sugar_crepe/swap_att", text_acc=att)
        if obj is not None:
            write_result(tmp_path / "results", kind, name.format(seed), "sugar_crepe/swap_obj", text_acc=obj)
    cells = [c for c in TABLES["table2"](scales.PAPER)
             if (c.row, c.column) == ("MDC (heuristic)", "SugarCrepe swap")]
    summary = collect.summarise(collect.read_results(tmp_path / "results"), cells[0])
    assert summary.mean == pytest.approx(60) and summary.seeds == 1 and summary.std is None


def test_a_file_that_is_no_result_is_named(tmp_path):
    (tmp_path / "results" / "linear_probe").mkdir(parents=True)
    (tmp_path / "results" / "linear_probe" / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="x.json is no result"):
        collect.collect(scales.SCENES, place(tmp_path), ["table5"])


# ---- the pipeline, in miniature

TINY = """
import sys
sys.path.insert(0, {experiments!r})
import run, scales
from scales import Data, SCENES
scales.SCALES["scenes"] = SCENES._replace(
    data={{key: data._replace(folder="{{data}}/train", samples=96) for key, data in SCENES.data.items()}},
    probe_root="{{data}}/probe", prepare=(), warmup=1)
run.TABLES["table5"] = lambda scale: list(table5(scale))[2:]
import tables, collect
table5 = tables.table5
collect.TABLES = run.TABLES
run.main(sys.argv[1:])
"""


def test_two_rows_go_from_nothing_to_the_table_and_a_kill_between_them_costs_no_finished_run(scenes, tmp_path):
    command = [sys.executable, "-c", TINY.format(experiments=str(REPO / "experiments")), "--scale", "scenes",
               "--tables", "table5", "--data", str(scenes), "--out", str(tmp_path), "--seeds", "0", "--jobs", "1",
               "--bin", f"{Path(sys.executable).parent}/"]
    runs = [tmp_path / "runs" / f"MDC-ViT-Ti-8{t}--short--s0" for t in ("-t0.4-0.9", "")]
    first, second = (run / "checkpoints" / "epoch_1.pt" for run in runs)
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not runs[1].exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert first.exists() and not second.exists()
    made = first.stat().st_mtime_ns

    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert second.exists() and first.stat().st_mtime_ns == made
    rows = dict(line.split("|")[1:3] for line in result.stdout.splitlines() if line.startswith("| ["))
    assert len(rows) == 2 and all(0 < float(cell.strip(" *").split()[0].strip("*")) <= 100 for cell in rows.values())
    assert len(list((tmp_path / "results").rglob("*.json"))) == 2

    again = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0 and again.stdout == result.stdout and second.stat().st_mtime_ns < time.time_ns()


def test_steps_that_run_side_by_side_neither_wait_for_one_another_nor_share_a_log(tmp_path):
    stages = list(runner.plan(scales.SCENES, NAMES, [0, 1], place(tmp_path)))
    assert [[step.label for step in steps] for title, steps in stages if title == "data"] == [["scenes"], ["captions"]]
    for scale in (scales.SCENES, scales.PAPER):
        for _, steps in runner.plan(scale, NAMES, [0, 1], place(tmp_path)):
            assert len({step.label for step in steps}) == len(steps)
            made = {step.command[step.command.index("--name") + 1] for step in steps if "--name" in step.command}
            assert not made & {Path(flag).parts[-3] for step in steps for flag in step.command if flag.endswith(".pt")}


def test_a_step_that_fails_says_where_its_log_is(tmp_path):
    step = runner.Step("broken", [sys.executable, "-c", "raise SystemExit('no such data')"])
    with pytest.raises(RuntimeError, match=r"broken failed \(exit status 1\), see .*broken.log: no such data"):
        runner.run_stage("training", [step], place(tmp_path), 1)


# ---- flickr8k.py


def test_captions_are_made_false_by_rule():
    made = flickr8k.negatives("a man in a red shirt jumps over a dog near a blue car .", "a man and a dog",
                              random.Random(0))
    assert made["swap_obj"] == "a shirt in a red man jumps over a dog near a blue car ."
    assert "swap_att" not in made  # "near" stands between the colours: such captions may stay true
    assert made["replace_rel"] == "a man in a red shirt jumps under a dog near a blue car ."
    words = "a man in a red shirt jumps over a dog near a blue car .".split()
    for kind, vocabulary in (("replace_obj", flickr8k.NOUNS), ("replace_att", flickr8k.COLOURS)):
        changed = [(a, b) for a, b in zip(words, made[kind].split(), strict=True) if a != b]
        assert len(changed) == 1 and set(changed[0]) <= set(vocabulary) and changed[0][1] not in ("man", "dog")
    assert flickr8k.swap("a black dog by a white one", flickr8k.COLOURS) == "a white dog by a black one"
    assert flickr8k.swap("a black and white dog", flickr8k.COLOURS) is None
    assert flickr8k.negatives("two people talk", "", random.Random(0)) == {}


def test_pairs_of_rendered_pictures_are_sugar_crepe_files(tmp_path):
    from clip_benchmark_ext.datasets import build_dataset
    texts = ["a black dog runs over a white car", "a girl behind a red table", "nothing of note"]
    with tar_writer(tmp_path / "0.tar") as tar:
        for i, text in enumerate(texts):
            picture = io.BytesIO()
            Image.new("RGB", (8, 8), (80 * i, 0, 0)).save(picture, "JPEG")
            tar.write({"__key__": f"../{i}", "jpg": picture.getvalue(), "json": json.dumps({"captions": [text] * 5})})
    flickr8k.write_pairs([str(tmp_path / "0.tar")], tmp_path / "pairs")
    dataset = build_dataset("sugar_crepe/swap_att", tmp_path / "pairs")
    assert [case.captions for case in dataset.cases] == [
        ("a black dog runs over a white car", "a white dog runs over a black car")]
    assert dataset[0][0].getpixel((0, 0)) == (0, 0, 0)
    assert sorted(path.name for path in (tmp_path / "pairs" / "val2017").iterdir()) == [
        "000000000000.jpg", "000000000001.jpg"]
    assert {path.name for path in tmp_path.iterdir()} == {"0.tar", "pairs"}


@needs_shared_data
def test_the_pairs_of_flickr8k_are_the_ones_that_results_were_measured_on(tmp_path):
    flickr8k.write_pairs([str(shared_data() / "flickr8k" / "test" / "00000.tar")], tmp_path / "pairs")
    content = b"".join(path.read_bytes() for path in sorted((tmp_path / "pairs").glob("*.json")))
    assert hashlib.sha256(content).hexdigest() == PAIRS_SHA256


@needs_shared_data
def test_the_committed_vocabulary_is_the_one_this_code_makes(tmp_path):
    flickr8k.write_bpe(sorted(map(str, (shared_data() / "flickr8k" / "train").glob("*.tar"))), tmp_path / "bpe.gz")
    committed = (REPO / "model_configs" / "flickr8k_bpe.txt.gz").read_bytes()
    assert gzip.decompress((tmp_path / "bpe.gz").read_bytes()) == gzip.decompress(committed)
    assert SimpleTokenizer(bpe_path=str(tmp_path / "bpe.gz")).vocab_size == 4508
