"""Train the missing runs of a table, evaluate them, and collect the numbers.

    make table5 SCALE=scenes                     # or: python -m experiments.run --tables table5 --scale scenes
    make -n table1 SCALE=paper DATA=/data        # only prints the commands

It begins with a list of everything that is missing on the machine (preflight.py). You can stop it and run the same
command again: finished runs and results are kept, and half-trained runs continue from their last epoch. A run with all
of its results needs no checkpoint. If a run was trained by another command than today's, it is named and nothing is
done.
"""
import os
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from . import commands, preflight
from .commands import Place
from .problems import in_one_line, make_parser
from .progress import Step, alone, run_steps
from .report.collect import TITLES, cells_by_table, collect, show
from .report.results import parts, read_results
from .tables import photos
from .tables.cells import Cell, Run, Trained
from .tables.scales import Scale, named


def cells_of(scale: Scale, names: list[str]) -> list[Cell]:
    if scale.tables and (others := [name for name in names if name not in scale.tables]):
        raise ValueError(f"{others[0]} is no table of {scale.name}, which has {', '.join(scale.tables)}")
    # Figure 6 shows the captions of Table 3. Verdicts (`claims` and so on) are on the results that exist already.
    tables = cells_by_table(scale, ["table3" if name == "figure6" else name for name in names])
    return [cell for cells in tables.values() for cell in cells]


def runs_of(cells: list[Cell]) -> list[list[Run]]:
    """Return two stages of runs: those that others are fine-tuned from come first."""
    runs = dict.fromkeys(cell.run._replace(at=None) for cell in cells)
    tuned = [run for run in runs if isinstance(run.start, Run)]
    return [list(dict.fromkeys([run.start for run in tuned] + [run for run in runs if run not in tuned])), tuned]


def unfinished(scale: Scale, cells: list[Cell], seeds: list[int], place: Place) -> set[Trained]:
    results = read_results(place.out)  # the judge's answers depend on no checkpoint
    return {(cell.run._replace(at=None), seed) for cell in cells if cell.evaluation.task != "judge"
            for found in [parts(results, scale, cell)] for seed in seeds if any(seed not in part for part in found)}


def trainings(scale: Scale, cells: list[Cell], seeds: list[int], needed: set[Trained],
              place: Place) -> Iterator[list[Step]]:
    def trained(run: Run, seed: int) -> bool:
        return commands.checkpoint(scale, run, seed, place).exists()

    first, tuned = ([(run, seed) for seed in seeds for run in stage] for stage in runs_of(cells))
    guides = [helper for cell in cells for _, seed in commands.evaluated(scale, [cell.run], seeds, place, needed)
              for helper in commands.helping(cell.evaluation, [seed])]
    for run, seed in guides:
        (tuned if isinstance(run.start, Run) else first).append((run, seed))
    needed = needed.union(guides)
    needed = needed.union((run.start, seed) for run, seed in tuned if (run, seed) in needed and not trained(run, seed))
    for stage in map(dict.fromkeys, (first, tuned)):
        yield [Step(run.name(seed), commands.train(scale, run, seed, place), commands.recipe(scale, run, seed),
                    commands.folder(run, seed, place)) for run, seed in stage
               if (run, seed) in needed and not trained(run, seed)]


def evaluations(scale: Scale, cells: list[Cell], seeds: list[int], needed: set[Trained],
                place: Place) -> Iterator[Step]:
    # Labels are numbered, as two folders of data may be evaluated with the same flags, and each needs its own log.
    # A CLIP model that guides decoding has the seed of the run that it guides, so seeds are evaluated one by one.
    for number, (evaluation, runs) in enumerate(commands.evaluations(cells), 1):
        for group in [[seed] for seed in seeds] if commands.helping(evaluation, seeds) else [seeds]:
            if models := commands.evaluated(scale, runs, group, place, needed):
                label = f"evaluation-{number}-{commands.variant(evaluation)}" + f"--s{group[0]}" * (group != seeds)
                yield Step(label, commands.evaluate(scale, evaluation, models, place))


