"""Laws that every attention obeys, in evaluation and in training.

Shapes: B batch, S source positions, T target positions, N heads.
"""

from collections.abc import Callable

import torch
from combinations import DRAWS, AnyAttention, Case, Made, attend
from torch import Tensor

from nmt.attention.attention import Attended, Memory, MultiHeadAttention, Steering, join_steps
from nmt.attention.scores import Past
from nmt.ops.trees import select

TOLERANCE = {"rtol": 0.0, "atol": 1e-11}


def one_by_one(attention: AnyAttention, query: Tensor, memory: Memory, past: Past | None = None) -> list[Attended]:
    steps: list[Attended] = []
    for one in query.unbind(1):
        steps.append(attention.step(one[:, None], memory, past))
        past = steps[-1].past
    return steps


def a_row_sums_to_one(case: Case, made: Made) -> None:
    """The sum may be less than 1 with a Gaussian window, and where a monotonic attention may pass the end."""
    attention, query, states, valid = made
    weights = attend(attention, query, states, valid).weights
    sums = weights.sum(-1)
    assert (weights >= 0).all()
    if case.config.window.kind == "local_p" and case.config.alignment.kind == "expected":
        assert (sums > 0).all()
        assert (sums <= 1 + 1e-12).all()
    elif case.config.normalizer.kind in {"monotonic", "mocha"}:
        assert (sums <= 1 + 1e-12).all()
    else:
        torch.testing.assert_close(sums, torch.ones_like(sums), **TOLERANCE)


def garbage_in_padding_changes_nothing(case: Case, made: Made) -> None:
    attention, query, states, valid = made
    clean = attend(attention, query, states, valid)
    for garbage in (1e4, -1e30):
        dirty = attend(attention, query, torch.where(valid[:, :, None], states, garbage), valid)
        assert torch.equal(clean.context, dirty.context)
        assert torch.equal(clean.weights, dirty.weights)


def steps_one_by_one_equal_one_call(case: Case, made: Made) -> None:
    if case.draws:
        return
    attention, query, states, valid = made
    together = attend(attention, query, states, valid)
    steps = one_by_one(attention, query, attention.remember(states, valid))
    torch.testing.assert_close(torch.cat([step.context for step in steps], 1), together.context, **TOLERANCE)
    torch.testing.assert_close(torch.cat([step.weights for step in steps], 1), together.weights, **TOLERANCE)
    last = steps[-1].past
    assert last.step == together.past.step == query.shape[1]
    torch.testing.assert_close(last.weights, together.past.weights, **TOLERANCE)
    torch.testing.assert_close(last.total, together.past.total, **TOLERANCE)


def batch_mates_and_padding_change_nothing(case: Case, made: Made) -> None:
    if case.draws:
        return
    attention, query, states, valid = made
    together = attend(attention, query, states, valid)
    for b, length in enumerate(case.lengths):
        row = slice(b, b + 1)
        alone = attend(attention, query[row], states[row, :length], valid[row, :length])
        torch.testing.assert_close(alone.context[0], together.context[b], **TOLERANCE)
        torch.testing.assert_close(alone.weights[0], together.weights[b, :, :length], **TOLERANCE)


def selected_rows_go_on_as_they_would(case: Case, made: Made) -> None:
    """After the first step, select rows as beam search does: in another order, one of them twice and one not at all."""
    if case.draws:
        return
    attention, query, states, valid = made
    B = len(case.lengths)
    rows = torch.tensor([B - 1, *range(B - 1)])
    rows[-1] = B - 1
    memory = attention.remember(states, valid, nonempty=True)
    past = attention.step(query[:, :1], memory).past
    straight = attention.sequence(query, memory, past)
    selected = attention.sequence(query[rows], memory.select(rows), select(past, rows))
    torch.testing.assert_close(selected.context, straight.context[rows], **TOLERANCE)
    torch.testing.assert_close(selected.weights, straight.weights[rows], **TOLERANCE)
    torch.testing.assert_close(selected.past.weights, straight.past.weights[rows], **TOLERANCE)
    torch.testing.assert_close(selected.past.total, straight.past.total[rows], **TOLERANCE)
    assert selected.past.step == straight.past.step == query.shape[1] + 1


def hypotheses_may_share_a_sentence(case: Case, made: Made) -> None:
    """If the attention reads no past, several queries of one sentence in one step do not influence each other."""
    attention, query, states, valid = made
    if case.draws or attention.reads_past:
        return
    memory = attention.remember(states, valid)
    together = attention.step(query, memory)
    for t in range(query.shape[1]):
        alone = attention.step(query[:, t : t + 1], memory)
        torch.testing.assert_close(alone.context[:, 0], together.context[:, t], **TOLERANCE)
        torch.testing.assert_close(alone.weights[:, 0], together.weights[:, t], **TOLERANCE)


