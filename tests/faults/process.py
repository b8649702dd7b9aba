"""Run commands by their real `main`, each in a fork of a process that has loaded PyTorch.

A fork costs milliseconds where a console script costs ten seconds of imports.
"""
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 1200  # seconds, to end a command that hangs, even on a busy machine


class Outcome(NamedTuple):
    code: int | None  # exit status, negative of a signal, None of a time-out
    err: str
    pid: int  # of the session's leader

    def problem(self, wanted: int | None = None) -> str | None:
        """Return the problem if the command ended with neither a result nor one clear line, else None.

        Args:
            wanted: the only exit status that is right.
        """
        lines = [line.split("\r")[-1].strip() for line in self.err.splitlines()]  # progress bars are no messages
        last = next((line for line in reversed(lines) if line), "")[:300]
        if self.code is None:
            return f"hangs, ended after {TIMEOUT} s; last line: {last}"
        if self.code < 0:
            return f"died of signal {-self.code}"
        if self.code and "Traceback (most recent call last)" in self.err:
            return f"a traceback: {last}"
        if wanted is not None and self.code != wanted:
            return f"exit status {self.code}, not {wanted}: {last}"
        if self.code and "error: " not in self.err:
            return f"exit status {self.code} without a line that says error: {last}"
        if self.code and (nameless := re.search(r"error: (--\S+: )?\[Errno.*", self.err)):
            return f"does not say which file: {nameless[0][:300]}"
        return None


def start(main: Callable, argv: list[str], cwd: Path, said: int, prepare: Callable) -> int:
    """Fork a process that runs main(argv) in a session of its own, and return its id. `said` is a file descriptor."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.chdir(cwd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(said, descriptor)
        sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
        sys.argv = ["command", *argv]
        prepare()
        code = main(argv) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code & 255)


def run(main: Callable, *argv: object, cwd: Path, moment: float | None = None,
        prepare: Callable = lambda: None) -> Outcome:
    """Run a command to its end or its time-out, by which its whole session is killed.

    Args:
        moment: seconds until SIGKILL. Processes that it started then live on.
        prepare: called in the process before the command.
    """
    log = cwd.parent / "log"
    with log.open("wb") as file:  # through a pipe, which no limit on files touches
        cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    pid = start(main, [str(arg) for arg in argv], cwd, cat.stdin.fileno(), prepare)
    cat.stdin.close()
    begun, code = time.monotonic(), None
    while code is None and time.monotonic() - begun < TIMEOUT:
        if moment is not None and time.monotonic() - begun > moment:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        found, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if found else None
    if moment is None or code != -signal.SIGKILL:
        end(pid)
        cat.wait()
    return Outcome(code, log.read_text(errors="replace"), pid)


def end(pid: int) -> None:
    """Kill what is left of the session that `start` made."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def limit_files(size: int) -> Callable:
    """A `prepare` after which no file can grow beyond so many bytes: a full disk, as the process sees it."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
