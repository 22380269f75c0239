"""Sections for the corpus (`data`) and the tokenizer."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from nmt.config.schema.base import (
    BY_KIND,
    Conflict,
    Count,
    Fraction,
    Meaning,
    Name,
    PathName,
    Section,
    one_as_list,
)

DemoSize = Annotated[int, Field(gt=0, le=500)]  # sentence pairs for validation or testing of the built-in corpus
Parts = Annotated[list[PathName], Field(min_length=1), one_as_list]  # files of a split: paths, prefixes or patterns
Column = Name  # a column of a table, by the name in its header or by its number
VocabularySize = Annotated[int, Field(ge=6, le=1_000_000)]  # at least 4 special symbols, a space and a character


AtLeastOne = Annotated[float, Field(ge=1.0, le=1e6)]


class Preparation(Section):
    """Common values of all kinds of corpora: additional training data, filters and the cache."""

    extra: Annotated[list[PathName], one_as_list]
    max_length: Count
    max_ratio: AtLeastOne | None
    workers: Annotated[Count | None, Meaning.NO_EFFECT]
    cache_dir: Annotated[PathName, Meaning.NO_EFFECT]

    @property
    def tags(self) -> list[str]:
        """The tags, such as "<2de>", that source lines start with, in ascending order; [] for a single direction."""
        return []


class Corpus(Preparation):
    """Common values of all corpora with one source and one target language."""

    source_lang: Name
    target_lang: Name


class DemoData(Corpus):
    kind: Literal["demo"]
    source_lang: Literal["en"]
    target_lang: Literal["fr"]
    train_size: Annotated[int, Field(gt=0, le=16_000)]
    validation_size: DemoSize
    test_size: DemoSize


SAME_COLUMN = (
    "target_column needs another column: the same text is on both sides, but source_column; change one of them"
)


class FilesData(Corpus):
    kind: Literal["files"]
    train: Parts
    validation: Parts
    test: Parts | None
    header: bool
    source_column: Column | None
    target_column: Column | None
    alignments: Column | None

    conflicts = (
        Conflict(
            "target_lang needs another language or column: the same text is on both sides, but source_lang; "
            "set source_lang and target_lang, or source_column and target_column",
            lambda data: data.source_lang == data.target_lang and data.columns[0] == data.columns[1],
        ),
        Conflict(SAME_COLUMN, lambda data: data.source_lang != data.target_lang and data.columns[0] == data.columns[1]),
    )

    @property
    def columns(self) -> tuple[str, str]:
        """The columns of source and target in tables: by default named after the languages, else the first two."""
        names = (self.source_lang, self.target_lang) if self.header else ("1", "2")
        return self.source_column or names[0], self.target_column or names[1]

    @property
    def has_pairs_only(self) -> bool:
        """Whether tables have two columns without names, so that none needs to be chosen."""
        return not (self.header or self.source_column or self.target_column or self.alignments)


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
    path: PathName | None
    path_splits: Splits

    conflicts = Conflict.each(SAME_COLUMN, when=lambda data: data.source_column == data.target_column)


Code = Annotated[str, Field(pattern=r"^[A-Za-z][\w.-]*$", max_length=100)]  # language code, which becomes part of a tag


class DirectedCorpus(Section):
    """The corpus of one direction of a multilingual model.

    Where a split is None, the files that `MultilingualData` names for all directions are read.
    """

    source_lang: Code
    target_lang: Code
    train: Parts | None = None
    validation: Parts | None = None
    test: Parts | None = None

    @property
    def tag(self) -> str:
        """The first token of each source line: "<2de>" for the target language "de" (Johnson et al. 2017)."""
        return f"<2{self.target_lang.lower()}>"


def _section(value: object) -> object:
    """Convert a direction "en-de" to the values of a DirectedCorpus."""
    if isinstance(value, dict):
        return value
    languages = value.split("-") if isinstance(value, str) else []
    if len(languages) != 2 or not all(languages):  # noqa: PLR2004
        raise PydanticCustomError(
            "direction", "Input should be a direction such as en-de, or {source_lang: en, target_lang: de, ...}"
        )
    return {"source_lang": languages[0], "target_lang": languages[1]}


Corpora = Annotated[list[Annotated[DirectedCorpus, BeforeValidator(_section)]], Field(min_length=1), one_as_list]


class MultilingualData(Preparation):
    kind: Literal["multilingual"]
    corpora: Corpora
    train: Parts | None
    validation: Parts | None
    test: Parts | None

    @model_validator(mode="after")
    def _refuse_unclear_corpora(self) -> Self:
        for number, corpus in enumerate(self.corpora):
            key = f"corpora[{number}] ({corpus.source_lang}-{corpus.target_lang})"
            if corpus.source_lang == corpus.target_lang:
                raise ValueError(f"{key}: the same language on both sides")
            for split in ("train", "validation"):
                if not (getattr(corpus, split) or getattr(self, split)):
                    raise ValueError(
                        f"{key}: has no {split}; give it {split}: PREFIX, or all corpora data.{split}=PREFIX"
                    )
        if self.extra:
            raise ValueError(f"extra={self.extra[0]}: has no direction; add it to the train of one of the corpora")
        return self

    @property
    def tags(self) -> list[str]:
        """The tags of all target languages, in ascending order."""
        return sorted({corpus.tag for corpus in self.corpora})

    @property
    def source_lang(self) -> str:
        """All source languages, separated by commas."""
        return ",".join(dict.fromkeys(corpus.source_lang for corpus in self.corpora))

    @property
    def target_lang(self) -> str:
        """All target languages, separated by commas."""
        return ",".join(dict.fromkeys(corpus.target_lang for corpus in self.corpora))

    def files(self) -> list[FilesData]:
        """Return the corpus of each direction as `FilesData`."""
        common = {key: getattr(self, key) for key in Preparation.model_fields}
        return [
            FilesData(
                kind="files",
                source_lang=corpus.source_lang,
                target_lang=corpus.target_lang,
                train=corpus.train or self.train or [],
                validation=corpus.validation or self.validation or [],
                test=corpus.test or self.test,
                header=True,
                source_column=None,
                target_column=None,
                alignments=None,
                **common,
            )
            for corpus in self.corpora
        ]


Data = Annotated[DemoData | FilesData | HubData | MultilingualData, BY_KIND]


class TokenizerSide(Section):
    """What text is cut into, and its Unicode form."""

    kind: Literal["bpe", "unigram", "char", "word"]
    vocab_size: VocabularySize
    byte_fallback: bool
    normalization: Literal["nfc", "nfd", "nfkc", "nfkd", "none"]
    character_coverage: Annotated[float, Field(ge=0.98, le=1.0)]  # the range that SentencePiece accepts
    split_punctuation: bool
    sampling: Fraction

    conflicts = Conflict.each("sampling>0 needs merges that can be skipped, but kind=unigram|char|word; use kind=bpe")


class TrainedTokenizer(TokenizerSide):
    """A tokenizer that both languages share, with one vocabulary."""

    max_train_lines: Count
    lowercase: bool

    @property
    def sampling_by_side(self) -> tuple[float, float]:
        """The value of `sampling` for source and target."""
        return self.sampling, self.sampling


class SidesTokenizer(Section):
    """A tokenizer for each language, each with its vocabulary."""

    kind: Literal["sides"]
    source: TokenizerSide
    target: TokenizerSide
    max_train_lines: Count
    lowercase: bool

    @property
    def sampling_by_side(self) -> tuple[float, float]:
        """The value of `sampling` for source and target."""
        return self.source.sampling, self.target.sampling


class FileTokenizer(Section):
    kind: Literal["file"]
    source_model: PathName
    target_model: PathName | None
    lowercase: bool
    sampling: Fraction

    @property
    def sampling_by_side(self) -> tuple[float, float]:
        """The value of `sampling` for source and target."""
        return self.sampling, self.sampling


TokenizerConfig = Annotated[TrainedTokenizer | SidesTokenizer | FileTokenizer, BY_KIND]
