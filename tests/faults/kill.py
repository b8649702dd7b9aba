"""SIGKILL at random moments: if the command is run again, it ends with the result of an undisturbed run.

A case is a command that is killed at moments drawn uniformly over the duration of the undisturbed run. It is started
again, killed again, and at last left to finish. Only the process itself is killed, not those that it started.
"""
import time

import process
from jobs import JOBS, finish, first, result, unlike, words
from world import Cases, World

KILLS_OF_A_LIFE = 5  # at most


def kills(world: World, name: str) -> Cases:
    """Kill a job as often as World says. Each kill is a case, and all kills of a life share its final problem."""
    job, rng, killed, lives = JOBS[name], world.rng(f"kill/{name}"), 0, 0
    whole, begun = world.fresh(f"kill-{name}/whole"), time.monotonic()
    ended = finish(world, job, whole)
    duration, expected = time.monotonic() - begun, result(whole)
    if problem := first(ended.problem(0), None if expected else "it wrote nothing"):
        yield "undisturbed", problem
        return
    while killed < world.args.kills:
        lives += 1
        folder, moments, started = world.fresh(f"kill-{name}/life-{lives}"), [], []
        while killed < world.args.kills and len(moments) < KILLS_OF_A_LIFE:
            moment = rng.uniform(0, duration)
            ended = process.run(job.main, *words(world, job), cwd=folder, moment=moment)
            started.append(ended.pid)
            if ended.code != -9:
                break
            moments.append(moment)
            killed += 1
        if ended.code == -9:
            ended = finish(world, job, folder)
        for pid in started:
            process.end(pid)
        # It may have been killed when all was done: `prepare` then refuses in one line to do it again.
        problem = first(ended.problem(), unlike(result(folder), expected))
        for moment in moments:
            yield f"killed after {moment:.2f} s of {duration:.2f}, life {lives}", problem
        if not moments and problem:
            yield f"not killed, life {lives}", problem


PARTS = {f"kill {name}": (lambda world, name=name: kills(world, name)) for name in JOBS}
