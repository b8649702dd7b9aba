"""Claims about run.py: a pipeline in miniature, resumed after a kill."""
import os
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import REPO, read_json, run, times, wait_for

from experiments.progress import Step, main, run_steps

TINY = """
import sys
sys.path.insert(0, {experiments!r})
from experiments import run
from experiments.tables import paper_tables as tables, scales
from experiments.tables.scales import Data, SCENES
scales.SCALES["scenes"] = SCENES._replace(
    data={{key: data._replace(folder="{{data}}/train", samples=96) for key, data in SCENES.data.items()}},
    probe_root="{{data}}/probe", prepare=(), warmup=1)
tables.TABLES["table5"] = lambda scale: list(tables.table5(scale))[2:]
run.main(sys.argv[1:])
"""


def test_two_rows_go_from_nothing_to_the_table_and_a_kill_between_them_costs_no_finished_run(scenes, tmp_path):
    command = [sys.executable, "-c", TINY.format(experiments=str(REPO)), "--scale", "scenes",
               "--tables", "table5", "--data", scenes, "--out", tmp_path, "--seeds", "0", "--jobs", "1",
               "--bin", f"{Path(sys.executable).parent}/"]
    runs = [tmp_path / f"runs/MDC-ViT-Ti-8{t}--short--s0" for t in ("-t0.4-0.9", "")]
    first, second = (run / "checkpoints/epoch_1.pt" for run in runs)
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: (runs[1] / "command.txt").exists() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert first.exists() and not second.exists()
    made = times([first])

    result = run(*command)
    assert second.exists() and times(made) == made
    rows = dict(line.split("|")[1:3] for line in result.stdout.splitlines() if line.startswith("| ["))
    assert len(rows) == 2 and all(0 < float(cell.strip(" *").split()[0].strip("*")) <= 100 for cell in rows.values())
    assert len(list((tmp_path / "results").glob("*/*.json"))) == 2

    for path in (tmp_path / "results").glob("*/*.json"):
        items = read_json(path.parent / "items" / path.name)["values"]["lp_acc1"]
        assert sum(items) / len(items) == read_json(path)["metrics"]["lp_acc1"]
    made = times([first, second, *(tmp_path / "results").rglob("*.json")])
    assert run(*command).stdout == result.stdout
    assert times(made) == made, "a finished run or a result was made again"


def test_a_step_that_fails_says_where_its_log_is(tmp_path):
    step = Step("broken", [sys.executable, "-c", "raise SystemExit('no such data')"])
    with pytest.raises(ChildProcessError, match=r"broken failed \(exit status 1\), see .*broken.log: no such data"):
        run_steps("training", [step], tmp_path / "logs", 1)


def progress(logs: Path, **steps: list[str]) -> subprocess.Popen:
    """Start steps by name, each a program of Python and its arguments."""
    commands = (shlex.join([f"{name}={sys.executable}", "-c", *step]) for name, step in steps.items())
    return subprocess.Popen([sys.executable, "-m", "experiments.progress", "--logs", logs, *commands],
                            stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_the_terminal_shows_how_far_trainings_are_and_not_what_they_say(tmp_path, monkeypatch):
    """Two trainings run in parallel. Each continues when the bar has shown its progress, also while there is none."""
    says = ("import sys, time, pathlib; print('2026 | INFO | Train Epoch: 1 [ 640/1280 (50%)] Loss: 9', "
            "file=sys.stderr, flush=True)\nend = time.monotonic() + 60\n"
            "while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < end: time.sleep(0.01)")
    go = tmp_path / "go"
    monkeypatch.setenv("PROGRESS_SECONDS", "0")
    process = progress(tmp_path / "logs", mdc=[says, str(go), "--epochs", "2"], arc=[says, str(go), "--epochs", "4"])
    shown = ""
    while shown.count("mdc 75%, arc 38%") < 3:
        letter = process.stderr.read(1)
        assert letter, f"ended without showing its progress: {shown}"
        shown += letter
    go.touch()
    shown += process.stderr.read()
    assert process.wait() == 0 and "Epoch" not in shown and "100 %" in shown and f"{tmp_path}/logs/" in shown
    assert "Train Epoch: 1" in (tmp_path / "logs/arc.log").read_text()


def test_what_a_killed_call_left_running_is_waited_for(tmp_path):
    """Two writers in one run's folder would be the end of it."""
    begun, end = tmp_path / "begun", tmp_path / "end"
    waits = (f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); end = pathlib.Path({str(end)!r})\n"
             "while not end.exists(): time.sleep(0.01)\n"
             "print('a')")
    first = progress(tmp_path, a=[waits])
    wait_for(begun.exists)  # a.out is there before the step is
    first.kill()
    first.wait()
    second = progress(tmp_path, b=["print('b')"])
    try:
        shown = second.stderr.readline()
        assert not (tmp_path / "b.out").exists()
    finally:
        end.touch()
    shown += second.communicate()[1]
    assert second.returncode == 0 and "waiting for the steps of another call" in shown
    assert (tmp_path / "a.out").read_text() == "a\n" and (tmp_path / "b.out").read_text() == "b\n"
    assert (tmp_path / "a.out").stat().st_mtime_ns < (tmp_path / "b.out").stat().st_mtime_ns


def test_a_call_that_is_terminated_while_it_waits_behind_a_failed_step_leaves_nothing_running(tmp_path):
    begun, failed = tmp_path / "pid", tmp_path / "logs/a.out"
    waits = f"import os, pathlib, time; pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); time.sleep(1800)"
    fails = f"import pathlib, sys, time\nwhile not pathlib.Path({str(begun)!r}).exists(): time.sleep(0.01)\nsys.exit(3)"
    call = progress(tmp_path / "logs", a=[fails], b=[waits])
    wait_for(lambda: begun.exists() and begun.read_text())
    time.sleep(4)  # the bar looks every two seconds: it has seen that the first one failed
    call.terminate()
    assert call.wait(1200) == 128 + signal.SIGTERM and failed.exists()
    other = Path("/proc", begun.read_text())
    wait_for(lambda: not other.exists())


def test_a_step_has_as_many_threads_when_it_is_the_last_one_left(tmp_path, monkeypatch):
    """A resumed experiment gives the weights of an unbroken one: sums depend on the number of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    says = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    for left in (1, 3):
        run_steps("training", [Step(f"of{left}-{i}", says) for i in range(left)], tmp_path, 2)
    assert {path.read_text() for path in tmp_path.glob("*.out")} == {"4\n"}


def test_what_is_no_command_is_refused_before_another_one_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["progress", "--logs", str(tmp_path / "logs"), "a=true", "b"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "LABEL=COMMAND" in capsys.readouterr().err and not (tmp_path / "logs").exists()


def test_a_training_says_in_what_it_was_trained_and_resumed(tmp_path, monkeypatch):
    """Last digits depend on it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    step = Step("a", [sys.executable, "-c", "", "--device", "cpu"], "the recipe\n", tmp_path / "run")
    for jobs in (2, 2, 1):
        run_steps("training", [step], tmp_path / "logs", jobs)
    one, two = (tmp_path / "run/environment.txt").read_text().splitlines()
    assert f", 1 thread, torch {version('torch')}, open_clip_torch 3.3.0, timm " in one
    assert two == one.replace("1 thread", "2 threads")
    assert (tmp_path / "run/command.txt").read_text() == "the recipe\n"
    run_steps("training", [step._replace(command=step.command[:3], folder=tmp_path / "gpu")], tmp_path / "logs", 1)
    assert [path.name for path in (tmp_path / "gpu").iterdir()] == ["command.txt"]