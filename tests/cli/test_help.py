"""--help shows the files of configs/ as they stand."""

import pytest
import yaml

from nmt.cli.compose import parse_arguments
from nmt.cli.explain import choices_of, known_keys
from nmt.cli.help import groups, information
from nmt.config.compose import config_dir

COMMANDS = ["train", "evaluate", "translate", "compare", "serve", "export"]


def printed(command: str, *words: str) -> str:
    text = information(command, parse_arguments(command, words))
    assert text is not None
    return text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_the_commands_file(command: str) -> None:
    text = printed(command, "--help")
    assert (config_dir() / f"{command}.yaml").read_text() in text
    assert text.startswith(f"# nmt-{command} KEY=VALUE")
    assert f"# Examples:\n#   nmt-{command} " in text
    assert ("-m runs" in text) == (command == "train")


def test_help_shows_the_files_of_the_choices() -> None:
    text = printed(
        "train", "attention=luong_dot", "-h", "attention/score=general", "experiment=papers/luong_2015_table_4"
    )
    for name in (
        "attention/luong_dot",
        "attention/score/general",
        "optimizer/adam",
        "experiment/papers/luong_2015_table_4",
    ):
        assert (config_dir() / f"{name}.yaml").read_text() in text
    assert "===== attention=bahdanau =====" not in text
    assert "===== search=as_trained =====" in printed("translate", "--help")


def test_help_lists_all_choices() -> None:
    listed = dict(
        line[2:].split(": ")
        for line in printed("train", "--help").splitlines()
        if line.startswith("# ") and ": " in line
    )
    assert {"cells", "papers/luong_2015_table_4"} <= set(listed["experiment"].split(", "))
    assert listed["attention/score"].startswith("additive, concat, ")
    assert set(listed["search"].split(", ")) == {"beam", "greedy", "mbr", "sampling"}
    assert [*groups("translate")] == ["search"]
    assert [*groups("compare")] == []


def test_recipes_in_folders_are_choices_of_experiment() -> None:
    assert {"cells", "papers/luong_2015_table_4"} <= set(choices_of("experiment", "train"))
    assert "experiment/papers" not in known_keys("train")


def test_the_composed_configuration_is_printed() -> None:
    given = ["data=files", "attention=luong_dot", "size=small", "evaluation.lowercase=${seed}"]
    values = yaml.safe_load(printed("train", "--cfg", "job", *given))
    assert (values["data"]["kind"], values["evaluation"]["lowercase"]) == ("files", "${seed}")
    assert "hydra" not in values
    assert (
        yaml.safe_load(printed("train", "--cfg", "job", "--resolve", *given, "data.train=a", "data.validation=b"))[
            "evaluation"
        ]["lowercase"]
        == 1
    )
