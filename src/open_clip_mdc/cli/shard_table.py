"""Write the table of a shard, for the workers of caption, score and embed (bulk/units.py sends them shards)."""
import argparse
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from ..bulk.tables import key_of, read_about, write_table
from ..bulk.units import READ, Unit, check_settings, files_of, source_of
from ..data.fingerprint import fingerprint
from ..data.images import Batch, Images
from ..errors import MAX_SHOWN
from ..integration.pretrained import PretrainedCaptioner


def table_worker(args: argparse.Namespace, loaded: PretrainedCaptioner, schema: pa.Schema,
                 columns: Callable[[Batch], dict], **settings) -> Callable:
    """Return the function that writes a unit's table to --out. Raises ValueError for tables of other `settings`.

    `columns` gives a batch's values by column. They have `key` only if rows are not the batch's images.
    """
    settings = {"tool": args.tool, "model": fingerprint(loaded.model), "precision": loaded.precision, **settings}
    for table in list(Path(args.out).glob("*.parquet"))[:1]:  # all have the settings of the first
        check_settings(settings, read_about(table)["settings"], table)

    def write_shard(shard: Unit, out: Path) -> None:
        stats, source, skipped = {"images": 0, "rows": 0, "broken": 0}, source_of(shard), []
        with write_table(out, schema) as table:
            for batch in Images(files_of(shard), loaded.to_bytes, args.batch_size).loader(args.workers):
                if batch.damaged:
                    raise ValueError(batch.damaged[0])
                stats["images"] += len(batch.names)
                stats["broken"] += len(batch.problems)
                with READ.get_lock():
                    READ.value += len(batch.names)
                skipped += batch.problems[:MAX_SHOWN - len(skipped)]
                if batch.names:
                    keys = [key_of(name.removeprefix(f"{shard}::").removeprefix(f"{shard}/")) for name in batch.names]
                    rows = {"key": keys, **columns(batch._replace(names=keys, image=loaded.from_bytes(batch.image)))}
                    table.add(rows)
                    stats["rows"] += len(rows["key"])
                    with_row = set(rows["key"])
                    lacking = [name for name, key in zip(batch.names, keys, strict=True) if key not in with_row]
                    if lacking:
                        stats["without_caption"] = stats.get("without_caption", 0) + len(lacking)
                    skipped += [f"{name}: no caption" for name in lacking[:MAX_SHOWN - len(skipped)]]
            table.about.update(settings=settings, source=source, stats=stats, skipped=list(map(key_of, skipped)))

    return write_shard
