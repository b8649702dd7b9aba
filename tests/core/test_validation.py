"""Claims about validation during training."""
import pytest
from conftest import saved
from PIL import Image
from training import pipeline

from open_clip_mdc.data.shards import tar_writer


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_samples_come_in_the_order_of_the_shards_whatever_the_workers(tmp_path, workers):
    """The place of a caption says which noise it gets, and the first --val-num-samples count."""
    for shard, count in enumerate((3, 1, 2)):
        with tar_writer(tmp_path / f"{shard}.tar") as writer:
            for i in range(count):
                writer.write({"__key__": f"{shard}{i}", "png": saved(Image.new("RGB", (8, 8))), "txt": f"{shard}{i}"})
    found = pipeline(f"{tmp_path}/{{0..2}}.tar", lambda image: 0, is_train=False, workers=workers, batch_size=2,
                     val_num_samples=6)
    assert [text for _, batch in found.dataloader for text in batch] == ["00", "01", "02", "10", "20", "21"]
