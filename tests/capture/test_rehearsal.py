"""The capture that a fork server makes before it forks workers."""

import subprocess
import sys

SCRIPT = """
import logging, os, sys
logging.basicConfig(level=logging.DEBUG)
import torch
from varuna.capture.rehearsal import rehearse
from varuna.capture.trace import trace

original, traced = trace.export, []
trace.export = lambda *args, **kwargs: traced.append(original(*args, **kwargs)) or traced[-1]
if torch.cuda._device_count_nvml() < 0:  # a build for CUDA, without its driver: there is none
    torch.cuda._device_count_nvml = lambda: 0
before, threads = dict(os.environ), len(os.listdir("/proc/self/task"))
rehearse()
assert len(traced) == 1, "the model was not captured"
assert len(os.listdir("/proc/self/task")) == threads, "a process that forks must not have threads"
assert not torch.cuda.is_initialized() and dict(os.environ) == before

torch.version.cuda, torch.cuda._device_count_nvml = "13.0", lambda: -1  # to look for GPUs would use them
rehearse()
assert len(traced) == 1, "CUDA must not be initialized in a process that forks"
"""


def test_a_rehearsal_captures_and_leaves_no_thread_and_no_gpu_behind() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rehearsal of a capture failed" not in done.stderr
