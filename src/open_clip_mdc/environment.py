"""The processor and versions that the last digits of results depend on (experiments, benchmarks)."""
import platform
from importlib.metadata import version
from pathlib import Path


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, or its architecture if the system does not tell."""
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def environment(threads: int | str) -> str:
    """Return one line, such as "AMD EPYC (AVX2), 1 thread, torch 2.15.0, open_clip_torch 3.3.0, timm 1.0.31"."""
    import torch
    capability, plural = torch.backends.cpu.get_cpu_capability(), "" if str(threads) == "1" else "s"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "open_clip_torch", "timm"))
    return f"{processor()} ({capability}), {threads} thread{plural}, {versions}"
