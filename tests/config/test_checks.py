"""Errors of a configuration: one line that names the key, the value, what is allowed and the nearest valid one."""

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, values_of

from nmt.cli.config_files import known_keys
from nmt.config import schema
from nmt.config.checks import validated, validated_union
from nmt.config.errors import UserError, format_value, nearest, override_values
from nmt.config.schema.commands import Evaluation
from nmt.config.schema.training import Search
from nmt.system.run import load_config, save_values


@pytest.fixture
def values() -> dict[str, Any]:
    return values_of("train", TINY)


def error(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        validated(schema.TrainConfig, values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("training.max_stepz", 1, ["training.max_stepz: unknown key", "'max_steps'"]),
        ("nonsense", 1, ["nonsense: unknown key", "optimizer"]),
        ("training.max_steps", "abc", ["training.max_steps=abc", "integer"]),
        ("training.max_steps", 0, ["training.max_steps=0", "greater than 0"]),
        ("training.accumulate", True, ["training.accumulate=true", "integer"]),
        ("training.label_smoothing", 1.0, ["training.label_smoothing=1.0", "less than 1"]),
        ("encoder.residual", 1, ["encoder.residual=1: input should be true, false or the number of a layer from 2 to"]),
        ("encoder.bidirectional", "firts", ["encoder.bidirectional=firts: not one of true, false, first", "'first'"]),
        ("optimizer.lr", float("nan"), ["optimizer.lr=nan", "finite"]),
        ("optimizer.kind", "adamm", ["optimizer.kind=adamm", "sgd, adadelta", "'adam'"]),
        ("attention.score.kind", "dot", ["attention.score.dim: unknown key"]),
        ("data.kind", None, ["data.kind", "demo, files, hub"]),
        ("optimizer.betas", [0.9], ["optimizer.betas"]),
        ("objective", {"kind": "focal"}, ["objective.kind=focal: not one of likelihood, distillation"]),
        ("logger", ["tensorboard", "aim"], ["logger[1]=aim: not one of tensorboard, "]),
    ],
)
def test_a_wrong_value_is_one_line(values: dict[str, Any], key: str, value: object, parts: list[str]) -> None:
    *sections, name = key.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[name] = value
    message = error(values)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_section_alone_is_checked_the_same_way() -> None:
    with pytest.raises(UserError, match=r"search\.beam_sise: unknown key; did you mean 'beam_size'"):
        validated_union(Search, {**values_of("train", [])["search"], "beam_sise": 3}, "search")


def test_saved_values_come_back_equal_and_a_wrong_one_is_told_with_its_file(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config = validated(schema.TrainConfig, values)
    path = tmp_path / "config.yaml"
    save_values(path, config.model_dump(mode="json"))
    assert load_config(path) == config
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]
    save_values(path, values | {"seed": "x"})
    with pytest.raises(UserError, match="^" + re.escape(f"{path}: seed=x: input should be a valid integer")):
        load_config(path)


@pytest.mark.parametrize(
    ("residual", "first", "bidirectional", "directions"), [(False, 0, False, 1), (True, 2, True, 2), (3, 3, "first", 1)]
)
def test_layers_with_residual_connections_and_with_both_directions(
    residual: bool | int, first: int, bidirectional: bool | str, directions: int
) -> None:
    values = values_of("train", [*TINY, "encoder.layers=4"])
    values["encoder"] |= {"residual": residual, "bidirectional": bidirectional}
    encoder = validated(schema.TrainConfig, values).encoder
    assert (encoder.first_residual, encoder.directions) == (first, directions)
    assert encoder.output_dim == encoder.hidden * directions
    assert (encoder.residual, encoder.bidirectional) == (residual, bidirectional)
    assert type(encoder.residual) is type(residual)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainig.max_steps", ["training.max_steps"]),
        ("Encoder.hidden", ["encoder.hidden"]),
        ("encoder/hidden", ["encoder.hidden"]),
        ("training.lr", ["optimizer.lr"]),
        ("max_len", ["data.max_length"]),
        ("batch_tokens", ["search.batch_tokens", "training.batch_tokens"]),
        ("dropout", ["attention.dropout", "decoder.dropout", "embedding.dropout", "encoder.dropout"]),
        ("kind", []),
    ],
)
def test_the_nearest_key_may_be_in_another_section(key: str, meant: list[str]) -> None:
    named = " or ".join(f"'{name}'" for name in meant)
    known = [each for each in known_keys("train") if not each.startswith("size.")]
    assert nearest(key, known) == (f"; did you mean {named}?" if meant else "")


def test_overrides_are_read_as_plain_values() -> None:
    given = ["optimizer.lr=1e-05", "+seed=3", "data.path=/a b", "x=true", "z=[1,2]", "w="]
    expected = {"optimizer.lr": 1e-05, "seed": 3, "data.path": "/a b", "x": True, "z": "[1,2]", "w": None}
    assert override_values(given) == expected


@pytest.mark.parametrize(
    ("corpora", "message"),
    [
        ("[{source_lang: en}]", r"^data\.corpora\[0\]\.target_lang: missing; it needs a value$"),
        ("[{source_lang: en, target_lang: de, trian: a}]", r"corpora\[0\]\.trian: unknown key.*did you mean 'train'"),
        ("[{source_lang: en, target_lang: 2}]", r"^data\.corpora\[0\]\.target_lang=2: "),
    ],
)
def test_the_key_within_an_element_of_a_list_is_named(corpora: str, message: str) -> None:
    values = values_of("train", ["data=multilingual", f"data.corpora={corpora}", "data.train=a"])
    with pytest.raises(UserError, match=message):
        validated(schema.TrainConfig, values)


@pytest.mark.parametrize(
    ("value", "meaning"), [(float("nan"), "a number"), (True, "true or false"), (None, "no value")]
)
def test_text_that_yaml_reads_otherwise_names_the_quotes(value: object, meaning: str) -> None:
    text = format_value(value)
    with pytest.raises(UserError) as caught:
        validated(Evaluation, {"metrics": ["bleu"], "tokenize": value, "lowercase": False})
    assert str(caught.value) == (
        f"tokenize={text}: is read as {meaning}; quote the text: '{text}' in YAML, \"tokenize='{text}'\" in a shell"
    )
