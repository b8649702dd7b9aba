"""Inject faults, check how the commands react, and write the table in tests/FAULTS.md.

    make faults
    python tests/faults/campaign.py --out tests/FAULTS.md [--only kill disk ...] [--kills 20] [--seed 0]

A case passes if the command ends with a right result, or with one clear line and a status other than 0. In both cases
no number may be wrong, nothing may be written outside the target, and JSON has to be valid. Finished parts are kept in
--work, so that the same command continues an interrupted campaign. The exit status is 1 if a case failed.
"""
import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # set before torch reads them, as forked processes must not share threads
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

import disk  # noqa: E402
import kill  # noqa: E402
import places  # noqa: E402
from world import REPO, SKIPPED, World  # noqa: E402

from open_clip_mdc.data.files import new_file, write_json  # noqa: E402
from open_clip_mdc.data.markdown import markdown_table  # noqa: E402

PARTS = kill.PARTS | disk.PARTS | places.PARTS
MAX_SHOWN = 20  # failures of a part in the report
PACKAGES = ("open_clip_torch", "clip_benchmark", "torch", "webdataset", "pyarrow")

INTRODUCTION = """# Faults

    {command}

Seed {seed}. {system}. {versions}. Commits of the parts: {commits}.

A case passes if the command ends with a right result, or with one clear line and a status other than 0. In both cases
no number may be wrong, nothing may be written outside the target, and JSON has to be valid. The files in
[tests/faults](faults) say what each part does. The moments of SIGKILL are shares of a measured duration. The commits
are those at which the parts were run. Damaged and foreign files are drawn in the test suite (tests/strategies.py).

"""


def run_part(name: str, world: World) -> dict:
    """Counts, failures and what was skipped, by case."""
    found = {"part": name, "cases": 0, "failures": {}, "skipped": {}, "seconds": 0.0}
    begun = last = time.monotonic()
    for case, problem in PARTS[name](world):
        if problem and problem.startswith(SKIPPED):
            found["skipped"][case] = problem.removeprefix(SKIPPED)
            continue
        found["cases"] += 1
        if problem:
            found["failures"][case] = " ".join(problem.split())
            print(f"{name}: {case}: {problem}", flush=True)
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{name}: {found['cases']} cases, {len(found['failures'])} failures", flush=True)
    found["seconds"] = round(time.monotonic() - begun)
    print(f"{name}: {found['cases']} cases, {len(found['failures'])} failures, {found['seconds']} s", flush=True)
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
    text += markdown_table(("part", "cases", "failures"), [*rows, ("all", *(sum(row[i] for row in rows)
                                                                            for i in (1, 2)))]) + "\n"
    left_out = [name for name in PARTS if name not in {part["part"] for part in parts}]
    text += f"\nNot run: {'; '.join(left_out)}.\n" if left_out else ""
    for title, kind in (("Failures", "failures"), ("Skipped", "skipped")):
        lines = []
        for part in parts:
            shown = list(part[kind].items())
            lines += [f"- {part['part']}, {case}: {problem}" for case, problem in shown[:MAX_SHOWN]]
            lines += [f"- {part['part']}: ... and {len(shown) - MAX_SHOWN} more"] * (len(shown) > MAX_SHOWN)
        text += f"\n## {title}\n\n" + "\n".join(lines or ["None."]) + "\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="the report, Markdown")
    parser.add_argument("--work", type=Path, default=REPO / "build" / "faults", help="data and finished parts")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"parts, or how they begin: {', '.join(PARTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20, help="of each command (default: %(default)s)")
    args = parser.parse_args()
    beginnings = tuple(name for name in args.only or [""] if name not in PARTS)
    names = [name for name in PARTS if name.startswith(beginnings) or name in (args.only or ())]
    if not names:
        parser.error(f"--only {' '.join(args.only)} is no part: {', '.join(PARTS)}")
    warnings.filterwarnings("ignore")
    args.work = args.work.absolute()
    world, parts = World(args.work, args), []
    counts = {"seed": args.seed, "kills": args.kills}
    for name in names:
        key = hashlib.sha256(json.dumps([name, counts]).encode()).hexdigest()[:16]
        kept = args.work / "parts" / f"{key}.json"
        kept.parent.mkdir(exist_ok=True)
        if not kept.exists():
            write_json(kept, run_part(name, world) | {"commit": commit()})
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
