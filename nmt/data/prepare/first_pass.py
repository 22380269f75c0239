"""The first pass over a corpus: usable pairs, counts, tokenizers and warnings."""

import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nmt.config.schema import data as schema
from nmt.data.prepare.tokenizer_sample import TokenizerSample
from nmt.data.prepare.tokenizer_training import make_tokenizers
from nmt.data.prepare.usable_pairs import UsablePairs, read_usable
from nmt.data.prepare.warnings import PairStatistics, corpus_warnings
from nmt.data.prepare.workers import Workers
from nmt.data.reading.corpus import Splits
from nmt.system.files import read_bytes, write_atomically

log = logging.getLogger(__name__)

FIRST_PASS = "first_pass.json"


@dataclass
class FirstPass:
    """What the first pass over the corpus leaves behind, beside the tokenizers."""

    usable: dict[str, UsablePairs]
    matches: dict[str, dict[str, int]]  # number of pairs for each kind of warning
    warnings: list[str]

    @classmethod
    def load(cls, working: Path) -> "FirstPass | None":
        """None if the first pass was not finished there."""
        try:
            values = json.loads(read_bytes(working / FIRST_PASS))
        except FileNotFoundError:
            return None
        usable = {name: UsablePairs.from_json(_raw(working, name), split) for name, split in values["usable"].items()}
        return cls(usable, values["matches"], values["warnings"])

    def save(self, working: Path) -> None:
        usable = {name: pairs.to_json() for name, pairs in self.usable.items()}
        values = {"usable": usable, "matches": self.matches, "warnings": self.warnings}
        write_atomically(working / FIRST_PASS, json.dumps(values).encode())

    def delete(self, working: Path) -> None:
        (working / FIRST_PASS).unlink()
        for pairs in self.usable.values():
            pairs.path.unlink()


def _raw(working: Path, name: str) -> Path:
    return working / f"{name}.raw"


def read_corpus(
    data: schema.Data, tokenizer: schema.TokenizerConfig, splits: Splits, working: Path, workers: Workers
) -> FirstPass:
    """Read the splits, train last, and make the tokenizers."""
    statistics, sample = PairStatistics(), None
    if not isinstance(tokenizer, schema.FileTokenizer):
        sample = TokenizerSample(working, tokenizer.max_train_lines, tokenizer.joint)
    usable = {
        name: read_usable(
            name, splits[name], _raw(working, name), workers, statistics, sample if name == "train" else None
        )
        for name in sorted(splits, key=lambda name: name == "train")
    }
    log.info("tokenizer: %s", tokenizer.kind)
    source, target = (partial(sample.lines, side) if sample else lambda: iter(()) for side in (0, 1))
    make_tokenizers(tokenizer, source, target, data.tags).save(working)
    if sample:
        sample.delete()
    matches = {name: statistics.of(name) for name in splits}
    warnings = corpus_warnings(
        splits,
        matches,
        {name: pairs.sample() for name, pairs in usable.items()},
        {name: len(pairs) for name, pairs in usable.items()},
    )
    totals = {name: {kind: match.total for kind, match in kinds.items()} for name, kinds in matches.items()}
    result = FirstPass(usable, totals, warnings)
    result.save(working)
    return result
