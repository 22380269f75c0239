"""The YAML files, which are the documentation, compose with each other and contain each key of the schema."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import run_config, values_of
from pydantic import BaseModel

from nmt.config import schema
from nmt.config.checks import config_dir, flatten, validated
from nmt.config.schema.base import fields, members

pytestmark = pytest.mark.no_cover  # hundreds of slow compositions cover no further lines

COMMANDS = {
    "train": schema.TrainConfig,
    "evaluate": schema.EvaluateConfig,
    "translate": schema.TranslateConfig,
    "compare": schema.CompareConfig,
    "export": schema.ExportConfig,
}
REQUIRED = {
    "train": [],
    "evaluate": ["run=DIR"],
    "translate": ["run=DIR"],
    "compare": ["runs=[A,B]"],
    "export": ["run=DIR", "output=FILE"],
    "data=files": ["data.train=a", "data.validation=b"],
    "data=hub": ["data.id=owner/name"],
    "data=multilingual": ["data.corpora=[en-de]", "data.train=a", "data.validation=b"],
    "objective=distillation": ["objective.teachers=DIR"],
    "tokenizer=file": ["tokenizer.source_model=a.model"],
}


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("[!_]*.yaml"))


def overrides(**chosen: str) -> list[str]:
    picked = [f"{group}={choice}" for group, choice in chosen.items()]
    return [*picked, *(extra for pick in picked for extra in REQUIRED.get(pick, []))]


def keys(model: type[BaseModel], values: dict[str, Any], prefix: str = "") -> set[str]:
    """List the dotted keys of the schema, which has no defaults; of a union, those of the kind that `values` choose."""
    found: set[str] = set()
    for name, annotation in fields(model, values).items():
        assert model.model_fields[name].is_required()
        value = values.get(name)
        if isinstance(value, dict) and members(annotation):
            member = members(annotation).get(str(value.get("kind", ""))) or next(iter(members(annotation).values()))
            found |= keys(member, value, f"{prefix}{name}.")
        elif isinstance(value, dict):  # a mapping with any keys
            found |= {f"{prefix}{name}.{key}" for key in value}
        else:
            found.add(f"{prefix}{name}")
    return found


def complete(command: str, given: list[str]) -> dict[str, Any]:
    """Assert that the composed values are valid and have all keys of the schema, and return them."""
    values = values_of(command, given)
    validated(COMMANDS[command], values)
    assert {key for key, _ in flatten(values)} == keys(COMMANDS[command], values)
    return values


@pytest.mark.parametrize("command", COMMANDS)
def test_yaml_keys_and_schema_fields_are_the_same_set(command: str) -> None:
    complete(command, REQUIRED[command])


def in_turn(all_of: list[str], *others: list[str]) -> list[tuple[str, ...]]:
    """Combine each choice of the first list with choices of the other lists, which are cycled."""
    return list(zip(all_of, *map(itertools.cycle, others), strict=False))


GROUPS = ("schedule", "data", "tokenizer", "optimizer", "search", "objective", "decoder", "encoder/self_attention")


@pytest.mark.parametrize("chosen", in_turn(*map(choices, GROUPS)))
def test_every_choice_of_a_group_holds_all_its_keys(chosen: tuple[str, ...]) -> None:
    picked = dict(zip(GROUPS, chosen, strict=True))
    picked["encoder"] = picked["decoder"]
    if picked["search"] == "as_trained":  # a choice of the other commands only
        picked["search"] = "sampling"
    values = complete("train", overrides(**picked))
    assert values["encoder"]["self_attention"]["kind"] == picked["encoder/self_attention"]


PARTS = ("score", "window", "normalizer", "alignment", "coverage", "projection")
# Choice -> its kind, where the names differ.
VARIANTS = {"first_order_monotonic": "first_order", "posterior_exact": "posterior"}


@pytest.mark.parametrize("attention", choices("attention"))
def test_every_preset_holds_all_its_keys(attention: str) -> None:
    complete("train", [f"attention={attention}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "choice"), [(part, choice) for part in PARTS for choice in choices(f"attention/{part}")]
)
def test_every_part_of_an_attention_holds_all_its_keys(part: str, choice: str) -> None:
    past = ["decoder.input_feeding=true"] if part == "alignment" else []
    values = complete("train", [f"attention/{part}={choice}", *past])
    assert values["attention"][part]["kind"] == VARIANTS.get(choice, choice)


def test_a_part_takes_the_place_of_a_presets() -> None:
    plain = values_of("train", ["attention=luong_dot"])
    for part, choice in (("score", "concat"), ("window", "local_m"), ("normalizer", "sparsemax")):
        values = values_of("train", ["attention=luong_dot", f"attention/{part}={choice}"])
        assert values["attention"].pop(part)["kind"] == choice
        assert values["decoder"] == plain["decoder"]
        assert values["attention"] == {key: value for key, value in plain["attention"].items() if key != part}


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "attention"), in_turn(choices("experiment"), choices("attention")))
def test_experiments_take_every_attention(experiment: str, attention: str) -> None:
    config = run_config(*overrides(experiment=experiment, attention=attention))
    assert (config.attention.kind == "none") == (attention == "none")


def test_a_group_of_the_command_line_wins_over_a_preset() -> None:
    values = values_of("train", ["attention=gnmt", "decoder=gru", "encoder.layers=3"])
    assert (values["decoder"]["cell"], values["decoder"]["layers"]) == ("gru", 4)
    assert (values["encoder"]["cell"], values["encoder"]["layers"]) == ("lstm", 3)


GNMT_DEPTH = {f"{network}.{key}" for network in ("encoder", "decoder") for key in ("cell", "layers", "residual")}


@pytest.mark.parametrize("attention", choices("attention"))
def test_a_preset_sets_the_attention_alone(attention: str) -> None:
    """A sweep over `attention=` varies nothing else. Only gnmt needs a deep decoder, to attend in its first layer."""
    own = {"decoder.attend", "decoder.input_feeding"}
    if attention == "gnmt":
        own |= {*GNMT_DEPTH, "encoder.bidirectional"}

    def shared(name: str) -> dict[str, Any]:
        values = flatten(values_of("train", [f"attention={name}"]))
        return {key: value for key, value in values if key not in own and not key.startswith("attention.")}

    assert shared(attention) == shared("bahdanau")


PRESETS = {  # name -> score, window, normalizer and alignment
    "bahdanau": "additive global softmax expected",
    "gnmt": "normed_additive global softmax expected",
    "luong_concat": "concat global softmax expected",
    "luong_location": "location global softmax expected",
    "luong_local_m": "general local_m softmax expected",
    "luong_local_p": "general local_p softmax expected",
    "ntm_cosine": "cosine global softmax expected",
    "chorowski": "location_aware global softmax expected",
    "sparsemax": "general global sparsemax expected",
    "entmax": "general global entmax15 expected",
    "hard": "additive global softmax sampled",
    "gumbel": "additive global softmax straight_through",
    "monotonic": "normed_additive global monotonic expected",
    "mocha": "normed_additive global mocha expected",
    "linear_chain": "general global linear_chain expected",
    "fertility": "general global fertility expected",
    "gaussian_mixture": "gaussian_mixture global softmax expected",
}


def test_presets_are_what_their_papers_say() -> None:
    systems = {name: run_config(f"attention={name}") for name in choices("attention")}
    for name, kinds in PRESETS.items():
        attention: Any = systems[name].attention
        parts = (attention.score, attention.window, attention.normalizer, attention.alignment)
        assert [part.kind for part in parts] == kinds.split(), name
    timing = {name: (system.decoder.attend, system.decoder.input_feeding) for name, system in systems.items()}
    assert (timing["bahdanau"][0], timing["nematus"][0]) == ("before", "between")
    assert {timing[name] for name in systems if name.startswith("luong")} == {("after", True)}
    gnmt = systems["gnmt"]
    assert (*timing["gnmt"], gnmt.encoder.bidirectional) == ("first_layer", False, "first")
    for network in (gnmt.encoder, gnmt.decoder):
        assert (network.cell, network.layers, network.residual) == ("lstm", 4, 3)
    assert systems["mocha"].decoder == systems["monotonic"].decoder
    assert systems["fertility"].decoder == systems["sparsemax"].decoder
    assert systems["coverage"].attention.coverage.kind == "linear"  # type: ignore[union-attr]
    assert systems["multihead"].attention.projection.kind == "heads"  # type: ignore[union-attr]
    assert systems["none"].attention.kind == "none"


def paper(name: str, attention: str, *recipes: str, **chosen: str) -> schema.TrainConfig:
    """Compose the configuration of one job of the sweep experiment=papers/NAME."""
    experiments = ",".join([*recipes, f"papers/{name}"])
    given = [f"experiment=[{experiments}]", f"attention={attention}"]
    given += [f"attention/{group}={choice}" for group, choice in chosen.items()]
    return run_config(*given)


def test_the_experiment_of_a_paper_has_the_papers_readout() -> None:
    assert paper("bahdanau_2015_figure_2", "bahdanau").decoder.readout == "maxout"
    assert paper("luong_2015_table_4", "luong_dot").decoder.readout == "attentional"
    assert paper("deng_2018_table_1", "marginal").decoder.readout == "attentional"


def test_the_models_of_raffel_2017_differ_in_the_normalizer_alone() -> None:
    soft, monotonic = (
        paper("raffel_2017_monotonic", "monotonic", normalizer=kind) for kind in ("softmax", "monotonic")
    )
    assert soft.attention.normalizer != monotonic.attention.normalizer  # type: ignore[union-attr]
    same = monotonic.attention.model_copy(update={"normalizer": soft.attention.normalizer})  # type: ignore[union-attr]
    assert monotonic.model_copy(update={"attention": same}) == soft


@pytest.mark.slow
def test_a_sweep_of_a_paper_joins_a_recipe() -> None:
    for path in (config_dir() / "experiment" / "papers").glob("*.yaml"):
        assert paper(path.stem, "bahdanau", "multi30k_sprint").data.kind == "hub"


def test_no_configuration_of_a_run_names_code_to_import() -> None:
    """Only the section `hydra` may, for launchers; no run saves it."""

    def names_code(path: Path) -> bool:
        values = yaml.safe_load(path.read_text()) or {}
        return "_target_" in yaml.safe_dump({key: value for key, value in values.items() if key != "hydra"})

    files = [path for path in config_dir().rglob("*.yaml") if path.relative_to(config_dir()).parts[0] != "hydra"]
    assert [path for path in files if names_code(path)] == []
