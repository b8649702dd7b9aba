"""File locks, so that processes that fill one folder, on one machine or several, share the work and do not repeat it.

A process that makes FOLDER/NAME holds a lock on the hidden file FOLDER/.NAME.lock, which is removed once NAME is there.
A lock ends with its process, so it is never stale. If a file is locked, a process makes another one first, and waits
for locked files at the end. Machines share locks through NFS, Lustre (-o flock), GPFS or CephFS.
"""
import sys
from collections.abc import Callable
from glob import escape
from pathlib import Path

from tqdm import tqdm

from ..data.files import new_file, open_locked


def make_once(target: Path, write: Callable[[Path], object], wait: bool) -> bool:
    """Make a file with `write`, unless it exists. Returns True if it now exists.

    Without `wait`, returns False while another process is making it. Raises OSError on a file system without locks.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.with_name(f".{target.name}.lock")
    file = open_locked(hidden)
    if not file and not wait:
        return target.exists()
    if not file:
        tqdm.write(f"waiting for {target}, which another process is making. If that process hangs, end it, and this "
                   "one continues", file=sys.stderr)
        file = open_locked(hidden, wait)
    with file:
        try:
            for rest in target.parent.glob(f".{escape(target.name)}.{'[0-9a-f]' * 12}"):  # of a process that was killed
                rest.unlink()
            if not target.exists():
                with new_file(target, follow=False) as part:
                    write(part)
        finally:
            hidden.unlink(missing_ok=True)  # who waits for it, or makes another, finds the target
    return True
