"""What the attention adds to the likelihood."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from conftest import values_of

from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch, Batches, make_batches
from nmt.data.prepare import prepare
from nmt.model.checkpoints import new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.system.machine import Machine
from nmt.training.losses.objective import Objective
from nmt.training.losses.token_losses import r_drop
from nmt.training.trainer import Trainer

Config = Callable[..., TrainConfig]
MOVING = "attention.alignment.baseline=moving"
STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0", "training.label_smoothing=0"]


def setup(config: TrainConfig) -> tuple[Seq2Seq, Objective, Batch]:
    prepared = prepare(config.data, config.tokenizer)
    batches = Batches(
        prepared.splits["train"],
        prepared.tokenizers,
        batch_tokens=256,
        batch_sentences=None,
        seed=1,
        guided=config.training.guided_alignment > 0,
    )
    torch.manual_seed(3)
    model = new_model(config, prepared.tokenizers)
    return model, Objective(model, config, prepared.tokenizers.target), batches.load(batches.epoch(0)[0], 0)[0]


@pytest.mark.parametrize(
    ("overrides", "term", "weight"),
    [
        (
            ["attention=coverage", "attention.coverage.loss_weight=2.5", "attention.coverage.loss_start=0"],
            "coverage_loss",
            2.5,
        ),
        (["training.guided_alignment=0.7"], "alignment_loss", 0.7),
        (["attention=hard", "attention.alignment.weight=0.3", MOVING], "policy_loss", 0.3),
    ],
)
def test_a_term_is_added_with_its_weight(overrides: list[str], term: str, weight: float, train_config: Config) -> None:
    _, objective, batch = setup(train_config(*STILL, *overrides))
    value = objective(batch, 1)
    assert set(value.terms) >= {"loss", "smoothed_loss", term}
    torch.testing.assert_close(value.total, value.terms["smoothed_loss"] + weight * value.terms[term])
    assert value.terms[term] != 0
    assert not value.terms[term].requires_grad


def test_plain_attention_adds_nothing(train_config: Config) -> None:
    _, objective, batch = setup(train_config(*STILL))
    value = objective(batch, 1)
    assert set(value.terms) == {"loss", "smoothed_loss"}
    assert batch.alignment is None
    torch.testing.assert_close(value.total.detach(), value.terms["loss"])


def test_a_coverage_loss_of_weight_zero_is_left_out(train_config: Config) -> None:
    _, objective, batch = setup(train_config(*STILL, "attention=coverage", "attention.coverage.loss_weight=0"))
    assert "coverage_loss" not in objective(batch, 1).terms


def test_a_coverage_loss_sets_in_after_its_start(train_config: Config) -> None:
    _, objective, batch = setup(train_config(*STILL, "attention=coverage", "attention.coverage.loss_start=5"))
    early, late = objective(batch, 5), objective(batch, 6)
    torch.testing.assert_close(early.total, early.terms["smoothed_loss"])
    torch.testing.assert_close(late.total, late.terms["smoothed_loss"] + late.terms["coverage_loss"])


def gradient(model: Seq2Seq, total: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_r_drop_and_the_loss_are_those_of_the_normed_output_layer(train_config: Config) -> None:
    """However long its vectors are."""
    model, objective, batch = setup(train_config("training.r_drop=3", "embedding.dropout=0.3", "decoder.fixnorm=true"))
    terms = []
    for length in (1.0, 5.0):
        model.output.weight = torch.nn.Parameter(model.output.weight.detach() * length)  # no longer the embeddings
        torch.manual_seed(1)
        terms.append(objective(batch, 1).terms)
    torch.testing.assert_close(*terms)


def test_r_drop_pulls_two_predictions_together(train_config: Config) -> None:
    """What dropout makes differ is added, by alpha / 2, to the mean of both losses."""
    config = train_config("training.r_drop=3", "embedding.dropout=0.3")
    model, objective, batch = setup(config)
    value = objective(batch, 1)
    terms = value.terms
    assert set(terms) == {"loss", "smoothed_loss", "r_drop_loss"}
    assert terms["r_drop_loss"] > 1
    torch.testing.assert_close(value.total.detach(), terms["smoothed_loss"] + 3 / 2 * terms["r_drop_loss"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    left = []
    for alpha in (0.01, 20.0):
        model.load_state_dict(setup(config)[0].state_dict())
        objective.loss.criterion = partial(r_drop, alpha=alpha, smoothing=0.1)
        torch.manual_seed(1)
        for _ in range(25):
            value = objective(batch, 1)
            optimizer.zero_grad()
            value.total.backward()
            optimizer.step()
        left.append(value.terms["r_drop_loss"])
    assert left[1] < 0.3 * left[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.label_smoothing=0.1"],
        ["attention=luong_general", "training.guided_alignment=0.7"],
        ["attention=gnmt", "training.guided_alignment=0.7"],
        ["attention=coverage", "attention.coverage.loss_start=0"],
    ],
)
def test_without_dropout_r_drop_changes_nothing(overrides: list[str], train_config: Config) -> None:
    """Both predictions are one, and tokens and what the attention adds are counted once."""
    found = []
    for alpha in (0, 5):
        model, objective, batch = setup(train_config(*STILL, *overrides, f"training.r_drop={alpha}"))
        value = objective(batch, 1)
        found.append((value.total, value.terms, gradient(model, value.total)))
    (total, terms, plain), (total_both, terms_both, both) = found
    assert terms_both.pop("r_drop_loss").abs() < 1e-3
    torch.testing.assert_close(total_both, total)
    torch.testing.assert_close(terms_both, terms)
    torch.testing.assert_close(both, plain, rtol=1e-4, atol=1e-4)


def test_guided_alignment_teaches_the_alignments(train_config: Config) -> None:
    model, objective, batch = setup(train_config(*STILL, "attention=luong_general", "training.guided_alignment=1"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        value = objective(batch, 1)
        optimizer.zero_grad()
        value.total.backward()
        optimizer.step()
        losses.append(float(value.terms["alignment_loss"]) / batch.target_tokens)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("timing", [[], ["decoder.attend=first_layer", "decoder.layers=2"]], ids=str)
def test_the_policy_sees_the_likelihood_of_each_token_and_not_of_padding(
    timing: list[str], train_config: Config
) -> None:
    model, objective, batch = setup(train_config(*STILL, "attention=hard", "attention.alignment.soft_share=0", *timing))
    seen = {}
    assert model.policy is not None
    original = model.policy.forward

    def spy(choice: object, log_probs: torch.Tensor, real: torch.Tensor) -> object:
        seen.update(log_probs=log_probs, real=real)
        return original(choice, log_probs, real)  # type: ignore[arg-type]

    model.policy.forward = spy  # type: ignore[assignment,method-assign]
    value = objective(batch, 1)
    torch.testing.assert_close(-seen["log_probs"].sum(), value.terms["loss"])
    assert (seen["log_probs"] < 0).equal(batch.target_out != 0)
    assert torch.equal(seen["real"], batch.target_out != 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention=none"], "needs an attention, but attention.kind=none"),
        (
            ["attention=hard", "attention/normalizer=sparsemax"],
            "attention.normalizer.kind=sparsemax; set it to 0",
        ),
        (["attention=entmax"], "attention.normalizer.kind=entmax15; set it to 0"),
        (["attention=fertility"], "attention.normalizer.kind=fertility; set it to 0"),
    ],
)
def test_what_cannot_be_guided_is_refused(overrides: list[str], message: str, train_config: Config) -> None:
    with pytest.raises(UserError, match=message):
        train_config("training.guided_alignment=1", *overrides)


def test_what_r_drop_cannot_be_joined_with_is_refused(train_config: Config) -> None:
    with pytest.raises(UserError, match=r"training\.r_drop=5\.0 .*set it to 0, or use attention/alignment=expected"):
        train_config("training.r_drop=5", "attention=hard")


def test_a_baseline_neither_uses_up_the_gradients_limit_nor_depends_on_the_policys_weight(train_config: Config) -> None:
    still = [*STILL, "optimizer=sgd", "optimizer.lr=1e-9"]
    config = train_config(*still, "attention=hard", "attention.alignment.weight=0.1")
    model, objective, batch = setup(config)
    batches = make_batches(prepare(config.data, config.tokenizer), "train", config)
    trainer = Trainer(config, model, objective, batches, Machine(torch.device("cpu"), "fp32"))
    assert model.policy is not None
    assert model.policy.learned is not None
    apart = {id(parameter) for parameter in model.policy.parameters()}
    assert {id(parameter) for parameter in trainer.policy_parameters} == apart
    assert not apart & {id(parameter) for parameter in trainer.parameters}
    with torch.no_grad():
        model.policy.learned.bias.fill_(1000.0)
    huge = trainer.update([batch]).gradient_norm
    with torch.no_grad():
        model.policy.learned.bias.fill_(-5.0)
    near = trainer.update([batch]).gradient_norm
    assert huge < 100 * near  # the advantage grows with it, its square does not count
    assert (
        float(
            torch.stack(
                [parameter.grad.norm() for parameter in trainer.policy_parameters if parameter.grad is not None]
            ).norm()
        )
        <= 1.001
    )


def test_guidance_needs_word_alignments() -> None:
    files = ["data=files", "data.train=a", "data.validation=b", "training.guided_alignment=1"]
    with pytest.raises(UserError, match=r"data=files with data\.alignments"):
        validated(TrainConfig, values_of("train", files))
    validated(TrainConfig, values_of("train", [*files, "data.alignments=align"]))
