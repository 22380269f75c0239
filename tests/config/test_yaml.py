"""The YAML files are the documentation: they compose in every combination, and hold each key of the schema."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from conftest import values_of
from pydantic import BaseModel

from nmt.config import schema
from nmt.config.compose import _fields, _members, config_dir, flatten, typed

COMMANDS = {
    "train": schema.TrainConfig,
    "evaluate": schema.EvaluateConfig,
    "translate": schema.TranslateConfig,
    "compare": schema.CompareConfig,
}
REQUIRED = {
    "train": [],
    "evaluate": ["run=DIR"],
    "translate": ["run=DIR"],
    "compare": ["runs=[A,B]"],
    "data=files": ["data.train=a", "data.validation=b"],
    "data=hub": ["data.id=owner/name"],
    "tokenizer=file": ["tokenizer.source_model=a.model"],
}


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("[!_]*.yaml"))


def overrides(**chosen: str) -> list[str]:
    picked = [f"{group}={choice}" for group, choice in chosen.items()]
    return [*picked, *(extra for pick in picked for extra in REQUIRED.get(pick, []))]


def keys(model: type[BaseModel], values: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted leaves of the schema, for the members of the unions that `values` choose."""
    found: set[str] = set()
    for name, annotation in _fields(model, values).items():
        value = values.get(name)
        if isinstance(value, dict) and _members(annotation):
            member = _members(annotation).get(str(value.get("kind", ""))) or next(iter(_members(annotation).values()))
            found |= keys(member, value, f"{prefix}{name}.")
        elif isinstance(value, dict):  # a free mapping
            found |= {f"{prefix}{name}.{key}" for key in value}
        else:
            found.add(f"{prefix}{name}")
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_yaml_keys_and_schema_fields_are_the_same_set(command: str) -> None:
    values = values_of(command, REQUIRED[command])
    assert {key for key, _ in flatten(values)} == keys(COMMANDS[command], values)


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        (group, choice)
        for group in ("data", "tokenizer", "encoder", "decoder", "optimizer", "schedule", "search")
        for choice in choices(group)
        if choice != "as_trained"
    ],
)
def test_every_choice_of_a_group_holds_all_its_keys(group: str, choice: str) -> None:
    values = values_of("train", overrides(**{group: choice}))
    typed(schema.TrainConfig, values)
    assert {key for key, _ in flatten(values)} == keys(schema.TrainConfig, values)


@pytest.mark.parametrize(
    ("attention", "encoder", "decoder", "data"),
    list(itertools.product(choices("attention"), choices("encoder"), choices("decoder"), choices("data"))),
)
def test_presets_compose_with_each_other(attention: str, encoder: str, decoder: str, data: str) -> None:
    values = values_of("train", overrides(attention=attention, encoder=encoder, decoder=decoder, data=data))
    config = typed(schema.TrainConfig, values)
    assert config.encoder.cell == encoder
    assert config.decoder.cell == decoder


@pytest.mark.parametrize("experiment", choices("experiment"))
@pytest.mark.parametrize("attention", choices("attention"))
def test_experiments_take_every_attention(experiment: str, attention: str) -> None:
    values = values_of("train", overrides(experiment=experiment, attention=attention))
    config = typed(schema.TrainConfig, values)
    assert (config.attention.kind == "none") == (attention == "none")


@pytest.mark.parametrize("score", choices("attention/score"))
@pytest.mark.parametrize("attention", [name for name in choices("attention") if name != "none"])
def test_a_score_takes_the_place_of_a_presets(attention: str, score: str) -> None:
    plain = values_of("train", [f"attention={attention}"])
    values = values_of("train", [f"attention={attention}", f"attention/score={score}"])
    typed(schema.TrainConfig, values)
    assert values["attention"]["score"]["kind"] == score
    assert values["decoder"] == plain["decoder"]


def test_a_value_of_the_command_line_wins_over_a_preset() -> None:
    values = values_of("train", ["attention=bahdanau", "decoder.attend=after", "encoder.hidden=7", "data=demo"])
    assert values["decoder"]["attend"] == "after"
    assert values["encoder"]["hidden"] == 7


def test_presets_are_what_their_papers_say() -> None:
    systems = {
        name: typed(schema.TrainConfig, values_of("train", [f"attention={name}"])) for name in choices("attention")
    }
    assert systems["bahdanau"].decoder.attend == "before"
    assert systems["bahdanau"].decoder.readout == "maxout"
    for luong in ("luong_dot", "luong_general"):
        assert systems[luong].decoder.attend == "after"
        assert systems[luong].decoder.input_feeding
        assert systems[luong].decoder.readout == "attentional"
    assert systems["none"].attention.kind == "none"


def test_every_value_has_a_comment_or_a_heading() -> None:
    """A file explains itself: it begins with a comment, and lines with a bare value carry one where it is not plain."""
    silent = [
        str(path.relative_to(config_dir()))
        for path in config_dir().rglob("*.yaml")
        if not any(line.startswith("# ") and not line.startswith("# @") for line in path.read_text().splitlines())
    ]
    assert silent == []


def test_no_config_names_code_to_import() -> None:
    named = [path for path in Path(config_dir()).rglob("*.yaml") if "_target_" in path.read_text()]
    assert named == []
