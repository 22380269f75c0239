"""Utilisation: the counted FLOPs, the cached rate of the product, and what a run records."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY

import nmt
from nmt.cli.compose import compose
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch
from nmt.model.build import build_model
from nmt.system.machine import Machine
from nmt.training import utilisation
from nmt.training.job import Job, set_up


@pytest.mark.parametrize("positions", [1, 4])
def test_a_larger_vocabulary_adds_the_flops_of_its_rows(positions: int) -> None:
    """Each of 2 x 6 readouts takes 2 R FLOPs per row of the output layer forward, and twice as many backward.

    A sum over 4 source positions has as many readouts for each target token, and weighs their products.
    """
    top = ["attention=marginal", "attention.alignment.top_k=4", "attention.alignment.min_share=0"]
    config = compose("train", TrainConfig, [*TINY, *(top if positions > 1 else [])])
    sentences = torch.randint(4, 20, (2, 6))
    batch = Batch(np.arange(2), sentences, torch.tensor([6, 6]), sentences, sentences, target_tokens=12)
    small, large = (build_model(config, size, size, (0, 0)) for size in (20, 50))
    row = 3 * 2 * small(sentences, batch.lengths, sentences).readouts.shape[-1]
    counts = [utilisation.flops_per_token(model, [batch], pad=0) for model in (small, large)]
    if positions == 1:
        assert counts[1] - counts[0] == pytest.approx(30 * row)
    else:
        assert counts[1] - counts[0] > 30 * row * positions
    assert counts[0] > 20 * row  # encoder, attention and cells


def test_the_best_rate_of_the_product_is_kept_for_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, path = Machine.choose("cpu", "fp32", 1), tmp_path / utilisation.RATES
    assert 1e8 < utilisation.product_rate(machine) < 1e13
    path.write_text("damaged")
    for measured, best in ((3.0, 3.0), (2.0, 3.0), (4.0, 4.0)):
        monkeypatch.setattr(utilisation, "product_rate", lambda _, rate=measured: rate)
        assert utilisation.best_product_rate(machine, tmp_path) == best
    assert utilisation.best_product_rate(machine._replace(precision="bf16"), tmp_path) == 4.0
    assert len(json.loads(path.read_text())) == 2


def test_a_run_records_its_utilisation_and_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilisation, "product_rate", lambda _: 1e9)
    words = [*TINY, "training.max_steps=10", f"data.cache_dir={tmp_path}"]
    run = nmt.train(*words, directory=tmp_path / "run")
    config = compose("train", TrainConfig, words)
    with Job.join(config, tmp_path / "other") as job:
        ideal = utilisation.ideal_seconds(set_up(job).trainer, tmp_path)
    lines = [line for line in run.history if "train/utilisation" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["train/utilisation"] == pytest.approx(line["train/tokens_per_second"] * ideal)
    training = json.loads((tmp_path / "run" / "manifest.json").read_text())["training"]
    share = training["target_tokens_per_second"] * ideal
    assert training["utilisation"] == pytest.approx(share, abs=1e-4)  # four decimals
    assert training["time_fractions"]["recording"] == 0
    assert 0 < training["time_fractions"]["loading"] < 1 - training["time_fractions"]["validation"] < 1
