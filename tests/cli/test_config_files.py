"""--help shows the files of configs/ as they stand, and lists all choices."""

import pytest
import yaml

from nmt.cli.config_files import choices_of, known_keys
from nmt.cli.run_command import run_command
from nmt.config.checks import config_dir


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):  # noqa: ANN201
    def run(command: str, *words: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            run_command(command, lambda _: pytest.fail("the command works"), words)
        output = capsys.readouterr()
        assert (exit_.value.code, output.err) == (0, "")
        return output.out

    return run


@pytest.mark.parametrize("command", ["train", "evaluate", "translate", "compare", "serve", "export"])
def test_help_is_the_commands_file(command: str, printed) -> None:  # noqa: ANN001
    text = printed(command, "--help")
    assert (config_dir() / f"{command}.yaml").read_text() in text
    assert text.startswith(f"# nmt-{command} KEY=VALUE")
    assert f"# Examples:\n#   nmt-{command} " in text
    assert ("-m runs" in text) == (command == "train")
    searches = command in {"evaluate", "translate", "serve"}
    assert ("===== search=as_trained =====" in text) == searches
    assert ("\n# search: " in text) == (searches or command == "train")


def test_help_shows_the_files_of_the_choices_and_lists_all(printed) -> None:  # noqa: ANN001
    recipe = "experiment/papers/luong_2015_table_4"
    text = printed("train", "attention=luong_dot", "-h", "attention/score=general", recipe.replace("/", "=", 1))
    for name in ("attention/luong_dot", "attention/score/general", "optimizer/adam", recipe):
        assert (config_dir() / f"{name}.yaml").read_text() in text
    assert "===== attention=bahdanau =====" not in text
    listed = dict(line[2:].split(": ") for line in text.splitlines() if line.startswith("# ") and ": " in line)
    assert {"cells", "papers/luong_2015_table_4"} <= set(listed["experiment"].split(", "))
    assert listed["attention/score"].startswith("additive, concat, ")
    assert set(listed["search"].split(", ")) == {"beam", "greedy", "mbr", "sampling"}
    assert "_apart" not in choices_of("tokenizer", "train")
    assert "experiment/papers" not in known_keys("train")


def test_the_composed_configuration_is_printed(printed) -> None:  # noqa: ANN001
    given = ["data=files", "attention=luong_dot", "size=small", "evaluation.lowercase=${seed}"]
    values = yaml.safe_load(printed("train", "--cfg", "job", *given))
    assert (values["data"]["kind"], values["evaluation"]["lowercase"]) == ("files", "${seed}")
    assert "hydra" not in values
    resolved = printed("train", "--cfg", "job", "--resolve", *given, "data.train=a", "data.validation=b")
    assert yaml.safe_load(resolved)["evaluation"]["lowercase"] == 1
