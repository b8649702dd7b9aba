"""Claims: processes that fill one folder, on one machine or on several, share the work and do not repeat it.

The rule. Who makes FOLDER/NAME holds a lock on NAME's place in the hidden file FOLDER/.claims, and writes
FOLDER/.NAME.part, which becomes NAME when it is complete. The lock is the kernel's (a POSIX record lock): it ends with
the process that holds it, however that ends, so that no claim is ever stale and nothing waits for a time-out. Who finds
a place locked takes another, and in the end waits for those that are left: what a dead process left behind is then
made anew by whoever waited. Machines share locks through NFS, Lustre (-o flock), GPFS or CephFS; when a whole machine
dies, its locks end when the file server notices. A file system without locks is refused.
"""
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path


class Claims:
    """The claims of this process in one folder. (One object a process and folder: closing a file drops its locks.)"""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, (folder / ".claims").open("ab")

    def make(self, name: str, write: Callable[[Path], object], wait: bool) -> bool:
        """Makes a file of the folder, unless it is there.

        Args:
            write: writes the whole file to the path that it is given.
            wait: for another process that is making it.

        Returns:
            whether the file is there now; without `wait` it is not if another process is making it.

        Raises:
            OSError: the file system has no locks. And whatever `write` raises; then there is no file.
        """
        target = self.folder / name
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, place)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return target.exists()
        except OSError as problem:
            raise OSError(f"{self.folder} is on a file system without locks ({problem.strerror}): put --out "
                          f"elsewhere") from problem
        try:
            if not target.exists():
                part = self.folder / f".{name}.part"
                try:
                    write(part)
                    os.replace(part, target)
                finally:
                    part.unlink(missing_ok=True)
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, place)
        return True

    def close(self) -> None:
        """Gives up all claims of this process."""
        self.file.close()
