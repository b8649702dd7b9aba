"""Run Python commands in forks of a process that has imported OpenCLIP, as the import takes 5 s."""
import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

PRELOADED = ["open_clip_train.main", "open_clip_mdc.train", "open_clip_mdc.integration.check_flags",
             "clip_benchmark_ext.cli", "clip_benchmark.cli"]


def child(argv: list[str], cwd: str, env: dict[str, str], folder: Path) -> None:
    """Return `python -m MODULE ...` or `python -c CODE ...` in a fork, with its output in files."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    multiprocessing.set_start_method(None, force=True)  # the system's again
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    option, program, *rest = argv
    sys.argv = ["-c", *rest]
    try:
        if option == "-c":
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def forked(argv: list[str], timeout: float, env: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a command of `child` and return the result as subprocess.run does.

    Raises:
        subprocess.TimeoutExpired: the command ran too long and was killed.
    """
    context = multiprocessing.get_context("forkserver")  # of a clean process, not of the one that runs tests
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=child, args=(argv, os.getcwd(), env, Path(folder)))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(argv, timeout)
        said = [(Path(folder) / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(argv, process.exitcode, *said)
