"""Device and precision."""

import pytest
import torch

from nmt import machine as module
from nmt.config.errors import UserError
from nmt.machine import Machine


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
