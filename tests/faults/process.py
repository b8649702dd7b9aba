"""Run commands by their real `main` with a time-out and limits, each in a fork of a process that has loaded PyTorch.

A fork costs milliseconds where a console script costs ten seconds of imports. What the process prints comes back
through pipes, which no limit on files touches.
"""
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 300  # seconds, to end a command that hangs, even on a busy machine


class Outcome(NamedTuple):
    code: int | None  # exit status, negative of a signal, None of a time-out
    out: str
    err: str
    pid: int  # of the session's leader

    def last_line(self) -> str:
        """Return the last message. Progress bars are no messages."""
        lines = [line.split("\r")[-1].strip() for line in self.err.splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def problem(self, wanted: int | None = None) -> str | None:
        """Return the problem if the command ended with neither a result nor one clear line, else None.

        Args:
            wanted: the only exit status that is right.
        """
        if self.code is None:
            return f"hangs, ended after {TIMEOUT} s; last line: {self.last_line()[:200]}"
        if self.code < 0:
            return f"died of signal {-self.code}"
        if "Traceback (most recent call last)" in self.err and self.code:
            return f"a traceback: {self.last_line()[:300]}"
        if wanted is not None and self.code != wanted:
            return f"exit status {self.code}, not {wanted}: {self.last_line()[:300]}"
        if self.code and "error: " not in self.err:
            return f"exit status {self.code} without a line that says error: {self.last_line()[:300]}"
        if self.code and (nameless := re.search(r"error: (--\S+: )?\[Errno.*", self.err)):
            return f"does not say which file: {nameless[0][:300]}"
        return None


def start(main: Callable, argv: list[str], cwd: Path, out: int, err: int, prepare: Callable = lambda: None) -> int:
    """Fork a process that runs main(argv), and return its id. `out` and `err` are file descriptors."""
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
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = (open(fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False,
                                       buffering=1) for fd in (1, 2))
        sys.argv = [getattr(main, "program", "command"), *argv]
        prepare()
        code = main(argv) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 255)


def run(main: Callable, *argv: object, cwd: Path, timeout: float = TIMEOUT,
        prepare: Callable = lambda: None) -> Outcome:
    """Runs a command to its end, or to its time-out, by which its whole session is killed.

    Args:
        prepare: called in the process before the command.
    """
    (read_out, out), (read_err, err) = os.pipe(), os.pipe()
    pid = start(main, [str(arg) for arg in argv], cwd, out, err, prepare)
    os.close(out)
    os.close(err)
    said, deadline, code = {read_out: b"", read_err: b""}, time.monotonic() + timeout, None
    while code is None and time.monotonic() < deadline:
        ready, _, _ = select.select(list(said), [], [], 0.02)
        for fd in ready:
            said[fd] += os.read(fd, 1 << 16)
        code = exit_status(pid)
    end(pid, reap=code is None)
    for fd in said:
        while select.select([fd], [], [], 0)[0] and (more := os.read(fd, 1 << 16)):
            said[fd] += more
        os.close(fd)
    return Outcome(code, *(text.decode(errors="replace") for text in said.values()), pid)


def run_until(main: Callable, *argv: object, cwd: Path, log: Path, moment: float,
              signal_: int = signal.SIGKILL) -> Outcome:
    """Run a command that gets SIGKILL or another signal, unless it has ended. Processes that it started live on."""
    with log.open("w") as file:
        pid = start(main, [str(arg) for arg in argv], cwd, file.fileno(), file.fileno())
    begun, code = time.monotonic(), None
    while code is None:
        if time.monotonic() - begun > moment:
            os.kill(pid, signal_)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            break
        time.sleep(0.005)
        code = exit_status(pid)
    return Outcome(code, "", log.read_text(errors="replace"), pid)


def exit_status(pid: int) -> int | None:
    """None while the process runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def end(pid: int, reap: bool) -> None:
    """Kill the rest of the session that `start` made, and its leader too if it is to be waited for."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if reap:
        os.waitpid(pid, 0)


def limit_files(size: int) -> Callable:
    """A `prepare` after which no file can grow beyond so many bytes: a full disk, as the process sees it."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
