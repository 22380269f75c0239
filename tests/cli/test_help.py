"""--help shows each value with its comment from configs/."""

from string import Template

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nmt.cli import help
from nmt.config.compose import config_dir

TRAIN = ["data=files", "attention=luong_local_p", "encoder/self_attention=attention", "optimizer=sgd", "size=small"]


def printed_help(command: str, overrides: list[str]) -> tuple[str, dict[object, object]]:
    """Return the text of --help about the values, and the values themselves."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose(command, overrides, return_hydra_config=True)
    values = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    del values["hydra"]
    return Template(help.values(_root_=config)).substitute(), values


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        ("train", TRAIN),
        ("translate", ["search=beam"]),
    ],
)
def test_comments_change_no_value(command: str, overrides: list[str]) -> None:
    text, values = printed_help(command, overrides)
    assert yaml.safe_load(text) == values
    assert max(map(len, text.splitlines())) <= help.WIDTH


@pytest.mark.parametrize(
    "line",
    [
        "  patience: 10              # stop after this many validations without a new best; null: never",
        "                            # normalisation and repeated spaces",
        "  cell: gru                 # rnn | gru | lstm; choose it with encoder=rnn, gru or lstm",
    ],
)
def test_a_comment_stands_beside_its_value(line: str) -> None:
    assert line in printed_help("train", ["data=hub"])[0].splitlines()


def test_the_comment_is_that_of_the_choice() -> None:
    lines = printed_help("train", TRAIN)[0].splitlines()
    kinds = {line.partition("#")[2].strip() for line in lines if line.lstrip().startswith("kind: ")}
    assert any(kind.startswith("Stochastic gradient descent") for kind in kinds)
    assert any(kind.startswith("q . k / sqrt(d)") for kind in kinds)  # the encoder's self-attention has this score
    assert not any(kind.startswith("Adadelta") for kind in kinds)
    # No comment follows: the one in attention/none.yaml is about another choice.
    assert "attention:" in lines


def test_a_long_value_has_its_comment_below() -> None:
    text, _ = printed_help("evaluate", [])
    line = next(line for line in text.splitlines() if line.startswith("output: "))
    assert line.endswith("}")
    assert text.partition(line)[2].startswith(f"\n{'':28}# Where results go; null: into the run.")


def test_recipes_in_folders_are_choices_of_experiment() -> None:
    listed = dict(line.split(": ") for line in help.all_choices().splitlines())
    assert {"cells", "papers/luong_2015_table_4"} <= set(listed["experiment"].split(", "))
    assert "experiment/papers" not in listed
    assert "experiment/papers" not in help.known_keys("train")
    assert "bahdanau" in listed["attention"].split(", ")
    assert not any("/" in name for name in listed["attention"].split(", "))
