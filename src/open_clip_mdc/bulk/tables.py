"""Parquet tables with the rows of a shard. Their metadata say how they were made and which images were left out."""
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ABOUT = "open_clip_mdc"  # the key of our metadata
GROUP_ROWS, GROUP_BYTES = 1024, 2 ** 26  # rows and bytes to hold in memory before a row group is written


def key_of(name: str) -> str:
    """Return the key of an image from its name. Bytes that are no UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


class Table:
    """A table that is being written. Put plain values in `about` to store them in its metadata."""

    def __init__(self, writer: pq.ParquetWriter):
        self.writer, self.about, self.waiting = writer, {}, []

    def add(self, columns: dict) -> None:
        self.waiting.append(pa.table(columns, schema=self.writer.schema))
        if sum(t.num_rows for t in self.waiting) >= GROUP_ROWS or sum(t.nbytes for t in self.waiting) >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.writer.write_table(pa.concat_tables(self.waiting))
            self.waiting = []


@contextmanager
def write_table(path: Path, schema: pa.Schema) -> Iterator[Table]:
    """Yield a table that is written to `path` row group by row group. The same rows give the same bytes."""
    with pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        table = Table(writer)
        yield table
        table.flush()
        writer.add_key_value_metadata({ABOUT: json.dumps(table.about)})


def read_rows(path: Path, columns: list[str]) -> pa.Table:
    """Return some columns of a table. Checksums are compared, and ValueError is raised if it is damaged."""
    try:
        return pq.read_table(path, columns=columns, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as problem:
        raise ValueError(f"{path} is damaged: remove it and run the same command again ({problem})") from problem


def read_about(path: Path) -> dict:
    """Return the metadata of a table. Raises ValueError if it is no Parquet file, or another program wrote it."""
    try:
        about = json.loads(pq.read_metadata(path).metadata[ABOUT.encode()])
        return about | {"settings": {**about["settings"]}, "stats": {"images": 0, **about["stats"]}}
    except (pa.ArrowException, KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{path} is no table of open_clip_mdc: remove it or choose another --out") from problem
