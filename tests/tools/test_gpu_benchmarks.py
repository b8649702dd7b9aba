"""Claims about the GPU benchmarks that need no GPU: all parts run, and the memory of the loss is bounded."""
import weakref

import pytest
import torch
from conftest import read_json, run
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu
from benchmarks.gpu_parts import Bench
from open_clip_mdc.objectives.registry import OBJECTIVES
from open_clip_mdc.text.packing import Predicted


class Bytes(TorchDispatchMode):
    """Counts the bytes of all storages alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.seen:
                storage = x.untyped_storage()
                self.seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def free(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("objective, limit", [("mdc", 4), ("mcd-absorbing", 5), ("mcd", 11), ("mcd-replace", 11)])
def test_a_loss_holds_a_few_times_the_logits_and_nothing_of_v_by_v(objective, limit):
    """Forward and backward, with the auxiliary loss, hold a few float32 [M, V] of 1 MB each. [V, V] would be 67 MB."""
    tokens, size = 64, 4096
    logits = torch.randn(tokens, size, requires_grad=True)
    ids = torch.randint(size, (tokens,))
    predicted = Predicted(ids, ids, ids, ids.roll(1), torch.full((tokens,), 0.5), torch.ones(tokens))
    with Bytes() as watch:
        OBJECTIVES[objective].token_loss(logits, predicted, *(() if objective == "mdc" else (5e-4,))).sum().backward()
    assert watch.peak <= (limit + 0.1) * 4 * tokens * size and logits.grad.isfinite().all()


def test_a_part_that_is_out_of_time_stops_and_a_row_takes_its_elders_place(monkeypatch, capsys):
    monkeypatch.setitem(gpu.PARTS, "scoring", lambda bench: ({"what": name, "ms": 2.0} for name in "ab"))
    known, saved = [{"what": "b", "ms": 1.0}, {"what": "c", "ms": 1.0}], []
    gpu.measure("scoring", Bench("cpu", True), known, lambda: saved.append(len(known)))
    assert known == [{"what": "c", "ms": 1.0}, {"what": "a", "ms": 2.0}, {"what": "b", "ms": 2.0}] and saved == [3, 3]
    monkeypatch.setattr(gpu, "SECONDS", 0)
    gpu.measure("scoring", Bench("cpu", True), known, lambda: saved.append(0))
    assert saved == [3, 3] and "scoring: stopped after 0 s" in capsys.readouterr().out


def test_all_parts_run_small_on_a_cpu(tmp_path, monkeypatch):
    result = run("python", "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--out", tmp_path, fork=True)
    written = read_json(tmp_path / "gpu.json")
    assert list(written["parts"]) == list(gpu.PARTS) and "a trial of the script, no result" in written["chip"]
    for part, rows in written["parts"].items():
        assert rows and f"### Measured: {part}" in (tmp_path / "GPU.md").read_text()
        assert part == "syncs" or not any("note" in row for row in rows), rows
    steps = {(row["model"], row["mode"]): row for row in written["parts"]["steps"]}
    assert len(steps) == 4 and all(len(row["kernels"]) == 10 and row["samples/s"] > 0 for row in steps.values())
    assert steps["MDC", "eager"]["graphs"] == 0 and 1 <= steps["MDC", "compiled"]["graphs"] <= 3
    assert "stopped after" not in result.stdout
    monkeypatch.setattr("sys.argv", ["gpu", "--parts", "speed"])
    with pytest.raises(SystemExit, match="^error: --parts speed: no such part"):
        gpu.main()