def a_sentence_without_positions_is_zero_with_finite_gradients(case: Case, made: Made) -> None:
    """Tests a batch of empty sentences, and an empty sentence beside others."""
    attention, query, states, valid = made
    for nowhere in (torch.zeros_like(valid), valid & (torch.arange(len(valid)) > 0)[:, None]):
        q, h = (part.clone().requires_grad_() for part in (query, states))
        attended = attend(attention, q, h, nowhere)
        assert not attended.weights[0].any()
        assert not attended.context[0].any()
        loss = attended.context.sum() + attended.weights.square().sum()
        if attended.choice is not None:
            assert not attended.choice.log_prob[0].any()
            assert not attended.choice.entropy[0].any()
            loss = loss + attended.choice.log_prob.sum() + attended.choice.entropy.sum()
        parameters = list(attention.parameters())
        gradients = torch.autograd.grad(loss, [q, h, *parameters], allow_unused=True) if loss.requires_grad else ()
        assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


def a_mask_made_once_changes_nothing(case: Case, made: Made) -> None:
    """nonempty=True masks energies by adding to them, which must give the same bits."""
    attention, query, states, valid = made
    torch.set_rng_state(DRAWS)
    memory = attention.remember(states, valid, nonempty=True)
    attended = attention.sequence(query, memory)
    expected = attend(attention, query, states, valid)
    assert torch.equal(attended.context, expected.context)
    assert torch.equal(attended.weights, expected.weights)
    config = case.config
    by_sum = config.normalizer.kind == "softmax" and config.window.kind == "global"
    assert (memory.mask is not None) == by_sum


def weights_given_back_change_nothing(case: Case, made: Made) -> None:
    """Steer an attention by its own weights, at some or all steps, beside a sentence that is not steered."""
    attention, query, states, valid = made
    heads = attention.heads if isinstance(attention, MultiHeadAttention) else 1
    if case.training or heads > 1:
        return
    own = attend(attention, query, states, valid)
    steered = torch.ones(query.shape[:2], dtype=torch.bool)
    steered[-1] = False
    steered[:, 1:2] = False
    steering = Steering(own.weights, steered)
    memory = attention.remember(states, valid).steered(steering)
    for attended in (
        attention.sequence(query, memory),
        join_steps(one_by_one(attention, query, memory)),
    ):
        torch.testing.assert_close(attended.context, own.context, **TOLERANCE)
        torch.testing.assert_close(attended.weights, own.weights, **TOLERANCE)
        torch.testing.assert_close(attended.past.total, own.past.total, **TOLERANCE)


def a_steered_step_attends_where_it_is_told(case: Case, made: Made) -> None:
    """All heads follow the steered weights, later steps continue from them, and earlier steps do not change."""
    attention, query, states, valid = made
    if case.training:
        return
    own = attend(attention, query, states, valid)
    B, T, S = own.weights.shape
    step, positions = T // 2, valid.sum(1) - 1
    steering = Steering(torch.zeros(B, step + 1, S, dtype=torch.float64), torch.zeros(B, step + 1, dtype=torch.bool))
    steering.weights[torch.arange(B), step, positions] = 1
    steering.steered[:, step] = True
    memory = attention.remember(states, valid).steered(steering)._replace(detailed=True)
    attended = attention.sequence(query, memory)
    assert (attended.weights[torch.arange(B), step, positions] == 1).all()
    assert (attended.weights[:, step].sum(-1) == 1).all()
    torch.testing.assert_close(attended.weights[:, :step], own.weights[:, :step], **TOLERANCE)
    assert attended.detail is not None
    torch.testing.assert_close(attended.detail.heads.mean(1), attended.weights, **TOLERANCE)
    if attended.detail.stops is not None:
        assert (attended.detail.stops[:, :, step] == positions[:, None]).all()
        later = attended.detail.stops[:, :, step + 1 :]
        assert ((later >= positions[:, None, None]) | (later == -1)).all()


Law = Callable[[Case, Made], None]

LAWS: list[Law] = [
    a_row_sums_to_one,
    garbage_in_padding_changes_nothing,
    steps_one_by_one_equal_one_call,
    batch_mates_and_padding_change_nothing,
    selected_rows_go_on_as_they_would,
    hypotheses_may_share_a_sentence,
    a_sentence_without_positions_is_zero_with_finite_gradients,
    a_mask_made_once_changes_nothing,
    weights_given_back_change_nothing,
    a_steered_step_attends_where_it_is_told,
]
