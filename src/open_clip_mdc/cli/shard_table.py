"""The table of one shard: what the workers of caption, score and embed share (bulk.py sends them their shards).

Dimensions: B images.
"""
import argparse
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from ..bulk.tables import key_of, write_table
from ..bulk.units import READ, Unit, check_settings, files_of, source_of
from ..data.images import Batch, Images
from ..errors import SHOWN
from ..integration.pretrained import PretrainedCaptioner


def check_out(out: str, settings: dict) -> None:
    """Raises ValueError where a folder has a table of rows of other settings: one stands for all."""
    check_settings(settings, list(Path(out).glob("*.parquet"))[:1])


def write_shard(shard: Unit, out: Path, loaded: PretrainedCaptioner, args: argparse.Namespace, schema: pa.Schema,
                settings: dict, columns: Callable[[Batch], dict]) -> dict:
    """Writes the table of one unit. Knows no engine.

    Args:
        columns: of a batch with images, by the schema's names, but `key`; as many rows for all, with `key` if they are
            not the batch's.
        settings: what the rows depend on, plain values.

    Returns:
        numbers of images, rows, broken images and those without a row.

    Raises:
        ValueError: the shard breaks off.
    """
    stats, source, skipped = {"images": 0, "rows": 0, "broken": 0}, source_of(shard), []
    with write_table(out, schema) as table:
        for batch in Images(files_of(shard), loaded.to_bytes, args.batch_size).loader(args.workers):
            if batch.damaged:
                raise ValueError(batch.damaged[0])
            stats["images"] += len(batch.names)
            stats["broken"] += len(batch.problems)
            with READ.get_lock():
                READ.value += len(batch.names)
            skipped += batch.problems[:SHOWN - len(skipped)]
            if batch.names:
                keys = [key_of(name.removeprefix(f"{shard}::").removeprefix(f"{shard}/")) for name in batch.names]
                rows = {"key": keys, **columns(batch._replace(names=keys, image=loaded.from_bytes(batch.image)))}
                table.add(rows)
                stats["rows"] += len(rows["key"])
                with_row = set(rows["key"])
                lacking = [name for name, key in zip(batch.names, keys, strict=True) if key not in with_row]
                if lacking:
                    stats["without_caption"] = stats.get("without_caption", 0) + len(lacking)
                skipped += [f"{name}: no caption" for name in lacking[:SHOWN - len(skipped)]]
        table.about.update(settings=settings, source=source, stats=stats, skipped=list(map(key_of, skipped)))
    return stats
