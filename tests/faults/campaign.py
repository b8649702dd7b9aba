"""Inject faults, check how the commands react, and write the table in tests/FAULTS.md.

    make faults
    python tests/faults/campaign.py --out tests/FAULTS.md [--only kill disk ...] [--kills 20] [--seed 0]

A case passes if the command ends with a right result, or with one clear line and a status other than 0. Finished parts
are kept in --work, so that the same command continues an interrupted campaign. The exit status is 1 if a case failed.
"""
import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # set before torch reads them, as forked processes must not share threads
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

import disk  # noqa: E402
import kill  # noqa: E402
from world import REPO, World  # noqa: E402

from open_clip_mdc.data.files import new_file, write_json  # noqa: E402
from open_clip_mdc.data.markdown import markdown_table  # noqa: E402

PARTS = kill.PARTS | disk.PARTS
PACKAGES = ("open_clip_torch", "clip_benchmark", "torch", "webdataset", "pyarrow")

INTRODUCTION = """# Faults

    {command}

Seed {seed}. {system}. {versions}. Commits of the parts: {commits}.

A case passes if the command ends with a right result, or with one clear line and a status other than 0. The files in
[tests/faults](faults) say what each part does. The moments of SIGKILL are shares of a measured duration. The commits
are those at which the parts were run. The test suite draws damaged and foreign files (tests/strategies.py), and tries
SIGTERM, mount points, planted links and a run that hangs (tests/tools/test_outputs.py).

"""


def run_part(name: str, world: World) -> dict:
    """The number of cases, failures by case, and the commit."""
    found = {"part": name, "cases": 0, "failures": {}, "commit": commit()}
    for case, problem in PARTS[name](world):
        found["cases"] += 1
        if problem:
            found["failures"][case] = " ".join(problem.split())
        print(f"{name}: {found['cases']} cases: {case}: {problem or 'as it should be'}", flush=True)
    return found


def commit() -> str:
    return subprocess.run(["git", "-C", str(REPO), "describe", "--always", "--dirty"], capture_output=True,
                          text=True).stdout.strip() or "unknown"


def report(parts: list[dict], args: argparse.Namespace, command: str) -> str:
    commits = ", ".join(dict.fromkeys(part["commit"] for part in parts))
    text = INTRODUCTION.format(command=command, seed=args.seed, commits=commits,
                               system=f"Python {platform.python_version()} on {platform.system()}",
                               versions=", ".join(f"{name} {version(name)}" for name in PACKAGES))
    rows = [(part["part"], part["cases"], len(part["failures"])) for part in parts]
    total = ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))
    text += markdown_table(("part", "cases", "failures"), [*rows, total]) + "\n"
    left_out = [name for name in PARTS if name not in {part["part"] for part in parts}]
    text += f"\nNot run: {'; '.join(left_out)}.\n" if left_out else ""
    lines = [f"- {part['part']}, {case}: {problem}" for part in parts for case, problem in part["failures"].items()]
    return text + "\n## Failures\n\n" + "\n".join(lines or ["None."]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="the report, Markdown")
    parser.add_argument("--work", type=Path, default=REPO / "build/faults", help="data and finished parts")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"parts, or how they begin: {', '.join(PARTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20, help="of each command (default: %(default)s)")
    args = parser.parse_args()
    names = [name for name in PARTS if name.startswith(tuple(args.only or [""]))]
    if not names:
        parser.error(f"--only {' '.join(args.only)} is no part: {', '.join(PARTS)}")
    warnings.filterwarnings("ignore")
    args.work = args.work.absolute()
    world, parts = World(args.work, args), []
    (args.work / "parts").mkdir(exist_ok=True)
    counts = {"seed": args.seed, "kills": args.kills}
    for name in names:
        kept = args.work / f"parts/{name}, seed {args.seed}, {args.kills} kills.json"
        if not kept.exists():
            write_json(kept, run_part(name, world))
        parts.append(json.loads(kept.read_text()))
    command = "python tests/faults/campaign.py --out tests/FAULTS.md" + "".join(
        f" --{name} {value}" for name, value in counts.items() if value != parser.get_default(name))
    command += f" --only {shlex.join(args.only)}" if args.only else ""
    with new_file(args.out) as partial:
        partial.write_text(report(parts, args, command), encoding="utf-8")
    failures = sum(len(part["failures"]) for part in parts)
    print(f"{sum(part['cases'] for part in parts)} cases, {failures} failures: {args.out}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
