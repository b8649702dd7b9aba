"""Claims: processes that fill one folder, on one machine or on several, share the work and do not repeat it.

Who makes FOLDER/NAME holds a POSIX record lock on NAME's place in the hidden file FOLDER/.claims and notes there who it
is. The lock ends with its process, so that no claim is ever stale. Who finds a place locked takes another, and in the
end waits for those that are left. A process that hangs keeps its lock: after an hour without a byte who waits makes the
file too, as both write the same. Machines share locks through NFS, Lustre (-o flock), GPFS or CephFS.
"""
import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from glob import escape
from pathlib import Path

from tqdm import tqdm

from ..data.files import new_file, open_own

PATIENCE, REPEAT, LEASE = 20, 600, 3600  # seconds until who waits says so, says it again, and waits no more


class Claims:
    """The claims of this process in one folder. One object a process and folder: closing a file drops its locks."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, open_own(folder / ".claims", "a+b")

    def make(self, name: str, write: Callable[[Path], object], wait: bool) -> bool:
        """Make a file of the folder by `write`, unless it is there, and return whether it is there now.

        Without `wait` it is not if another process is making it. Raises OSError: the file system has no locks.
        """
        target = self.folder / name
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        locked = self._lock(place, name)
        if not locked and not wait:
            return target.exists()
        if not locked:
            locked = self._wait(place, name)
        try:
            if not target.exists():
                with new_file(target, follow=False) as part:
                    write(part)
        finally:
            if locked:
                fcntl.lockf(self.file, fcntl.LOCK_UN, 1, place)
        return True

    def _lock(self, place: int, name: str) -> bool:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        except OSError as problem:
            raise OSError(f"{self.folder} is on a file system without locks ({problem.strerror}): put --out "
                          f"elsewhere") from problem
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        self.file.write(json.dumps([name, holder]).encode() + b"\n")
        self.file.flush()
        return True

    def _holder(self, name: str) -> str:
        notes = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size, 0)
        start = json.dumps([name])[:-1].encode() + b", "
        found = [line for line in notes.splitlines() if line.startswith(start)]
        return str(json.loads(found[-1])[1]) if found else "another process"

    def _wait(self, place: int, name: str) -> bool:
        seen, changed, tell = None, time.monotonic(), time.monotonic() + PATIENCE
        while not self._lock(place, name):
            now = time.monotonic()
            size = sum(path.stat().st_size for path in self.folder.glob(f".{escape(name)}.*") if path.exists())
            if size != seen:
                seen, changed = size, now
            if now - changed > LEASE:
                return False
            if now > tell:
                tqdm.write(f"waiting for {self.folder / name}, which {self._holder(name)}, makes; if that hangs, end "
                           "it, and this one continues", file=sys.stderr)
                tell = now + REPEAT
            time.sleep(min(1, PATIENCE))
        return True

    def close(self) -> None:
        self.file.close()
