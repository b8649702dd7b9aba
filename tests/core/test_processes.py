"""Claims about processes that compute on a CPU (integration/processes.py)."""
import os
import subprocess
import sys

import pytest

STEPS = """
import resource, torch
from open_clip_mdc.integration.processes import keep_freed_memory
if {keep}:
    keep_freed_memory("cpu")
for _ in range(10):
    torch.ones(2 ** 24)  # 64 MiB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2 ** 24)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool, **environment: str) -> int:
    """The pages that the system hands out for ten tensors of the same size, one after another."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return int(subprocess.run([sys.executable, "-c", STEPS.format(keep=keep)], check=True, capture_output=True,
                              text=True, env=clean | environment).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_used_again_unless_the_environment_decides():
    plain = faults(keep=False)
    assert plain > 1000  # otherwise there is nothing to keep
    assert faults(keep=True) < plain / 10
    assert faults(keep=True, MALLOC_MMAP_THRESHOLD_="65536") > 1000
