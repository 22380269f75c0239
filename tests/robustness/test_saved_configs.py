"""A damaged config.yaml of a run is refused in one line, and nothing that it names is called."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import run_config

from nmt.config import schema
from nmt.config.checks import flatten, validated
from nmt.config.errors import UserError
from nmt.system.run import load_values

WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.0, 0.5, float("nan"), float("inf"), 1e308, 5e-324, 2**31, 2**63, 2**70, 10**400),
    *("", " ", "x", "none", "a\nb", "\x00", "\x1b[31m", "x" * 100_000, "日本"),
    *([], [1], [[1, [2]], 3], [None], {}, {"a": 1}),
    *({"kind": "none"}, {"kind": {"a": 1}}, {"kind": [1]}, {1: 2}, {None: 1}, {"a": {"b": {"c": [1, {"d": 2}]}}}),
]
HOSTILE = {
    "an object": "a: !!python/object/apply:os.mkdir [made]",
    "deep lists": "a: " + "[" * 10_000,
    "nothing": "",
    "a NUL": "seed: \x00",
    "an endless integer": f"a: {'9' * 5000}",
}


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return run_config().model_dump(mode="json")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(HOSTILE[name], encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_values(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < len(str(path)) + 200
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def changed(values: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return a copy of nested values with another value for a dotted key."""
    name, _, rest = key.partition(".")
    return {**values, name: changed(values.get(name, {}), rest, value) if rest else value}


@pytest.mark.parametrize("count", [400, pytest.param(30_000, marks=pytest.mark.slow)])
def test_damaged_values_are_refused_in_a_line_each(count: int, values: dict[str, Any]) -> None:
    """Replaces random values by wrong ones: each is either used as it is, or refused with its key."""
    keys = [*dict(flatten(values)), *(key for key in values if isinstance(values[key], dict))]
    rng, taken = random.Random(count), 0
    for _ in range(count):
        key, value = rng.choice(keys), rng.choice(WRONG)
        damaged = changed(values, key, copy.deepcopy(value))
        try:
            config = validated(schema.TrainConfig, damaged)
        except UserError as error:
            lines = str(error).split("\n")
            assert all(len(line) < 600 and line.isprintable() for line in lines), (key, value, lines)
            assert any(key.partition(".")[0] in line for line in lines), (key, value, lines)
            continue
        taken += 1
        given = dict(flatten(changed({}, key, value)))
        now = dict(flatten(config.model_dump(mode="json")))
        # A single name may become a list or a pair of languages, and a number a name, also within a list.
        read = [str(value), *([each] * n for each in (value, str(value)) for n in (1, 2))]
        if isinstance(value, list):
            read.append([str(each) for each in value])
        assert {name: now[name] for name in given} == given or now[key] in read, (key, value)
    assert taken > count / 50
