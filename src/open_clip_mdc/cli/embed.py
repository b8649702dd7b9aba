"""Write image features of webdataset shards as Parquet tables, to probe, search or cluster them.

    open_clip_mdc embed --pretrained RUN 'shards/{000..009}.tar' photos/ --out features/
    open_clip_mdc embed --pretrained RUN 'shards/{000..999}.tar' --out features/ --kind patches --layer 5 --jobs 8

OUT/SHARD.parquet (OUT/FOLDER.parquet for a folder of images) has the columns key and feature. A feature is [D], or
[P, D] for patches, in float32, or in float16 with --precision bf16 and fp16. gap is the mean of the patch tokens, which
the paper probes (Sec. 4.2). cls is the class token, which the decoder does not see. All are taken after the final
LayerNorm.

Dimensions: P patches, D width.
"""
import argparse

import pyarrow as pa
import torch
from timm.layers import to_2tuple

from ..bulk import units as bulk
from ..data.images import Batch
from .shard_table import table_worker
from .shared import load_captioner


def worker(args: argparse.Namespace, units: list[bulk.Unit], number: int):
    loaded = load_captioner(args, number)
    image = torch.zeros(1, 3, *to_2tuple(loaded.model.visual.image_size), device=loaded.device)
    with torch.inference_mode():
        shape = loaded.model.tower.features(image, args.feature, args.layer).shape[1:]
    layers = loaded.model.tower.num_layers
    layer = args.layer % layers
    kind = "float32" if loaded.precision == "fp32" else "float16"
    schema = pa.schema([("key", "string"), ("feature", pa.fixed_shape_tensor(pa.from_numpy_dtype(kind), shape))])

    def columns(batch: Batch) -> dict:
        with torch.inference_mode(), loaded.autocast():
            feature = loaded.model.tower.features(batch.image, args.feature, layer).float().cpu().numpy()
        return {"feature": pa.FixedShapeTensorArray.from_numpy_ndarray(feature.astype(kind))}

    return table_worker(args, loaded, schema, columns, feature=args.feature,
                        **({"layer": layer} if layer < layers - 1 else {}))


def run(args: argparse.Namespace) -> None:
    bulk.run(args, worker)
