"""The cost of updates, measured without a clock: matrix products and operations per step, memory, padding."""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from nmt.config.schema import TrainConfig
from nmt.data.batching import plan
from nmt.model.build import build_model
from nmt.ops import output_loss as module
from nmt.ops import products
from nmt.ops.output_loss import ChunkSizes, OutputLoss, SeveralReadouts, of_mixture, output_loss
from nmt.ops.products import matmul
from nmt.training.losses import likelihood

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")
B, S, V = 6, 9, 50


class Counting(TorchDispatchMode):
    """Counts operations by name, and records the size of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        made = func(*args, **(kwargs or {}))
        self.operations[func._schema.name] += 1
        self.largest = max([self.largest, *(each.numel() for each in (made,) if isinstance(each, torch.Tensor))])
        return made


def update(config: TrainConfig, T: int) -> Counting:
    """Count the operations of a forward and backward pass over T target positions."""
    torch.manual_seed(0)
    model = build_model(config, V, V, (0, 0)).train()
    source, target = torch.randint(4, V, (B, S)), torch.randint(4, V, (B, T))
    with Counting() as counting:
        decoded = model(source, torch.full((B,), S), target)
        decoded.prediction.loss(model.output.layer(), target, 0, partial(likelihood, smoothing=0.0)).total.backward()
    return counting


def of_one_step(config: TrainConfig) -> tuple[int, int]:
    """Count the matrix products and all operations that one more target position costs."""
    short, long = (update(config, T).operations for T in (5, 15))
    difference = Counter({name: long[name] - short[name] for name in long})
    return sum(difference[name] for name in PRODUCTS) // 10, sum(difference.values()) // 10


@pytest.mark.parametrize(
    ("preset", "products", "operations"),
    [
        # Forward: recurrence, query, context and, with input feeding, products of the previous readout, the output and
        # the context. Backward: the same number, and two for the additive energies. Gradients of parameters are
        # computed after the loop.
        ("luong_concat", 13, 190),
        ("bahdanau", 9, 150),
        ("multihead", 16, 190),
        ("none", 2, 40),
    ],
)
def test_a_step_costs_no_more_than(preset: str, products: int, operations: int) -> None:
    config = tiny_config(f"attention={preset}", "decoder.dropout=0.1")
    found = of_one_step(config)
    assert found[0] == products
    assert found[1] <= operations


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention=luong_concat"],
        ["attention=multihead"],
        ["attention=luong_local_p", "attention.window.reach=1"],  # narrow enough to gather its positions
    ],
    ids=lambda overrides: overrides[0],
)
def test_keys_and_values_have_one_gradient_for_all_steps(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Size] = []
    original = products._Defer.forward

    def noted(ctx: Any, uses: Any, cast: Any, *tensors: Any) -> Any:  # noqa: ANN401
        made.extend(tensor.shape for tensor in tensors if tensor is not None and S in tensor.shape)
        return original(ctx, uses, cast, *tensors)

    monkeypatch.setattr(products._Defer, "forward", staticmethod(noted))
    config = tiny_config(*overrides)
    counts = []
    for T in (3, 9):
        made.clear()
        update(config, T)
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


def test_no_tensor_grows_with_source_times_target() -> None:
    """Neither the hidden layer of additive attention, (B, T, S, A), is kept, nor a step's tensors for all steps."""
    config = tiny_config("attention=luong_concat", "attention.score.dim=64")
    assert update(config, 100).largest < B * 100 * S * 64 / 2


def memory_of(work: Callable[[], OutputLoss]) -> list[int]:
    """List the bytes that each operation of a loss and of its backward pass allocates."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work().total.backward()
    return [event.self_cpu_memory_usage for event in profile.events()]


def test_the_loss_holds_the_logits_once() -> None:
    """Probabilities exist only for a chunk that fits a cache."""
    operands = [torch.randn(1, 1000, 4), torch.randn(5000, 4), torch.zeros(5000)]
    for tensor in operands:
        tensor.requires_grad_()
    everywhere, targets = torch.ones(1000, dtype=torch.bool), torch.randint(5000, (1000,))
    made = memory_of(lambda: output_loss(*operands, everywhere, partial(likelihood, smoothing=0.1), targets))
    logits = 4 * 1000 * 5000
    assert sum(size for size in made if size > logits / 2) == logits


def test_the_loss_of_a_mixture_holds_the_logits_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, each chunk has only logits, probabilities and their gradient in memory."""
    N, K, R, words = 40, 8, 4, 3000
    chunks: list[weakref.ref[torch.Tensor]] = []

    def noted(*operands: torch.Tensor) -> torch.Tensor:
        assert all(chunk() is None for chunk in chunks)
        logits = matmul(*operands)
        chunks.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(module, "matmul", noted)
    monkeypatch.setattr(module, "leaves_out", lambda _: False)
    *operands, shares = torch.randn(1, N, K, R), torch.randn(words, R), torch.zeros(words), torch.rand(1, N, K)
    for tensor in (*operands, shares):
        tensor.requires_grad_()
    criterion = of_mixture(partial(likelihood, smoothing=0.1))
    given = *operands, torch.ones(N, dtype=torch.bool), criterion, torch.randint(words, (N,))
    options: dict[str, Any] = {"layout": SeveralReadouts, "sizes": ChunkSizes(10 * K * words, 10 * K * words)}
    made = memory_of(lambda: output_loss(*given, shares=shares.softmax(-1), **options))
    assert len(chunks) == 4
    logits = 4 * N * K * words
    assert sum(size for size in made if size > logits / 8) == 3 * logits


def test_batches_have_little_padding() -> None:
    """Lengths are distributed as in captions; the longest side is nearly without padding."""
    draw = np.random.default_rng(1)
    target = np.clip(draw.lognormal(2.6, 0.35, 29000), 3, 60).astype(int)
    source = np.clip(target * draw.normal(1, 0.12, 29000), 3, 60).astype(int)
    batches = plan(source, target, batch_tokens=2048, batch_sentences=None, rng=draw)
    for lengths, most in ((target, 0.01), (source, 0.15)):
        padded = sum(len(batch) * lengths[batch].max() for batch in batches)
        assert 1 - lengths.sum() / padded < most
