"""Claims about archive.py: archives give tables without a model, can be continued, and compare runs."""
import shutil
import tarfile
from pathlib import Path

import pytest
from helpers import leave_recipe, place, write_items, write_result

from experiments import commands
from experiments import run as runner
from experiments.report import archive, collect
from experiments.tables import scales
from experiments.tables.cells import Run

MODELS = ("MDC-ViT-Ti-8", "MDC-ViT-Ti-8-t0.0-1.0", "MDC-ViT-Ti-8-t0.3-0.8", "MDC-ViT-Ti-8-t0.4-0.9")


def experiment(folder: Path, seeds: range) -> None:
    """Probes of Table 5 with items, checkpoints, logs of two steps."""
    for seed in seeds:
        for number, model in enumerate(MODELS):
            run = Run(model, "short")
            right = [(image + seed) % (number + 2) == 0 for image in range(100)]
            path = write_result(folder, "linear_probe", run.name(seed), "wds/probe", lp_acc1=sum(right) / 100)
            write_items(path, [str(i) for i in range(100)], {"lp_acc1": [float(r) for r in right]})
            of_run = leave_recipe(folder, scales.SCENES, run, seed)
            (of_run / "checkpoints").mkdir()
            (of_run / "checkpoints/epoch_1.pt").touch()
            (of_run / "environment.txt").write_text("a processor, 1 thread\n")
            (of_run / "out.log").write_text("".join(
                f"2026 | INFO | Train Epoch: 0 [{i:>2}/99 ({percent}%)] Data (t): 0.1 Caption_loss: {loss} (7.0)\n"
                for i, percent, loss in ((9, 10, 2.0 + number), (50, 51, 1.5 + seed), (99, 100, 1.25))))


def pages(folder: Path) -> dict[str, str]:
    return collect.collect(scales.SCENES, place(folder), ["table5", "stability", "claims"])


def test_an_archive_gives_the_tables_and_the_ledger_again_without_a_checkpoint(tmp_path):
    out, file = tmp_path / "out", tmp_path / "results/scenes.tar.xz"
    experiment(out, range(3))
    shown = pages(out)
    assert "[0.5, 1.0] | **" in shown["table5"] and "3 seeds, sd of 4 rows, 100 images" in shown["claims"]
    archive.pack(out, file)
    packed = file.read_bytes()
    archive.pack(out, file)
    assert file.read_bytes() == packed, "other bytes of the same files"
    archive.unpack(file, tmp_path / "new")
    assert not list((tmp_path / "new").rglob("*.pt")) and pages(tmp_path / "new") == shown
    with pytest.raises(ValueError, match="results exists already"):
        archive.unpack(file, tmp_path / "new")
    with pytest.raises(ValueError, match="holds no results/"):
        archive.pack(tmp_path, file)
    middle = len(packed) // 2
    (tmp_path / "link").symlink_to(__file__)
    strange = []
    for source, member in ((__file__, "a.txt"), (tmp_path / "link", "results/a"), (__file__, "results/../../a.txt")):
        with tarfile.open(file, "w:xz") as tar:
            tar.add(source, member)
        strange.append(file.read_bytes())
    for damaged in (b"nothing", *strange, packed[:middle], packed[:middle] + b"damage" + packed[middle + 6:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not an archive of results"):
            archive.unpack(file, tmp_path / "other")
        assert not (tmp_path / "other").exists()


def test_a_finished_run_needs_no_checkpoint_and_one_that_lacks_a_result_is_trained_again(tmp_path):
    experiment(tmp_path, range(2))
    for made in commands.to_make(scales.SCENES, ["table5"], place(tmp_path)):
        Path(made.folder.format(out=tmp_path)).mkdir(parents=True)
    checkpoints = sorted(tmp_path.glob("runs/*/checkpoints"))

    def plan(seeds: list[int]) -> dict[str, list[str]]:
        """Runs that are trained, and those that are evaluated."""
        found = {"training": [], "evaluation": []}
        for title, steps in runner.plan(scales.SCENES, ["table5"], seeds, place(tmp_path)):
            for step in steps:
                found[title] += [step.label] if title == "training" else [
                    Path(part).parts[-3] for part in step.command if part.endswith(".pt")]
        return {title: sorted(names) for title, names in found.items()}

    names = sorted(f"{model}--short--s{seed}" for model in MODELS for seed in (0, 1))
    assert plan([0, 1]) == {"training": [], "evaluation": names}, "clip_benchmark looks whether results are of today"
    for folder in checkpoints:
        shutil.rmtree(folder)
    assert plan([0, 1]) == {"training": [], "evaluation": []}
    third = sorted(f"{model}--short--s2" for model in MODELS)
    assert plan([0, 1, 2]) == {"training": third, "evaluation": third}
    next(tmp_path.glob("results/linear_probe/*t0.3-0.8--short--s1-1.json")).unlink()
    again = ["MDC-ViT-Ti-8-t0.3-0.8--short--s1"]
    assert plan([0, 1]) == {"training": again, "evaluation": again}


def test_what_a_run_is_made_with_is_trained_again_with_it_and_only_then(tmp_path):
    """Figure 8 has fine-tuned runs, some guided by CLIP. All results exist, and no checkpoint does."""
    scale, there = scales.SCENES, place(tmp_path)
    for made in commands.to_make(scale, ["figure8"], there):
        Path(made.folder.format(out=tmp_path)).mkdir(parents=True, exist_ok=True)
    paths = {}
    for cell in runner.cells_of(scale, ["figure8"]):
        key = commands.variant(cell.evaluation), cell.run.name(0), cell.evaluation.datasets[0]
        paths[key] = write_result(tmp_path, *key, commands.last_epoch(scale, cell.run), phrase_recall=0.5,
                                  exact_match=0.5)

    def trained() -> set[str]:
        return {step.label for title, steps in runner.plan(scale, ["figure8"], [0], there) for step in steps
                if title == "training"}
    assert trained() == set()
    tuned = "ARC-ViT-Ti-8--shots-4-from-fewshot--s0"
    next(path for (_, run, _), path in paths.items() if run == tuned).unlink()
    assert trained() == {tuned, "ARC-ViT-Ti-8--fewshot-e4--s0"}
    helped = "MDC-ViT-Ti-8--shots-4-from-fewshot--s0"
    next(path for (kind, run, _), path in paths.items() if run == helped and "clip_scale" in kind).unlink()
    assert trained() == {tuned, "ARC-ViT-Ti-8--fewshot-e4--s0", helped, "MDC-ViT-Ti-8--fewshot-e4--s0",
                         "ViT-Ti-8--short--s0"}


def test_what_a_second_experiment_does_not_repeat_is_named(tmp_path):
    first, second, file = tmp_path / "first", tmp_path / "second", tmp_path / "first.tar.xz"
    experiment(first, range(2))
    experiment(second, range(1, 3))
    archive.pack(first, file)
    said = f"8 of 8 results in both are equal to the digit (16 in {file}, 16 in {second})"  # a probe and a log each
    assert archive.compare(file, second) == said
    write_result(second, "linear_probe", f"{MODELS[1]}--short--s1", "wds/probe", lp_acc1=0.25)
    assert archive.compare(file, second) == (
        f"linear_probe wds/probe {MODELS[1]}--short/epoch_1 1: lp_acc1 0.33 and 0.25\n" + said.replace("8 of", "7 of"))
    experiment(tmp_path / "third", range(2, 3))
    with pytest.raises(ValueError, match="no result in common"):
        archive.compare(file, tmp_path / "third")
