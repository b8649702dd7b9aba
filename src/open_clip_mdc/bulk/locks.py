"""File locks, so that processes that fill one folder, on one machine or several, share the work and do not repeat it.

A process that makes FOLDER/NAME holds a POSIX record lock on one byte of the hidden file FOLDER/.claims, whose offset
is a hash of NAME. A lock ends with its process, so it is never stale. If a file is locked, a process makes another one
first, and waits for locked files at the end. Machines share locks through NFS, Lustre (-o flock), GPFS or CephFS.
"""
import fcntl
import hashlib
import sys
from collections.abc import Callable
from glob import escape
from pathlib import Path

from tqdm import tqdm

from ..data.files import new_file, open_own


class Locks:
    """The locks of this process in one folder. Make only one per process and folder: closing a file drops all locks."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, open_own(folder / ".claims", "a+b")

    def make(self, name: str, write: Callable[[Path], object], wait: bool) -> bool:
        """Make the file `name` of the folder with `write`, unless it exists. Returns True if it now exists.

        Without `wait`, returns False while another process is making it. Raises OSError if there are no locks on the
        file system.
        """
        target = self.folder / name
        offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        if not self._lock(offset):
            if not wait:
                return target.exists()
            tqdm.write(f"waiting for {target}, which another process is making. If that process hangs, end it, and "
                       "this one continues", file=sys.stderr)
            self._lock(offset, fcntl.LOCK_EX)
        try:
            for rest in self.folder.glob(f".{escape(name)}.{'[0-9a-f]' * 12}"):  # of a process that was killed
                rest.unlink()
            if not target.exists():
                with new_file(target, follow=False) as part:
                    write(part)
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, offset)
        return True

    def _lock(self, offset: int, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool:
        try:
            fcntl.lockf(self.file, how, 1, offset)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        except OSError as problem:
            raise OSError(f"{self.folder} is on a file system without locks ({problem.strerror}): put --out "
                          "elsewhere") from problem
        return True

    def close(self) -> None:
        self.file.close()
