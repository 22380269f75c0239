"""Scores with extreme inputs, and the computation of additive energies; test_combinations compares the equations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nmt.attention import scores
from nmt.attention.attention import Attention
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import CosineScore, GaussianMixtureScore, additive_energies
from nmt.attention.windows import GlobalWindow
from nmt.ops.products import defer

B, T, S, A, F = 2, 3, 4, 3, 2
VALID = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_any_query_gives_finite_weights_and_gradients(scale: float) -> None:
    """Tests float32 over 50 steps."""
    made = Attention(GaussianMixtureScore(4, 3), GlobalWindow(), SoftmaxNormalizer(), reads_past=True)
    query, states = (torch.randn(2, 50, 4) * scale).requires_grad_(), torch.randn(2, 9, 5)
    attended = made.sequence(query, made.remember(states, VALID))
    torch.testing.assert_close(attended.weights.sum(-1), torch.ones(2, 50))
    gradients = torch.autograd.grad(attended.context.square().sum(), [query, *made.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_cosine_of_a_zero_state_is_zero_with_finite_gradients() -> None:
    score = CosineScore(4, 4, 5.0).double()
    assert torch.nn.functional.softplus(score.offset).item() == pytest.approx(5)  # the sharpness at first
    memory = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    energies = score(torch.randn(2, 5, 4).double(), score.keys(memory))
    assert not energies.any()
    (gradient,) = torch.autograd.grad(energies.sum(), [memory])
    assert gradient.isfinite().all()


@pytest.fixture(params=["on a CPU", "as on a GPU"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as on a GPU":
        monkeypatch.setattr(scores, "prefers_sigmoid", lambda keys: False)


def tensors(updated: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw query, keys and weight; if `updated`, also the features and the projection that keys are updated by."""
    shapes = [(B, T, A), (B, S, A), (1, A), (B, S, F), (A, F)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes[: 5 if updated else 3]]


def formula(query: Tensor, keys: Tensor, weight: Tensor, *update: Tensor) -> Tensor:
    if update:
        features, projection = update
        keys = keys + features @ projection.T
    return torch.tanh(query[:, :, None] + keys[:, None]) @ weight[0]


def step_by_step(query: Tensor, keys: Tensor, *others: Tensor) -> Tensor:
    (deferred,) = defer(keys)
    return torch.cat([additive_energies(one[:, None], deferred, *others) for one in query.unbind(1)], dim=1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("energies", [additive_energies, step_by_step])
@pytest.mark.parametrize("updated", [False, True])
def test_additive_energies_are_the_formula_with_its_gradient(updated: bool, energies: Callable[..., Tensor]) -> None:
    given = tensors(updated)
    torch.testing.assert_close(energies(*given), formula(*given), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(energies, tuple(given))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("updated", [False, True])
def test_additive_energies_keep_nothing_of_the_size_of_the_hidden_units(updated: bool) -> None:
    kept: list[int] = []
    given = tensors(updated)

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        additive_energies(*given)
    assert max(kept) == B * S * A


@pytest.mark.usefixtures("device")
def test_autocast_does_not_round_additive_energies() -> None:
    for given in (tensors(False, torch.float32), tensors(True, torch.float32)):
        expected = formula(*given)
        with torch.autocast("cpu", torch.bfloat16):
            found = additive_energies(*given)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
