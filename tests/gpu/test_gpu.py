"""A GPU gives the results of the CPU: every preset trains on it, is interrupted, resumes and translates.

Run by `make test-gpu` on a machine with a CUDA GPU.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, run_config, tiny_config
from torch import Tensor, nn

from nmt import Translator
from nmt.attention.scores import additive_energies
from nmt.config.checks import config_dir
from nmt.data.batching import make_batches
from nmt.data.prepare import prepare
from nmt.model.build import build_model
from nmt.model.checkpoints import new_model
from nmt.model.output import Readout
from nmt.model.recurrent import gru_gates, lstm_gates
from nmt.system.machine import Machine
from nmt.system.run import RunDirectory
from nmt.training.cuda_graphs import GraphedPasses
from nmt.training.losses import Objective
from nmt.training.trainer import Trainer

DEVICE = "cuda"
UPDATES, INTERRUPTED_AT = 50, 20
SIZES = ["data.train_size=2000", "data.test_size=64", "validation.every=25", "validation.unit=steps"]
PRESETS = sorted(path.stem for path in (config_dir() / "attention").glob("*.yaml"))
CLOSE: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}  # tolerance, because cuDNN computes in TF32
STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0"]
RANDOM = {"hard", "gumbel", "monotonic", "mocha"}  # sample positions or noise in training, take the argmax in search

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def train(run: Path, *words: str, stop_at: int | None = None) -> None:
    """Run nmt-train, and send Ctrl-C once it has logged step `stop_at`."""
    tiny = [word for word in TINY if not word.startswith(("device=", "training.max_epochs="))]
    overrides = [*tiny, *SIZES, f"training.max_steps={UPDATES}", f"device={DEVICE}", f"hydra.run.dir={run}", *words]
    entry = "from nmt.cli.entry import train; train()"
    arguments = [f"run={run}"] if (run / "config.yaml").exists() else overrides
    process = subprocess.Popen([sys.executable, "-c", entry, *arguments], stderr=subprocess.PIPE, text=True)
    while stop_at is not None and process.poll() is None:
        if max((line["step"] for line in metrics(run)), default=0) >= stop_at:
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.02)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == (0 if stop_at is None else 130), errors[-3000:]


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def losses(run: Path) -> list[float]:
    return [line["validation/loss"] for line in metrics(run) if "validation/loss" in line]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_learns_resumes_and_translates_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    train(run.path, f"attention={name}", stop_at=INTERRUPTED_AT)
    assert 0 < max(line["step"] for line in metrics(run.path)) < UPDATES
    train(run.path)
    assert max(line["step"] for line in metrics(run.path)) == UPDATES
    first, last = losses(run.path)
    assert last < first
    sources, targets, _ = run.held_out("test")
    there, here = (Translator.load(run.path, device=device, precision="fp32") for device in (DEVICE, "cpu"))
    close = 0
    for one, other in zip(there.score(sources, targets), here.score(sources, targets), strict=True):
        close += one.log_prob == pytest.approx(other.log_prob, rel=1e-3)
    # Hard attention sometimes chooses among nearly equal positions, where rounding decides.
    assert close >= (0.95 if name in RANDOM else 1.0) * len(sources)
    pairs = zip(there.translate(sources), here.translate(sources), strict=True)
    assert sum(one.text == other.text for one, other in pairs) >= 0.95 * len(sources)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in RANDOM])
def test_a_preset_s_gradient_is_that_of_the_cpu(name: str) -> None:
    config = tiny_config(f"attention={name}", "embedding.dropout=0")
    model = build_model(config, 50, 50, (0, 0)).double().train()
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        elif hasattr(module, "p"):
            module.p = 0.0
    source, target = torch.randint(4, 50, (5, 9)), torch.randint(4, 50, (5, 7))
    lengths = torch.tensor([9, 9, 6, 4, 1])
    found: list[list[Tensor]] = []
    for device in ("cpu", DEVICE):
        model.to(device).zero_grad(set_to_none=True)
        readouts = model(source.to(device), lengths, target.to(device)).readouts
        model.output(readouts).log_softmax(-1)[..., 7].sum().backward()
        found.append([parameter.grad.cpu().clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def updated(name: str, graphs: int, *more: str) -> tuple[list[Tensor], GraphedPasses]:
    """Return the losses and gradient norms of 20 updates, with or without graphs, and the recorder of the passes."""
    overrides = [word for word in TINY if not word.startswith("device=")]
    given = [f"device={DEVICE}", f"attention={name}", "optimizer.lr=0.002", "schedule=constant", *more]
    config = run_config(*overrides, "training.cuda_graphs=40", *given)
    prepared = prepare(config.data, config.tokenizer)
    machine = Machine.choose(config.device, config.precision, None)
    torch.manual_seed(config.seed)
    model = new_model(config, prepared.tokenizers).to(machine.device).train()
    objective = Objective(model, config, prepared.tokenizers.target.pad)
    batches = make_batches(prepared, "train", config)
    trainer = Trainer(config, model, objective, batches, machine)
    graphed = trainer.graphed
    assert graphed is not None
    if not graphs:
        trainer.graphed = None
    plan, found = batches.epoch(0), []
    for step in range(1, 21):
        update = trainer.update(batches.load(plan[step % len(plan)], 0))
        found.append(torch.stack([*update.terms.values(), update.gradient_norm]).cpu())
    return found, graphed


@pytest.mark.parametrize("name", ["bahdanau", "gnmt", "marginal", "nematus"])
def test_graphs_compute_what_is_computed_without_them(name: str) -> None:
    without, with_graphs = (updated(name, graphs, *STILL) for graphs in (0, 40))
    assert not without[1].recordings
    assert with_graphs[1].recordings
    torch.testing.assert_close(with_graphs[0], without[0], **CLOSE)


def test_training_goes_on_after_a_recording_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Readout.forward

    def waiting(self: Readout, state: Tensor, *others: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            state.sum().item()
        return real(self, state, *others)

    expected = updated("luong_dot", 0, *STILL)[0]
    monkeypatch.setattr(Readout, "forward", waiting)
    found, graphed = updated("luong_dot", 40, *STILL)
    assert graphed.limit == len(graphed.recordings) == 0
    torch.testing.assert_close(found, expected, **CLOSE)


def test_operations_of_their_own_on_a_gpu() -> None:
    """Compares the fused gates of GRU and LSTM, and additive energies, on the GPU and the CPU."""
    operations = {
        gru_gates: [(3, 12), (3, 12), (3, 4)],
        lambda *each: torch.cat(lstm_gates(*each)): [(3, 16), (3, 16), (3, 4)],
        additive_energies: [(2, 3, 5), (2, 4, 5), (1, 5), (2, 4, 2), (5, 2)],
    }
    for operation, shapes in operations.items():
        here = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        there = [each.detach().to(DEVICE).requires_grad_() for each in here]
        results = [operation(*each) for each in (here, there)]  # type: ignore[operator]
        torch.testing.assert_close(results[1].cpu(), results[0])
        gradients = [
            torch.autograd.grad(result.square().sum(), each)
            for result, each in zip(results, (here, there), strict=True)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(other.cpu(), one)
