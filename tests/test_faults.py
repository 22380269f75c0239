"""The planted faults of scripts/faults.py still fit the code."""

from conftest import script


def test_each_fault_stands_once_in_its_subpackage_and_names_its_tests() -> None:
    faults = script("faults")
    planted = faults.load()
    assert faults.problems(planted) == []
    assert len({fault.id for fault in planted}) == len(planted)
    assert all(fault.old != fault.new for fault in planted)
