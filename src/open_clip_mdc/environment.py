"""The processor and versions that the last digits of results depend on (results, experiments, benchmarks)."""
import platform
import subprocess
from datetime import datetime, timezone
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


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the last commit of a folder, by default of this package. None outside of a git checkout."""
    command = ["git", "-C", folder, "log", "-1", "--format=%h", "--", "."]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:  # no git here
        return None
    return found.stdout.strip() or None


def made() -> dict[str, str | None]:
    """Return when and by what a result is made: "date" (UTC), "commit" of this package, and "environment"."""
    import torch
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit(),
            "environment": environment(torch.get_num_threads())}
