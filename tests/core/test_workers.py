"""Claims about processes that read data: they fit into shared memory, and a dead or stuck one is one line."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import png
from torchvision.transforms.functional import pil_to_tensor

from open_clip_mdc.data import images, workers
from open_clip_mdc.errors import of_worker

MB = 2 ** 20


def cut(image):
    """Return uint8 [3, 32, 32]."""
    return pil_to_tensor(image.resize((32, 32)))


def killed(image):
    """Die as by the OOM killer, in a worker only."""
    if image.size == (8, 8):
        os.kill(os.getpid(), signal.SIGKILL)
    return cut(image)


@pytest.mark.parametrize("size, expected", {30: 4, 99: 4, 101: 3, 140: 2, 200: 1, 300: 0, 2000: 0}.items())
def test_workers_are_as_many_as_have_room_for_their_batches(size, expected, monkeypatch, capsys):
    """By count in MB: two batches for each worker and two in use are at most 1000 MB."""
    monkeypatch.setattr(workers, "shared_memory", lambda folder: 1000 * MB)
    workers._say.cache_clear()
    assert workers.fitting(4, size * MB) == expected
    said = capsys.readouterr().err
    assert said.count("\n") == (expected < 4) and ("--shm-size" in said) == (expected < 4)


def test_no_shared_memory_or_one_that_is_read_only_means_no_workers(tmp_path):
    assert workers.fitting(4, 1, str(tmp_path / "missing")) == 0
    script = (f"mount -t tmpfs -o size=1m,{{}} none {tmp_path} && {sys.executable} -c \"from open_clip_mdc.data."
              f"workers import fitting; print(fitting(4, 20000, '{tmp_path}'))\"")
    for option, expected in (("rw", "2"), ("ro", "0")):
        ran = subprocess.run(["unshare", "-m", "sh", "-c", script.format(option)], capture_output=True, text=True)
        if "Operation not permitted" in ran.stderr or "permission denied" in ran.stderr:
            pytest.skip("needs the right to mount")
        assert ran.stdout.strip() == expected and "--shm-size" in ran.stderr, ran.stderr


@pytest.mark.parametrize("fault", ["killed", "stuck"])
def test_a_dead_or_stuck_worker_ends_in_one_line_after_the_batches_before_it(fault, tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png(1, 16))
    (tmp_path / "b.png").write_bytes(png(2, 8))
    reading, writing = os.pipe()
    last = tmp_path / "b.png" if fault == "killed" else Path(f"/dev/fd/{reading}")
    monkeypatch.setattr(images, "STUCK", 3)
    loader = images.Images([tmp_path / "a.png", last], killed, 1).loader(1)
    seen = []
    with pytest.raises(RuntimeError) as found:
        seen.extend(batch.names for batch in loader)
    os.close(writing)
    os.close(reading)
    line = of_worker(found.value)
    assert "\n" not in line and "fewer workers" in line


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="another"):
        of_worker(RuntimeError("another"))