def plan(scale: Scale, names: list[str], seeds: list[int], place: Place,
         cells: list[Cell] | None = None) -> Iterator[tuple[str, list[Step]]]:
    """Yield all steps to the results of tables, or of some of their cells: data, training, evaluation."""
    for made in commands.to_make(scale, names, place):  # one by one, as some read what an earlier one wrote
        yield "data", [Step(Path(made.folder).name, commands.start(made.command, place))]
    cells = cells or cells_of(scale, names)
    needed = unfinished(scale, cells, seeds, place)
    for steps in trainings(scale, cells, seeds, needed, place):
        yield "training", steps
    yield "evaluation", list(evaluations(scale, cells, seeds, needed, place))
    if "table3" in names and (url := os.environ.get("JUDGE_URL")):
        yield "judge", [Step(f"judge-{captioning.label}--s{seed}", commands.judge(scale, captioning, seed, place, url))
                        for captioning in scale.captioning for seed in seeds]
    if "photos" in names:
        both = [photos.run_of(scale, objective) for objective in ("ARC", "MDC")]
        found = commands.evaluated(scale, both, seeds[:1], place, needed)
        for run, seed in found * (len(found) == 2):  # a page shows both
            yield "captions to look at", [Step(f"page-{run.model[:3]}", commands.page(scale, run, seed, place))]
    if "figure3" in names:
        yield "caption lengths", [Step("figure3", commands.lengths(scale, place))]


def do(title: str, steps: list[Step], place: Place, jobs: int, dry_run: bool) -> None:
    """Run the steps of an experiment, or print their commands."""
    if dry_run:
        for step in steps:
            print(shlex.join(step.command))
    elif steps:
        for folder in ("tables", "results/judge"):
            (place.out / folder).mkdir(parents=True, exist_ok=True)
        run_steps(title, steps, place.out / "logs", jobs)


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path("data"),
                        help="folder of the data that you provide (default: data)")
    parser.add_argument("--bin", default="", help="folder of open_clip_train and its siblings, with a slash at the end")
    parser.add_argument("--dry-run", action="store_true", help="print the commands that would run")


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tables", nargs="+", required=True, choices=TITLES)
    parser.add_argument("--scale", required=True, type=named)
    add_flags(parser)
    parser.add_argument("--out", type=Path, help="folder of runs, results and tables (default: build/SCALE)")
    parser.add_argument("--gpus", type=int, help="number of GPUs, or 0 for the CPU (default: the scale's)")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds to train and evaluate (default: the scale's)")
    parser.add_argument("--jobs", type=int, help="steps at a time (default: one per core on the CPU, else 1)")
    args = parser.parse_args(argv)
    scale = args.scale
    gpus = scale.gpus if args.gpus is None else args.gpus
    place = Place(args.data, args.out or Path("build") / scale.name, args.bin, gpus)
    jobs = args.jobs or ((os.cpu_count() or 1) if place.gpus == 0 else 1)
    seeds = args.seeds or list(scale.seeds)
    cells = cells_of(scale, args.tables)
    commands.check_recipes(scale, [run for stage in runs_of(cells) for run in stage], seeds, place)
    for clip, seed in {helper for cell in cells for helper in commands.helping(cell.evaluation, seeds)}:
        commands.check_recipes(scale, [clip], [seed], place)
    if not args.dry_run:
        preflight.check(scale, args.tables, cells, seeds, place)
        with alone(place.out / "logs"):
            pass  # waits for a call that runs there, so that its steps are not planned again
    for title, steps in plan(scale, args.tables, seeds, place):
        do(title, steps, place, jobs, args.dry_run)
    print(shlex.join(commands.collect(scale, args.tables, place)) if args.dry_run else
          show(collect(scale, place, args.tables)))


if __name__ == "__main__":
    main()
