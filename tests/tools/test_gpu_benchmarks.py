"""Claims about benchmarks/ for GPUs, without one: what is counted on fake tensors, and that the measuring runs."""
import json
import sys

import pytest
import torch
from conftest import REPO, run
from torch._subclasses.fake_tensor import FakeTensorMode

from open_clip_mdc.objectives.registry import OBJECTIVES
from open_clip_mdc.text.packing import Asked

sys.path.insert(0, str(REPO))
from benchmarks import gpu, gpu_report  # noqa: E402
from benchmarks.captions import random_text  # noqa: E402
from benchmarks.contestants import contestant, count_flops, vocab_size  # noqa: E402
from benchmarks.fake import FakeStep  # noqa: E402
from benchmarks.gpu_kernels import Bench, refusable  # noqa: E402
from benchmarks.memory import Bytes, peak_gb  # noqa: E402
from benchmarks.roofline import LEAST, Chip, Roofline, predict  # noqa: E402

CHIP = Chip(bytes=1e9, matrix=1e12, attention=5e11, single=1e11, ceiling=2e12)


def test_bytes_are_those_alive_at_the_peak():
    watch = Bytes()
    with FakeTensorMode(), watch:
        kept = torch.ones(1000, 256)  # 1,024,000 bytes
        watch.part = "second"
        for _ in range(3):
            gone = kept + 1
            del gone
        view = kept[1:]
    assert view is not None
    assert watch.peaks == {"start": 1_024_000, "second": 2_048_000} and watch.now == 1_024_000


@pytest.mark.parametrize("objective, limit", [("mdc", 4), ("mcd-absorbing", 5), ("mcd", 11), ("mcd-replace", 11)])
def test_a_loss_holds_a_few_times_the_logits_and_nothing_of_v_by_v(objective, limit):
    """Forward and backward, the auxiliary loss with it: float32 [M, V] so many times, 1 MB each; [V, V] is 67 MB."""
    tokens, size = 64, 4096
    logits = torch.randn(tokens, size, requires_grad=True)
    ids = torch.randint(size, (tokens,))
    asked = Asked(ids, ids, ids, ids.roll(1), torch.full((tokens,), 0.5), torch.ones(tokens))
    with Bytes() as watch:
        OBJECTIVES[objective].token_loss(logits, asked, *(() if objective == "mdc" else (5e-4,))).sum().backward()
    assert watch.peaks["start"] <= (limit + 0.1) * 4 * tokens * size and logits.grad.isfinite().all()


def test_a_kernel_takes_what_its_bytes_or_its_multiplications_need():
    watch = Roofline(CHIP)
    with FakeTensorMode(), watch:
        a, b = (torch.empty(1000, 1000, dtype=torch.bfloat16) for _ in "ab")
        c, d = torch.empty(500, 500), torch.empty(500, 9)
        for part, function in (("product", lambda: a @ b), ("single", lambda: c @ d),
                               ("sum", lambda: a + b), ("look up", lambda: a.index_select(0, torch.empty(10).long())),
                               ("nothing", lambda: a.t())):
            watch.part = part
            function()
    parts = watch.parts
    assert parts["product"] == (1, 2e9, 6e6, pytest.approx(6e-3), 0)  # its bytes take longer than 2e9 / 1e12
    assert parts["single"].matrix_seconds == pytest.approx(max(2 * 500 * 500 * 9 / 1e11, 4 * 500 * 518 / 1e9))
    assert parts["sum"] == (1, 0, 6e6, 0, pytest.approx(6e-3))
    assert parts["look up"].bytes < 100_000 and parts["look up"].other_seconds >= LEAST
    assert "nothing" not in parts


def test_the_predicted_step_does_the_multiplications_of_the_real_one():
    for name in ("MDC", "CLIP"):
        parts, modes = predict(FakeStep(name, "ViT-Ti-8", 4), CHIP)
        side = contestant(name, "ViT-Ti-8")
        text = side.prepare(random_text(4, vocab_size(side.model)))
        real = count_flops(lambda side=side, text=text: side.step(torch.randn(4, 3, 32, 32), text))
        assert sum(part.flops for part in parts.values()) == pytest.approx(real, rel=0.02)
        assert modes["compiled"]["ms"] < modes["eager"]["ms"]
        encoders = [parts[part].flops for part in ("encoder", "encoder, backward")]
        assert 1.8 < encoders[1] / encoders[0] < 2.6


