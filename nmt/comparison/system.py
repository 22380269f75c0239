"""A system: the runs of one configuration, which differ in nothing but their seed."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmt.comparison.entry import Entry
from nmt.config.compose import PATH_KEYS
from nmt.config.errors import printable
from nmt.config.overrides import user_path
from nmt.report.table import short

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class System:
    """Entries of one configuration, by seed."""

    name: str
    entries: list[Entry]

    def of_seed(self, seed: int | None) -> Entry:
        """The entry with this seed, the first without one."""
        return next((entry for entry in self.entries if entry.seed == seed), self.entries[0])


def group(entries: Sequence[Entry]) -> list[System]:
    """Systems in the order of their first entries, named by what tells them apart."""
    groups: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        group = groups.setdefault(entry.config or (entry.name,), [])
        if twin := next((e for e in group if (e.seed, e.hypotheses) == (entry.seed, entry.hypotheses)), None):
            log.warning("%s is %s once more: left out", entry.name, twin.name)
        else:
            group.append(entry)
    systems = [sorted(group, key=lambda entry: (entry.seed or 0, entry.name)) for group in groups.values()]
    asked = [group[0].asked for group in systems if group[0].asked]
    keys = sorted({key for each in asked for key in each})
    varied = [key for key in keys if len({str(each.get(key)) for each in asked}) > 1]
    # Places that the runs of a system have different ones of, such as what each seed began with, name none of them.
    places = PATH_KEYS | {"training.start_from"}
    own = {key for group in systems for key in places if len({str(entry.asked.get(key)) for entry in group}) > 1}
    varied = [key for key in varied if key not in own]
    names = [_name(group[0], [key for key in varied if key != "experiment"]) for group in systems]
    # A recipe is told where nothing that was asked for beside it differs.
    names = [
        name if names.count(name) == 1 else _name(group[0], varied) for name, group in zip(names, systems, strict=True)
    ]
    return [
        System(name if names.count(name) == 1 else f"{name} ({group[0].name})", group)
        for name, group in zip(names, systems, strict=True)
    ]


def find(name: str, systems: Sequence[System]) -> str | None:
    """The system that is called so, or that has this run; None if there is none."""
    place = user_path(name).resolve()
    for system in systems:
        if name == system.name or any(entry.config and Path(entry.name).resolve() == place for entry in system.entries):
            return system.name
    return None


def _name(entry: Entry, varied: Sequence[str]) -> str:
    """Such as "bahdanau", "bahdanau encoder=lstm" or "lr=0.003"."""
    told = entry.asked
    if not entry.config:
        return entry.name
    parts = [str(told["attention"])] if "attention" in told and "attention" in varied else []
    ends = [key if "/" in key else key.rpartition(".")[2] for key in varied]
    parts += [
        f"{end if ends.count(end) == 1 else key}={short(told[key])}"
        for key, end in zip(varied, ends, strict=True)
        if key != "attention" and told.get(key) is not None
    ]
    return printable(" ".join(parts) or str(told.get("attention", entry.name)))
