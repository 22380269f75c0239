"""Corpus and tokenizer."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nmt.config.schema.base import Count, Factor, Fraction, Name, Names, Section, Seed

DemoSize = Annotated[int, Field(gt=0, le=10_000_000)]  # sentences, generated in memory
Parts = Annotated[Names, Field(min_length=1)]  # paths or patterns
VocabularySize = Annotated[int, Field(ge=6, le=1_000_000)]  # at least four special symbols, a space and a character


class Corpus(Section):
    """Common values of all corpora."""

    source_lang: Name
    target_lang: Name
    extra: Names
    max_length: Count
    max_ratio: Factor | None
    invalid_utf8: Literal["error", "drop"]
    workers: Count | None
    cache_dir: Name


class DemoData(Corpus):
    kind: Literal["demo"]
    source_lang: Literal["en"]
    target_lang: Literal["fr"]
    train_size: DemoSize
    validation_size: DemoSize
    test_size: DemoSize
    seed: Seed


class FilesData(Corpus):
    kind: Literal["files"]
    train: Parts
    validation: Parts
    test: Parts | None
    source_column: Name | None
    target_column: Name | None
    alignments: Name | None

    def conflicts(self) -> Iterator[str]:
        if self.source_lang == self.target_lang and self.source_column == self.target_column:
            yield f"source_lang and target_lang are both '{self.source_lang}': the same text on both sides"


class Splits(Section):
    train: Name
    validation: Name
    test: Name | None


class HubData(Corpus):
    kind: Literal["hub"]
    id: Name
    name: Name | None
    revision: Name | None
    splits: Splits
    source_column: Name
    target_column: Name
    path: Name | None
    path_splits: Splits


Data = Annotated[DemoData | FilesData | HubData, Field(discriminator="kind")]


class SegmentationSampling(Section):
    """Random segmentation of the training data (BPE-dropout, subword regularisation)."""

    sampling: Fraction
    sampling_sides: Literal["both", "source", "target"]

    @property
    def sampling_by_side(self) -> tuple[float, float]:
        """The sampling of source and target; 0 is none."""
        sides = self.sampling_sides
        return self.sampling if sides != "target" else 0.0, self.sampling if sides != "source" else 0.0


class TrainedTokenizer(SegmentationSampling):
    kind: Literal["bpe", "unigram", "char", "word"]
    vocab_size: VocabularySize
    joint: bool
    byte_fallback: bool
    normalization: Literal["nfc", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"]
    max_train_lines: Count
    character_coverage: Annotated[float, Field(ge=0.98, le=1.0)]  # limits of SentencePiece
    split_punctuation: bool
    lowercase: bool

    def conflicts(self) -> Iterator[str]:
        if self.sampling and self.kind in {"char", "word"}:
            yield f"sampling={self.sampling} needs kind=bpe or unigram, not {self.kind}"


class FileTokenizer(SegmentationSampling):
    kind: Literal["file"]
    source_model: Name
    target_model: Name | None
    lowercase: bool


TokenizerConfig = Annotated[TrainedTokenizer | FileTokenizer, Field(discriminator="kind")]
