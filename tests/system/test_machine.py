"""Device, precision and memory."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from nmt.config.errors import UserError
from nmt.system import machine as module
from nmt.system.machine import Machine, Usage, is_contended, is_out_of_memory

LINUX = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="of Linux alone")


def test_a_machine_has_the_device_threads_and_precision_that_are_asked_for() -> None:
    auto = Machine.choose("auto", "auto", None)
    assert torch.zeros(1, device=auto.device).device.type == auto.device.type
    assert auto.precision in {"fp32", "bf16", "fp16"}
    a, before = torch.randn(4, 4), torch.get_num_threads()
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with Machine.choose("cpu", precision, None).autocast():
            assert (a @ a).dtype == dtype
    try:
        assert Machine.choose("cpu", "fp32", 2).describe()["threads"] == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "precision", "message"),
    [
        ("cuda", "auto", "device=cuda: this machine"),
        ("mps", "auto", "device=mps: this machine"),
        ("cpu", "fp16", "precision=fp16 needs a CUDA GPU"),
    ],
)
def test_what_the_machine_lacks_is_an_error(
    device: str, precision: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        Machine.choose(device, precision, None)


def in_new_process(code: str) -> str:
    """Run a program whose threads and cache of kernels no variable of this process limits."""
    limits = (*module.SETTINGS, "OMP_NUM_THREADS", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    kept = {key: value for key, value in os.environ.items() if key not in limits}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=kept).stdout


@LINUX
@pytest.mark.slow
def test_products_of_ever_new_shapes_take_no_more_memory() -> None:
    """Otherwise each shape would keep half a megabyte of kernels, where oneDNN computes bf16."""
    code = """
import torch
from nmt.system import machine
from torch.nn.functional import linear
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
machine.KERNELS = 32
machine.tune_memory()
torch.set_num_threads(1)
weight = torch.ones(64, 512, dtype=torch.bfloat16)
for rows in range(1, 257):
    linear(torch.ones(rows, 512, dtype=torch.bfloat16), weight)
    if rows == 128:
        before = resident()
print(resident() - before)
"""
    assert int(in_new_process(code)) < 40 * 1024


def test_each_process_of_a_machine_takes_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    names = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert Machine.choose("cuda", "fp32", None).device == torch.device("cuda", 1)
    assert chosen == [1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"fewer GPUs \(2\) than processes"):
        Machine.choose("cuda", "fp32", None)  # rank 1 too, so that rank 0 prints the error
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"device=cuda: this machine has fewer GPUs \(2\) than processes"):
        Machine.choose("cuda", "fp32", None)
    assert Machine.choose("cpu", "fp32", None).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] can't allocate memory: 99"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_failed_allocations_are_recognised(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


# Waiting threads


@pytest.mark.parametrize(
    ("others", "threads", "cpus", "expected"),
    [
        (0.0, 2, 2, False),
        (0.2, 2, 2, False),  # a daemon in the background
        (1.0, 2, 2, True),
        (2.0, 2, 2, True),
        (1.0, 2, 4, False),  # enough CPUs for all
        (3.0, 2, 4, True),
        (14.0, 2, 16, False),
    ],
)
def test_the_machine_is_busy_if_others_leave_too_little(others: float, threads: int, cpus: int, expected: bool) -> None:
    before, after = Usage(100.0, 50.0, 10.0), Usage(100.0 + 3.0 + 2 * others, 53.0, 12.0)
    assert is_contended(before, after, threads, cpus) is expected


@LINUX
@pytest.mark.slow
def test_a_watch_ends_with_its_context_and_one_thread_and_users_own_settings_need_none() -> None:
    code = """
import os, threading, torch
from nmt.system.machine import fair_waiting
for threads, setting in ((2, {}), (1, {}), (2, {"GOMP_SPINCOUNT": "1000"}), (2, {"OMP_WAIT_POLICY": "active"})):
    torch.set_num_threads(threads)
    os.environ.update(setting)
    with fair_waiting():
        within = threading.active_count()
    print(within, threading.active_count())
    for name in setting:
        del os.environ[name]
"""
    assert in_new_process(code).splitlines() == ["2 1", "1 1", "1 1", "1 1"]


def test_the_watch_reacts_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle threads are added once when the machine becomes busy, and end when it is idle again."""
    answers, seen = iter([True, True, False, False, True]), []

    class Recorded:
        def __init__(self, threads: int, cpus: int) -> None:
            seen.append("start")

        def end(self) -> None:
            seen.append("end")

    end = threading.Event()

    def next_answer(*_: object) -> bool:
        answer = next(answers, None)
        if answer is None:
            end.set()
        return bool(answer)

    monkeypatch.setattr(module, "PERIOD", 0.0)
    monkeypatch.setattr(module, "IdleThreads", Recorded)
    monkeypatch.setattr(module, "is_contended", next_answer)
    module._watch(2, 2, end)
    assert seen == ["start", "end", "start", "end"]
