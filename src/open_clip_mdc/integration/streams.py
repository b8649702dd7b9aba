"""Functions of webdataset that read shards, safe for shards from anywhere (patches.py)."""
import re
import tarfile

from webdataset.handlers import reraise_exception

from ..data.shards import META, Bounded, as_file, check_size
from .openclip import hook


@hook
def gopen(original, url, mode="rb", *args, **kwargs):
    """Wrap `webdataset.gopen.gopen`: open an existing file as a file, even if its name begins with pipe:."""
    return original(as_file(url) if mode == "rb" else url, mode, *args, **kwargs)


@hook
def tar_file_iterator(original, fileobj, skip_meta=META, handler=reraise_exception, select_files=None,
                      rename_files=None):
    """Replace `webdataset.tariterators.tar_file_iterator`: check a member's size before it is read.

    `handler` returns whether to continue after a file that cannot be read.
    """
    archive = tarfile.open(fileobj=fileobj, mode="r|*", tarinfo=Bounded)
    for member in archive:
        try:
            if not member.isreg() or skip_meta is not None and re.match(skip_meta, member.name):
                continue
            name = rename_files(member.name) if rename_files else member.name
            if select_files is None or select_files(name):
                check_size(member)
                yield {"fname": name, "data": archive.extractfile(member).read()}
                archive.members = []
        except Exception as problem:
            problem.args = (f"{problem} @ {fileobj}",)
            if not handler(problem):
                break
