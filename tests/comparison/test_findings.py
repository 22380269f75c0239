"""The findings and the experiments that train them belong together, and what a statement measures."""

import itertools
import statistics
from typing import Any

import pytest
from conftest import values_of
from omegaconf import OmegaConf

from nmt.cli.help import choices_of
from nmt.compare.findings import FINDINGS, fall, find_finding, lead, relative_difference, slope, slope_difference
from nmt.compare.verdict import Scores
from nmt.config.compose import config_dir, validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig

LATENT = "deng_2018_table_1"


def recipe(name: str) -> Any:  # noqa: ANN401
    return OmegaConf.load(config_dir() / "experiment" / "papers" / f"{name}.yaml")


def jobs(name: str) -> list[dict[str, str]]:
    """What each job of the sweep sets."""
    params = {key: str(values).split(",") for key, values in recipe(name).hydra.sweeper.params.items()}
    return [dict(zip(params, chosen, strict=True)) for chosen in itertools.product(*params.values())]


def test_every_finding_has_an_experiment_which_names_it() -> None:
    assert {path.stem for path in (config_dir() / "experiment" / "papers").glob("*.yaml")} == set(FINDINGS)
    for name in FINDINGS:
        assert recipe(name).hydra.callbacks.sweep.finding == name
        assert recipe(name).hydra.mode == "MULTIRUN"
        assert choices_of("experiment", "train").count(f"papers/{name}") == 1


@pytest.mark.parametrize("name", FINDINGS)
def test_the_jobs_are_the_models_with_three_seeds(name: str) -> None:
    models = [model.choices.items() for model in FINDINGS[name].models]
    trained = [[number for number, choices in enumerate(models) if choices <= job.items()] for job in jobs(name)]
    assert sorted(trained) == sorted([number] for number in range(len(models)) for _ in range(3))
    assert {job["seed"] for job in jobs(name)} == {"1", "2", "3"}
    labels = {model.label for model in FINDINGS[name].models}
    assert {label for statement in FINDINGS[name].statements for label in statement.models} == labels


def composed(*recipes: str, job: dict[str, str]) -> TrainConfig:
    given = [f"experiment=[{','.join(recipes)}]", *(f"{key}={value}" for key, value in job.items())]
    return validated(TrainConfig, values_of("train", given))


@pytest.mark.parametrize("name", FINDINGS)
def test_every_model_composes_alone_and_with_a_recipe(name: str) -> None:
    first, *others = (job for job in jobs(name) if job["seed"] == "1")
    for job in (first, *others):
        assert composed(f"papers/{name}", job=job).data.kind == "demo"
    assert composed("multi30k_sprint", f"papers/{name}", job=first).data.kind == "hub"


@pytest.mark.parametrize("attention", ["luong_general", "hard", "marginal", "variational"])
def test_the_latent_alignments_share_decoder_and_score(attention: str) -> None:
    (job,) = (job for job in jobs(LATENT) if (job["attention"], job["seed"]) == (attention, "1"))
    config, soft = (
        composed(f"papers/{LATENT}", job=job),
        composed(f"papers/{LATENT}", job=job | {"attention": "luong_general"}),
    )
    assert config.decoder == soft.decoder
    assert config.attention.kind == "attention"
    assert config.attention.score == soft.attention.score
    assert (config.decoder.attend, config.decoder.input_feeding) == ("after", True)


def test_monotonic_and_soft_differ_in_the_normalizer_alone() -> None:
    soft, monotonic = (
        composed("papers/raffel_2017_monotonic", job=jobs("raffel_2017_monotonic")[row]) for row in (0, 3)
    )
    assert soft.attention.kind == monotonic.attention.kind == "attention"
    assert (soft.attention.normalizer.kind, monotonic.attention.normalizer.kind) == ("softmax", "monotonic")
    same = monotonic.attention.model_copy(update={"normalizer": soft.attention.normalizer})
    assert monotonic.model_copy(update={"attention": same}) == soft


def test_an_unknown_finding_names_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"^finding=raffel_2017: not one of .*; did you mean 'raffel_2017_monotonic'\?$"
    ):
        find_finding("raffel_2017")


def by_length(*bleu: float) -> Scores:
    """Parts with 1-9, 11-19, 21-29 ... words."""
    parts = [{"words": [10 * n + 1, 10 * n + 9], "sentences": 5 + n, "bleu": value} for n, value in enumerate(bleu)]
    return Scores(0.0, parts)


def test_the_slope_is_in_percent_per_ten_words() -> None:
    line = slope(by_length(50, 40, 30))
    assert line is not None
    assert line == pytest.approx(-100 * 10 / ((5 * 50 + 6 * 40 + 7 * 30) / 18))
    assert fall(by_length(50, 40, 30)) == -line
    assert slope(by_length(5, 4, 3)) == pytest.approx(line)  # does not depend on the scale of BLEU
    assert slope(by_length(30, 30)) == pytest.approx(0, abs=1e-9)
    assert slope_difference(by_length(30, 30), by_length(50, 40, 30)) == pytest.approx(-line)


def test_a_part_counts_as_often_as_it_has_sentences() -> None:
    scores = by_length(30, 28, 10)
    points = [(sum(part["words"]) / 2, part["bleu"]) for part in scores.by_length for _ in range(part["sentences"])]
    lengths, bleu = zip(*points, strict=True)
    fitted = statistics.linear_regression(lengths, bleu)
    assert slope(scores) == pytest.approx(100 * 10 * fitted.slope / statistics.mean(bleu))


def test_no_slope_without_lengths_or_without_bleu() -> None:
    assert slope(by_length(30)) is None
    assert slope(Scores(30)) is None
    assert slope(by_length(0, 0)) is None
    assert fall(by_length(30)) is None
    assert slope_difference(by_length(30, 20), by_length(30)) is None


def test_other_measures() -> None:
    assert lead(Scores(30), Scores(28), Scores(29)) == 1
    assert lead(Scores(30), Scores(33), Scores(29)) == -3
    assert relative_difference(Scores(27), Scores(30)) == pytest.approx(-10)
    assert relative_difference(Scores(27), Scores(0)) is None
