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
from nmt.training.job import Job, build, prepare


def test_a_larger_vocabulary_adds_the_flops_of_its_rows() -> None:
    """Each of 2 x 6 positions takes 2 R FLOPs per row of the output layer forward, and twice as many backward."""
    config, _ = compose("train", TrainConfig, TINY)
    sentences = torch.randint(4, 20, (2, 6))
    batch = Batch(np.arange(2), sentences, torch.tensor([6, 5]), sentences, sentences, target_tokens=10)
    small, large = (build_model(config, size, size, (0, 0)) for size in (20, 50))
    readout = small(sentences, batch.lengths, sentences).readouts.shape[-1]
    counts = [utilisation.flops_per_token(model, [batch], pad=0) for model in (small, large)]
    assert counts[1] - counts[0] == pytest.approx(3 * 2 * readout * (50 - 20) * 12 / 10)
    assert counts[0] > 3 * 2 * readout * 20 * 12 / 10  # encoder, attention and cells


def test_each_position_of_a_sum_adds_the_flops_of_its_output() -> None:
    """Each of the 2 x 6 target positions sums over 4 source positions. Each of them adds one product."""
    counts = []
    for vocabulary in (20, 50):
        words = [*TINY, "attention=marginal", "attention.alignment.top_k=4", "attention.alignment.min_share=0"]
        model = build_model(compose("train", TrainConfig, words)[0], vocabulary, vocabulary, (0, 0))
        sentences = torch.randint(4, 20, (2, 6))
        batch = Batch(np.arange(2), sentences, torch.tensor([6, 6]), sentences, sentences, target_tokens=12)
        counts.append(utilisation.flops_per_token(model, [batch], pad=0))
    readout = model(sentences, batch.lengths, sentences).readouts.shape[-1]
    assert counts[1] - counts[0] > 3 * 2 * readout * (50 - 20) * 4  # the products, and their weighted sums


def test_the_rate_of_the_product_is_measured_once_for_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, path = Machine.choose("cpu", "fp32", 1), tmp_path / utilisation.RATES
    path.write_text("damaged")
    rate = utilisation.cached_product_rate(machine, tmp_path)
    assert 1e8 < rate < 1e13
    assert utilisation.cached_product_rate(machine, tmp_path) == rate
    assert utilisation.cached_product_rate(machine._replace(precision="bf16"), tmp_path) != rate
    assert len(json.loads(path.read_text())) == 2
    monkeypatch.setattr(utilisation, "product_rate", lambda _: 0.0)
    assert utilisation.cached_product_rate(machine, tmp_path) == rate


def test_a_run_records_its_utilisation_and_where_its_time_went(tmp_path: Path) -> None:
    words = [*TINY, "training.max_steps=10"]
    run = nmt.train(*words, directory=tmp_path / "run")
    config, _ = compose("train", TrainConfig, words)
    with Job.join(config, tmp_path / "other") as job:
        ideal = utilisation.ideal_seconds(build(job, prepare(job, [], {})).trainer, Path(config.data.cache_dir))
    lines = [line for line in run.history if "train/utilisation" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["train/utilisation"] == pytest.approx(line["train/tokens_per_second"] * ideal)
    training = json.loads((tmp_path / "run" / "manifest.json").read_text())["training"]
    share = training["target_tokens_per_second"] * ideal
    assert training["utilisation"] == pytest.approx(share, abs=1e-4)  # four decimals
    assert training["shares"]["recording"] == 0
    assert 0 < training["shares"]["loading"] < 1 - training["shares"]["validation"] < 1
