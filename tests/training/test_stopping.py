"""Which validation is best, and when patience runs out."""

from nmt.training.best import EarlyStopping


def test_bleu_is_to_rise_and_loss_to_fall() -> None:
    bleu, loss = EarlyStopping("bleu", None), EarlyStopping("loss", None)
    scores = [{"bleu": 1.0, "loss": 3.0}, {"bleu": 2.0, "loss": 4.0}, {"bleu": 1.5, "loss": 2.0}]
    assert [bleu.update(each, step) for step, each in enumerate(scores)] == [True, True, False]
    assert [loss.update(each, step) for step, each in enumerate(scores)] == [True, False, True]
    assert (bleu.best, bleu.best_step) == (2.0, 1)
    assert (loss.best, loss.best_step) == (2.0, 2)


def test_an_equal_score_is_no_improvement() -> None:
    stopping = EarlyStopping("bleu", 1)
    assert stopping.update({"bleu": 0.0}, 1)
    assert not stopping.update({"bleu": 0.0}, 2)


def test_patience_counts_validations_since_the_best() -> None:
    stopping = EarlyStopping("bleu", 2)
    states = []
    for step, score in enumerate([1.0, 0.5, 2.0, 0.0, 0.0]):
        stopping.update({"bleu": score}, step)
        states.append(stopping.exhausted)
    assert states == [False, False, False, False, True]


def test_without_patience_it_never_stops() -> None:
    stopping = EarlyStopping("loss", None)
    for step in range(50):
        stopping.update({"loss": float(step)}, step)
    assert not stopping.exhausted


def test_state_goes_with_a_checkpoint() -> None:
    one, other = EarlyStopping("bleu", 2), EarlyStopping("bleu", 2)
    one.update({"bleu": 3.0}, 7)
    one.update({"bleu": 2.0}, 8)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == {"best": 3.0, "best_step": 7, "waited": 1}
