"""Runs that differ only in their seed form one system, named by its differences from the other systems."""

import pytest

from nmt.compare.compare import group
from nmt.compare.entry import Entry, System


def entry(name: str, seed: int = 1, **asked: str) -> Entry:
    asked = {"attention": "bahdanau", **asked}
    return Entry(name, ["x"], seed, str(sorted(asked.items())), {key.replace("_", "."): v for key, v in asked.items()})


def names(*entries: Entry) -> list[str]:
    return [system.name for system in group(entries)]


def test_seeds_are_put_together_in_order() -> None:
    two, one, other = entry("a2", 2), entry("a1", 1), entry("b1", 1, attention="none")
    systems = group([two, other, one])
    assert systems == [System("bahdanau", [one, two]), System("none", [other])]
    assert systems[0].of_seed(2) is two
    assert systems[0].of_seed(9) is one
    assert systems[1].of_seed(None) is other


def test_a_name_says_what_differs_and_nothing_else() -> None:
    assert names(entry("a")) == ["bahdanau"]
    assert names(entry("a", attention="none", encoder="gru"), entry("b", encoder="gru")) == ["none", "bahdanau"]
    both = entry("a", attention="none", encoder="gru"), entry("b", encoder="lstm")
    assert names(*both) == ["none encoder=gru", "bahdanau encoder=lstm"]
    rates = entry("a", optimizer_lr="0.1"), entry("b", optimizer_lr="0.2"), entry("c")
    assert names(*rates) == ["lr=0.1", "lr=0.2", "bahdanau"]
    halves = entry("a", encoder_dropout="0.1", decoder_dropout="0.3"), entry("b", encoder_dropout="0.3")
    assert names(*halves) == ["decoder.dropout=0.3 encoder.dropout=0.1", "encoder.dropout=0.3"]
    score = Entry("c", ["x"], 1, "other", {"attention": "bahdanau", "attention/score": "dot"})
    assert names(entry("a"), score) == ["bahdanau", "attention/score=dot"]


def test_what_differs_within_a_system_does_not_name_it() -> None:
    def tuned(name: str, seed: int, start: str) -> Entry:
        return Entry(name, ["x"], seed, "tuned", {"optimizer.lr": "0.1", "training.start_from": start})

    two = tuned("b1", 1, "a1"), tuned("b2", 2, "a2")
    assert names(Entry("a1", ["x"], 1, "first", {"optimizer.lr": "0.3"}), *two) == ["lr=0.3", "lr=0.1"]
    said = Entry("c", ["x"], 1, "wide", {"encoder.hidden": "256"})  # sets the default value
    unsaid = Entry("c", ["x"], 2, "wide", {})
    assert names(said, unsaid, Entry("d", ["x"], 1, "wider", {"encoder.hidden": "512"})) == ["hidden=256", "hidden=512"]


def test_what_has_the_same_name_gets_the_directory_too() -> None:
    by_hand = Entry("runs/x", ["x"], 1, "edited", {"attention": "bahdanau"})
    assert names(entry("runs/a"), by_hand) == ["bahdanau (runs/a)", "bahdanau (runs/x)"]
    assert names(Entry("runs/x", ["x"], 1, "from Python", {})) == ["runs/x"]


def test_an_output_of_another_system_stands_for_itself() -> None:
    peers = Entry("one", ["x"]), Entry("two", ["x"])
    assert names(entry("a"), *peers) == ["bahdanau", "one", "two"]
    assert names(entry("a"), entry("b", attention="none"), peers[0]) == ["bahdanau", "none", "one"]


def test_runs_of_the_same_seed_count_once(caplog: pytest.LogCaptureFixture) -> None:
    one, copy, second = entry("a"), entry("b"), entry("s", 2)
    rerun = Entry("c", ["y"], 1, one.config, one.choices)  # as on another machine
    assert group([one, copy, rerun, second]) == [System("bahdanau", [one, second])]
    assert "b repeats a: left out" in caplog.text
    assert "c has the configuration and the seed of a, so the two are not independent: left out" in caplog.text
    tuned = [Entry(name, ["x"], 1, "tuned", {"training.start_from": name}) for name in ("d", "e")]
    (system,) = group(tuned)
    assert system.entries == tuned  # they start from different runs


@pytest.mark.parametrize("choices", [{}, {"data.path": "elsewhere"}])
def test_an_archive_or_another_path_of_the_corpus_makes_no_second_seed(choices: dict[str, str]) -> None:
    run, other = (entry(name, **{"data.path": "here"}) for name in ("a", "b"))
    same = Entry("c", ["x"], 1, run.config, {"attention": "bahdanau", **choices})
    none = entry("d", attention="none")
    assert group([run, other, same, none]) == [System("bahdanau", [run]), System("none", [none])]
