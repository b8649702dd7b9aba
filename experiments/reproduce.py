"""Run one claim from nothing and compare it with the archive: make reproduce CLAIM=scenes.bert15

    python -m experiments.reproduce scenes.bert15 --out build/reproduce/scenes.bert15 [--data DATA] [--dry-run]

Makes the data, trains the claim's rows with the archived seeds and evaluates them. It then says which results are equal
to the archived ones to the digit, on which machines both were trained, and what difference each finds. If it is
interrupted, run the same command again to resume. The ids are in experiments/results/claims.csv.
"""
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from . import commands, preflight
from .commands import Place
from .problems import in_one_line, make_parser
from .progress import Step
from .report import archive, claims, contexts
from .report.collect import WITH_CLAIMS
from .report.publish import FOLDER
from .report.results import Results, read_results, values
from .report.sides import Measured
from .run import add_flags, do, plan
from .tables.cells import Cell
from .tables.paper_tables import tables_of
from .tables.scales import SCALES, Scale


class Task(NamedTuple):
    scale: Scale
    claim: claims.Claim
    file: Path  # the archive that has its results

    @property
    def cells(self) -> list[Cell]:
        return list(dict.fromkeys([*self.claim.left, *self.claim.right]))

    @property
    def tables(self) -> list[str]:
        """Names of the tables to run: the first that has all of the claim's cells, else all that have any."""
        found = {name: set(self.cells) & set(cells) for name, cells in tables_of(self.scale).items()}
        whole = [name for name, cells in found.items() if len(cells) == len(self.cells)]
        return whole[:1] or [name for name, cells in found.items() if cells]


def find(name: str, folder: Path = FOLDER / "results") -> Task:
    """Return the task for an id such as scenes.bert15. Raises ValueError if there is no such claim or no archive."""
    scale, _, short = name.partition(".")
    if scale not in SCALES:
        raise ValueError(f"{name} is no claim: give SCALE.ID of experiments/results/claims.csv")
    for claim in (claim for ledger in WITH_CLAIMS for claim in claims.claims_of(ledger, SCALES[scale])):
        if claim.id == short:
            if not claim.left or not claim.right:
                raise ValueError(f"{name} needs the paper's scale: {claim.needs}")
            part = "" if claim.ledger in (scale, "claims", "compared", "between") else f".{claim.ledger}"
            file = folder / f"{scale}{part}.tar.xz"
            if not file.exists():
                raise ValueError(f"{name} has no archived results: {file} does not exist")
            return Task(SCALES[scale], claim, file)
    raise ValueError(f"{scale} has no claim {short}: see experiments/results/claims.csv")


def difference(results: Results, task: Task, seeds: list[int]) -> str:
    results = {key: {seed: one for seed, one in by_seed.items() if seed in seeds} for key, by_seed in results.items()}
    of = contexts if task.claim.ledger in contexts.LEDGERS else claims
    finding = of.give_verdicts([task.claim], Measured(results, task.scale))[0].finding
    return "not run" if finding.difference is None else f"{finding.difference:+.4f}" + (
        f" ({claims.interval(finding)})" if finding.interval else "")


def reproduce(task: Task, place: Place, seeds: list[int] | None, run: Callable[[str, list[Step]], None]) -> str:
    """Run everything that a claim needs, and return a comparison with the archive."""
    with TemporaryDirectory() as folder:
        kept = Path(folder, "kept")
        archive.unpack(task.file, kept)
        results = read_results(kept)
        known = set.intersection(*(set(values(results, task.scale, cell)) for cell in task.cells))
        seeds = sorted(known) if seeds is None else seeds
        if not known.issuperset(seeds):
            raise ValueError(f"{task.file} has seeds {', '.join(map(str, sorted(known)))} of this claim")
        for title, steps in plan(task.scale, task.tables, seeds, place, task.cells):
            run(title, steps)
        if not (place.out / "results").exists():
            return ""
        before, after = (environments(task, seeds, out) for out in (kept, place.out))
        return "\n".join([archive.compare(task.file, place.out), f"archived on {before}", f"now on {after}",
                          f"{task.claim.sentence}: archived {difference(results, task, seeds)}, "
                          f"now {difference(read_results(place.out), task, seeds)}"])


def environments(task: Task, seeds: list[int], out: Path) -> str:
    place = Place(Path(), out, "", 0)
    files = {commands.folder(cell.run, seed, place) / "environment.txt" for cell in task.cells for seed in seeds}
    found = {line for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines()}
    return "; ".join(sorted(found)) or "an unknown machine"


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("claim", help="SCALE.ID of experiments/results/claims.csv")
    parser.add_argument("--out", type=Path, help="folder of runs and results (default: build/reproduce/CLAIM)")
    add_flags(parser)
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds to run (default: all that are archived)")
    args = parser.parse_args(argv)
    task = find(args.claim)
    place = Place(args.data, args.out or Path("build/reproduce") / args.claim, args.bin, 0)
    if not args.dry_run:
        preflight.check(task.scale, task.tables, task.cells, args.seeds or list(task.scale.seeds), place)
    jobs = os.cpu_count() or 1  # one thread each, as when archived
    print(reproduce(task, place, args.seeds, partial(do, place=place, jobs=jobs, dry_run=args.dry_run)))


if __name__ == "__main__":
    main()
