"""Device, precision and memory."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nmt.config.errors import UserError
from nmt.system import machine as module
from nmt.system.machine import Machine, is_out_of_memory


def test_auto_finds_something_that_exists() -> None:
    machine = Machine.choose("auto", "auto", None)
    assert torch.zeros(1, device=machine.device).device.type == machine.device.type
    assert machine.precision in {"fp32", "bf16", "fp16"}


def test_auto_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    for gains, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(module, "_gains_from_bf16", lambda _, gains=gains: gains)
        assert Machine.choose("cpu", "auto", None).precision == expected


def test_autocast_reduces_matrix_products_alone() -> None:
    a = torch.randn(4, 4)
    with Machine.choose("cpu", "bf16", None).autocast():
        assert (a @ a).dtype == torch.bfloat16
    with Machine.choose("cpu", "fp32", None).autocast():
        assert (a @ a).dtype == torch.float32


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    try:
        assert Machine.choose("cpu", "fp32", 2).describe()["threads"] == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_missing_device_is_an_error(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"device={device}: this machine"):
        Machine.choose(device, "auto", None)


def test_fp16_on_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match="precision=fp16 needs a CUDA GPU"):
        Machine.choose("cpu", "fp16", None)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_memory_that_large_tensors_free_is_kept() -> None:
    """Otherwise each update would have a page fault for each page of its large tensors."""
    code = """
import resource, torch
from nmt.system.machine import tune_memory, is_out_of_memory
def faults():
    tensors = [torch.empty(size * 2**18).fill_(1.0) for size in (2, 8, 31, 64)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
tune_memory()
torch.set_num_threads(1)
for _ in range(6):
    before = faults()
print(faults() - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 1000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="of Linux alone")
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
    inherited = {key: value for key, value in os.environ.items() if not key.endswith("_CACHE_CAPACITY")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=inherited)
    assert int(found.stdout) < 40 * 1024


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
