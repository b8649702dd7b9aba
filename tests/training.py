"""Run open_clip_train in tests and read its output."""
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from conftest import run

MAIN = ("python", "-m", "open_clip_mdc.train")
TORCHRUN = ("python", "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")


def train_flags(*flags, logs, name="run", data=None, model="MDC-ViT-Ti-8", workers="0") -> list[str]:
    """Return the flags of a short float32 run on the CPU. Later flags override earlier ones."""
    defaults = ["--model", model, "--logs", str(logs), "--name", name, "--precision", "fp32", "--workers", workers,
                "--warmup", "2", "--lr", "1e-3", "--device", "cpu", "--log-every-n-steps", "1"]
    if data is not None:
        defaults += ["--train-data", str(data)]
    return defaults + [str(f) for f in flags]


def open_clip_train(*flags, launcher=MAIN, check=True, **where):
    """One run by the real command."""
    return run(*launcher, *train_flags(*flags, **where), check=check, fork=True)


def open_clip_train_each(*runs: list[str]):
    """Several runs by the real `main`, one after the other in one process."""
    script = f"from open_clip_mdc.train import main\nfor argv in {list(runs)!r}: assert not main(argv)"
    return run("python", "-c", script, fork=True)


def run_ranks(*command: str, check=True) -> list:
    """Run a command in two processes that meet as those of torchrun, which takes 10 s more to start them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])

    def run_rank(rank: str):
        return run(*command, check=check, fork=True, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2",
                   MASTER_ADDR="localhost", MASTER_PORT=port)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run_rank, "01"))


def losses(logs: Path, name="run") -> list[float]:
    log = (logs / name / "out.log").read_text()
    return [float(x) for x in re.findall(r"Train Epoch.*?Caption_loss: ([\d.]+)", log)]


def weights(logs: Path, epoch: int, name="run") -> dict[str, torch.Tensor]:
    path = logs / name / "checkpoints" / f"epoch_{epoch}.pt"
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    return {k.removeprefix("module."): v for k, v in state.items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether two state dicts are the same bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
