"""Several directions in one model: their corpora are concatenated, with tags such as <2de> before source lines."""

from itertools import chain, product
from pathlib import Path

import pytest
from conftest import TINY, run_config
from forks import call

from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.corpus import Pair, count_pairs, locate, splits
from nmt.data.prepare import prepare
from nmt.data.prepared_corpus import PreparedCorpus

NOUNS = [("dog", "Hund", "chien"), ("cat", "Katze", "chat"), ("horse", "Pferd", "cheval"), ("bird", "Vogel", "oiseau")]
VERBS = [("sees", "sieht", "voit"), ("hears", "hört", "entend"), ("finds", "findet", "trouve")]
LANGUAGES = ("en", "de", "fr")
SMALL = [value for value in TINY if not value.startswith(("data.", "tokenizer.vocab_size"))]
SMALL += ["data=multilingual", "tokenizer.vocab_size=70", "training.batch_tokens=200", "schedule=constant", "size=base"]
SMALL += ["training.max_epochs=2", "training.max_steps=20"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the splits train, valid and test in three languages."""
    folder = tmp_path_factory.mktemp("multilingual")
    triples = [
        tuple(f"{a[side]} {v[side]} {b[side]} ." for side in range(3)) for a, v, b in product(NOUNS, VERBS, NOUNS)
    ]
    for split, some in (("train", triples), ("valid", triples[::6]), ("test", triples[1::9])):
        for side, language in enumerate(LANGUAGES):
            (folder / f"{split}.{language}").write_text("".join(f"{line[side]}\n" for line in some))
    return folder


def overrides(corpus: Path, *more: str) -> list[str]:
    paths = [f"data.{key}={corpus / name}" for key, name in (("train", "train"), ("validation", "valid"))]
    return [*SMALL, "data.corpora=[en-de,de-en,en-fr]", *paths, f"data.test={corpus / 'test'}", *more]


def config(corpus: Path, *more: str) -> TrainConfig:
    return run_config(*overrides(corpus, *more))


def prepared(corpus: Path, *more: str) -> PreparedCorpus:
    values = config(corpus, *more)
    return prepare(values.data, values.tokenizer)


def test_corpora_follow_one_another_and_pairs_keep_their_files_and_lines(corpus: Path) -> None:
    more = f"{{source_lang: de, target_lang: fr, train: {corpus / 'valid'}, validation: {corpus / 'test'}}}"
    train = splits(config(corpus, f"data.corpora=[en-de,{more}]").data)["train"]
    size = len((corpus / "train.en").read_text().splitlines())
    pairs = list(chain.from_iterable(train))
    assert [pairs[0], pairs[size]] == [
        Pair("<2de> dog sees dog .", "Hund sieht Hund ."),
        Pair("<2fr> Hund sieht Hund .", "chien voit chien ."),
    ]
    assert count_pairs(train) == len(pairs) == size + len((corpus / "valid.en").read_text().splitlines())
    assert locate(train, [1, size + 2]) == f"{corpus / 'train.en'}, line 1; {corpus / 'valid.de'}, line 2"


def test_blank_sources_have_no_tag_in_text_and_tables(tmp_path: Path) -> None:
    (tmp_path / "text.en").write_text("a\n \n")
    (tmp_path / "text.pt-BR").write_text("b\nc\n")
    (tmp_path / "table.tsv").write_text("en\tpt-BR\na\tb\n \tc\n")
    paths = [f"data.{split}=[{tmp_path}/text,{tmp_path}/table.tsv]" for split in ("train", "validation")]
    corpora = "data.corpora=[{source_lang: en, target_lang: pt-BR}]"
    data = run_config(*SMALL, corpora, *paths).data
    assert [*chain.from_iterable(splits(data)["train"])] == 2 * [Pair("<2pt-br> a", "b"), Pair(" ", "c")]


@pytest.mark.parametrize("tokenizer", ["bpe", "unigram", "word"])
def test_the_tokenizer_never_splits_a_tag(corpus: Path, tokenizer: str) -> None:
    made = prepared(corpus, f"tokenizer={tokenizer}", "embedding.tie_output=false", "tokenizer.vocab_size=42")
    source = made.tokenizers.source
    for split in made.splits.values():
        tags = [source.pieces(split.source.ids(i)[:1])[0] for i in range(len(split))]
        assert tags == [f"▁{tag}" for tag in ("<2de>", "<2en>", "<2fr>") for _ in range(len(split) // 3)]
    if source.can_sample():
        for ids in source.sample(["<2de> dog sees cat ."] * 20, 0.5, range(20)):
            assert source.pieces(ids[:1]) == ["▁<2de>"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.corpora=[en-en]", r"corpora\[0\] \(en-en\): the same language on both sides"),
        ("data.train=null", r"corpora\[0\] \(en-de\): has no train; give it train: PREFIX, or all corpora data.train"),
        ("data.corpora=[english]", r"data.corpora\[0\]=english: input should be a direction such as en-de"),
        ("data.corpora=[]", "data.corpora"),
        ("data.extra=[x]", "extra=x: has no direction; add it to the train of one of the corpora"),
        ("data.corpora=[{source_lang: 2n, target_lang: de}]", r"data.corpora\[0\].source_lang=2n"),
        ("data.corpora=[{source_lang: en, target_lang: de, weight: 2}]", r"weight: unknown key"),
        ("training.guided_alignment=0.1", "word alignments"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(corpus: Path, change: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        config(corpus, change)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run_trains_and_translates_tagged_lines(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = call("nmt-train", *overrides(corpus, f"hydra.run.dir={run}"))
    assert done.returncode == 0, done.stderr.decode()
    assert (run / "data/test.source").read_text().startswith("<2de> ")
    source = (run / "data/test.source").read_bytes()
    done = call("nmt-translate", f"run={run}", "threads=1", stdin=source)
    assert done.stdout == (run / "hypotheses/test.txt").read_bytes()
