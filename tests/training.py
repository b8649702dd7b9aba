"""Run open_clip_train in tests and read its output."""
import re
import socket
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from conftest import run, words

import open_clip_mdc

MAIN = ("python", "-m", "open_clip_mdc.train")
TORCHRUN = ("python", "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")


def train_flags(*flags, logs, name="run", data=None, model="MDC-ViT-Ti-8", workers="0") -> list[str]:
    """Return the `words` of a short float32 run on the CPU. Later flags override earlier ones."""
    defaults = (f"--model {model} --precision fp32 --workers {workers} --warmup 2 --lr 1e-3 --device cpu "
                "--log-every-n-steps 1 --batch-size 12 --epochs 1")
    return words(defaults, "--logs", logs, "--name", name, *(("--train-data", data) if data else ()), *flags)


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


def pipeline(shards, transform, is_train: bool = True, tokenizer=lambda text: [text], **more):
    """Return what open_clip_train makes of shards with the plug-in. `more` are its arguments."""
    open_clip_mdc.register(training=True)
    from open_clip_train import data
    given = dict(train_data=str(shards), val_data=str(shards), train_num_samples=1, val_num_samples=None, rank=0,
                 world_size=1, workers=0, batch_size=1, seed=0, device="cpu", dataset_resampled=False,
                 train_data_upsampling_factors=None)
    return data.get_wds_dataset(Namespace(**given | more), transform, is_train, tokenizer=tokenizer)


def losses(logs: Path, name="run", kind="Caption_loss") -> list[float]:
    log = (logs / name / "out.log").read_text()
    return [float(x) for x in re.findall(rf"Train Epoch.*?{kind}: ([\d.]+)", log)]


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    return {k.removeprefix("module."): v for k, v in state.items()}


def checkpoint(logs: Path, epoch: int, name="run") -> Path:
    return logs / name / f"checkpoints/epoch_{epoch}.pt"


def weights(logs: Path, epoch: int, name="run") -> dict[str, torch.Tensor]:
    return state_of(checkpoint(logs, epoch, name))


def tower(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in state.items() if name.startswith("visual.")}


def holds(whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor]) -> bool:
    """Return whether a state dict has all of another, bit for bit."""
    return all(torch.equal(whole[name], x) for name, x in part.items())


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether two state dicts are the same bit for bit."""
    return a.keys() == b.keys() and holds(a, b)