def test_the_papers_batch_fits_the_card_and_the_loss_adds_little():
    peaks = peak_gb(FakeStep("MDC", "ViT-B-16", 1024, 60))
    assert 80 < max(peaks.values()) <= 101
    assert 0 < peaks["loss, added"] <= 3


def test_a_refusal_is_a_row_with_the_reason():
    def fails():
        raise RuntimeError("CUDA out of memory\nand more")
    assert refusable({"what": "x"}, fails) == {"what": "x", "note": "RuntimeError: CUDA out of memory"}
    assert refusable({"what": "x"}, lambda: {"ms": 1.0}) == {"what": "x", "ms": 1.0}


def test_a_part_that_is_out_of_time_stops_and_a_row_takes_its_elders_place(monkeypatch, capsys):
    monkeypatch.setitem(gpu.PARTS, "copies", lambda bench: ({"what": name, "ms": 2.0} for name in "ab"))
    known, saved = [{"what": "b", "ms": 1.0}, {"what": "c", "ms": 1.0}], []
    gpu.measure("copies", Bench("cpu", True), 100, known, lambda: saved.append(len(known)))
    assert known == [{"what": "c", "ms": 1.0}, {"what": "a", "ms": 2.0}, {"what": "b", "ms": 2.0}] and saved == [3, 3]
    gpu.measure("copies", Bench("cpu", True), 0, known, lambda: saved.append(0))
    assert saved == [3, 3] and "copies: stopped after 0 s" in capsys.readouterr().out


def step(model, size, mode, samples, tflops, **more):
    return {"model": model, "size": size, "batch": 1024, "mode": mode, "samples/s": samples, "TFLOP/s": tflops, **more}


def test_goals_are_judged_by_what_was_measured_only():
    predicted = {"steps": [step("MDC", "ViT-B-16", "compiled", 3000.0, 430.0, tokens=60.0),
                           step("MDC", "ViT-B-16", "compiled", 3500.0, 400.0, tokens=14.1),
                           step("CLIP", "ViT-B-16", "compiled", 3400.0, 430.0, tokens=77)]}
    measured = {"steps": [step("MDC", "ViT-B-16", "compiled", 2000.0, 200.0),
                          step("CLIP", "ViT-B-16", "compiled", 1600.0, 200.0)]}
    before, after = (gpu_report.goals(predicted, parts).splitlines()[2:] for parts in ({}, measured))
    assert "| 0.506 |  |  |" in before[0] and "| 1.03 |  |  |" in before[1] and "|  |  |  |" in before[2]
    assert "| 0.506 | 0.253 | missed |" in after[0] and "| 1.03 | 1.25 | met |" in after[1]


def test_predictions_are_called_predictions_until_a_card_has_run():
    text = (REPO / "benchmarks" / "GPU.md").read_text()
    measured = gpu_report.read_json(REPO / "benchmarks" / "gpu.json")
    predictions = gpu_report.read_json(REPO / "benchmarks" / "predictions.json")
    assert text == gpu_report.report(predictions, measured)
    assert ("**Predictions. No GPU has run any of this yet.**" in text) == (not measured)
    assert "`make bench-gpu`" in text


def test_all_parts_run_small_on_a_cpu(tmp_path, monkeypatch):
    result = run("python", "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--out", str(tmp_path),
                 fork=True)
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert list(written["parts"]) == list(gpu.PARTS) and "a trial of the script, no result" in written["chip"]
    for part, rows in written["parts"].items():
        assert rows and f"## Measured: {part}" in (tmp_path / "GPU.md").read_text()
        assert part == "syncs" or not any("note" in row for row in rows), rows
    steps = {(row["model"], row["mode"]): row for row in written["parts"]["steps"]}
    assert len(steps) == 4 and all(len(row["kernels"]) == 10 and row["samples/s"] > 0 for row in steps.values())
    assert steps["MDC", "eager"]["graphs"] == 0 and 1 <= steps["MDC", "compiled"]["graphs"] <= 3
    assert "stopped after" not in result.stdout
    monkeypatch.setattr("sys.argv", ["gpu", "--parts", "speed"])
    with pytest.raises(SystemExit, match="^error: --parts speed: no such part"):
        gpu.main()
