"""How a search drives a model: one step at a time, with a state of one row for each hypothesis.

Shapes: N hypotheses (the rows of a step), S source positions, V vocabulary.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor


class State(Protocol):
    """A model's recurrent state, one row per hypothesis."""

    def select(self, index: Tensor) -> Self:
        """The rows `index`, int64 (M,), which may repeat."""
        ...

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Like `select`, but every sentence has the same number of rows, in a group; these may share its memory.

        `sentences`, int64 (A,): the sentences that remain; None: all.
        """
        ...


StateT = TypeVar("StateT", bound=State)


class StepOutput(NamedTuple, Generic[StateT]):
    """Logits (N, V), the attention weights (N, S) they were computed with, and the state after the step.

    Weights are None without attention. Later steps must not overwrite them.
    """

    logits: Tensor
    weights: Tensor | None
    state: StateT


Step = Callable[[Tensor, StateT], StepOutput[StateT]]
"""Previous tokens, int64 (N,), and a state of N rows -> the output for the next token."""
