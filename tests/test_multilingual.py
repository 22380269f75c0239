"""Several directions in one model: tags, the mixture of corpora, and every command on such a run."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, values_of
from forks import call
from sacrebleu.metrics.bleu import BLEU
from serve.served import serving

from nmt import Translator
from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.batching import make_batches
from nmt.data.mixture import Mixture, shares
from nmt.data.prepare.prepare import fingerprint_of, prepare
from nmt.data.prepared import Prepared
from nmt.data.reading.corpus import splits
from nmt.data.reading.language_tags import Tags
from nmt.data.reading.sources import Pair, count_pairs, locate
from nmt.evaluate.evaluation import score_settings
from nmt.training.job import train
from nmt.training.validation import Validator
from nmt.translate.search import Hypothesis

NOUNS = [("dog", "Hund", "chien"), ("cat", "Katze", "chat"), ("horse", "Pferd", "cheval"), ("bird", "Vogel", "oiseau")]
VERBS = [("sees", "sieht", "voit"), ("hears", "hört", "entend"), ("finds", "findet", "trouve")]
LANGUAGES = ("en", "de", "fr")
DIRECTIONS = "[en-de,de-en,en-fr,fr-en]"
NAMES = ["en-de", "de-en", "en-fr", "fr-en"]
SMALL = [value for value in TINY if not value.startswith(("data.", "tokenizer.vocab_size"))]
SMALL += ["data=multilingual", "tokenizer.vocab_size=70", "training.batch_tokens=200", "schedule=constant", "size=base"]
SMALL += ["training.max_epochs=2", "training.max_steps=20"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train, valid and test in three languages."""
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
    return [*SMALL, f"data.corpora={DIRECTIONS}", *paths, f"data.test={corpus / 'test'}", *more]


def config(corpus: Path, *more: str) -> TrainConfig:
    return validated(TrainConfig, values_of("train", overrides(corpus, *more)))


def prepared(corpus: Path, *more: str) -> Prepared:
    values = config(corpus, *more)
    return prepare(values.data, values.tokenizer)


# Tags


def test_a_mark_is_put_in_front_and_taken_away_again() -> None:
    tags = Tags(["<2de>", "<2pt-br>"])
    assert tags.mark(None, "pt-BR") == "<2pt-br>"
    assert tags.without(tags.add(tags.mark(None, "de"), "the dog")) == "the dog"
    assert tags.add("<2de>", "  ") == "  "  # an empty line stays one
    both = Tags(["<2de>", "<2en>", "<en>", "<de>"])
    assert both.mark("en", "de") == "<en> <2de>"
    assert both.without("<en> <2de> the dog") == "the dog"
    assert both.without("<2de> the dog") == "<2de> the dog"  # no whole mark


def test_what_only_looks_like_a_tag_is_none() -> None:
    tags = Tags(["<2de>"])
    assert tags.add("<2de>", "<2de> a <2DE> <2fr>") == "<2de> < 2de> a < 2DE> <2fr>"
    assert tags.of_lines(["<2de> a <2de>"], "") == ["<2de> a < 2de>"]
    assert Tags().of_lines(["<2de> a"], "") == ["<2de> a"]


@pytest.mark.parametrize(
    ("symbols", "languages", "message"),
    [
        (["<2de>", "<2fr>"], (None, None), "target_lang=null: the model needs one of de, fr"),
        (["<2de>", "<2fr>"], ("en", "de"), "source_lang=en: the model has no tags of source languages; leave it out"),
        (["<2de>", "<2fr>"], (None, "es"), "target_lang=es: the model needs one of de, fr"),
        (["<2de>", "<en>"], (None, "de"), "source_lang=null: the model needs one of en"),
        ([], (None, "de"), "trained without tags"),
    ],
)
def test_a_language_that_is_missing_or_unknown_is_told(symbols: list[str], languages: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(UserError, match=message):
        Tags(symbols).mark(*languages)


UNTIED = ["embedding.tie_source_target=false", "embedding.tie_output=false"]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "word"])
@pytest.mark.parametrize("joint", ["true", "false"])
def test_tags_are_one_piece_and_never_in_a_target(corpus: Path, kind: str, joint: str) -> None:
    found = prepared(corpus, f"tokenizer={kind}", "tokenizer.vocab_size=42", f"tokenizer.joint={joint}", *UNTIED)
    source, target = found.tokenizers
    assert source.tags.targets == ["de", "en", "fr"]
    assert target.tags.symbols == (source.tags.symbols if joint == "true" else [])
    for split in found:
        for i, (_, language) in enumerate(split.directions):
            ids = split.source.ids(i).tolist()
            assert source.pieces(ids[:1]) == [f"▁<2{language}>"]
            assert not set(source.tag_ids) & set(ids[1:])
            assert not set(target.tag_ids) & set(split.target.ids(i).tolist())
    assert source.decode(source.encode(["<2de> dog"])[0]) == "dog"


def test_sampled_segmentations_keep_tags_whole(corpus: Path) -> None:
    found = prepared(corpus)
    for ids in found.tokenizers.source.sample(["<2de> dog sees cat ."] * 20, 0.5, range(20)):
        assert found.tokenizers.source.pieces(ids[:1]) == ["▁<2de>"]


# Corpora


def test_the_pairs_of_a_corpus_stand_together_with_its_files_and_places(corpus: Path) -> None:
    more = f"{{source_lang: de, target_lang: fr, train: {corpus / 'valid'}, validation: {corpus / 'test'}}}"
    data = config(corpus, f"data.corpora=[en-de,{more}]").data
    train_pairs = splits(data)["train"]
    size = len((corpus / "train.en").read_text().splitlines())
    assert list(train_pairs)[size] == Pair("Hund sieht Hund .", "chien voit chien .")
    assert count_pairs(train_pairs) == size + len((corpus / "valid.en").read_text().splitlines())
    assert locate(train_pairs, [1, size + 2]) == f"{corpus / 'train.en'}, line 1; {corpus / 'valid.de'}, line 2"


def test_one_corpus_without_tags_is_the_same_as_data_files(corpus: Path) -> None:
    paths = [f"data.train={corpus / 'train'}", f"data.validation={corpus / 'valid'}"]
    plain = validated(TrainConfig, values_of("train", [*SMALL, "data=files", *paths]))
    alone = prepared(corpus, "data.corpora=[en-de]", "data.tag=null", "data.test=null")
    assert alone.report["content"] == prepare(plain.data, plain.tokenizer).report["content"]


def test_directions_of_pairs_and_text_without_tags(corpus: Path) -> None:
    found = prepared(corpus)
    valid = found.splits["validation"]
    lines = {language: (corpus / f"valid.{language}").read_text().splitlines() for language in LANGUAGES}
    assert found.sources(valid) == [line for name in NAMES for line in lines[name[:2]]]
    assert valid.target.lines() == [line for name in NAMES for line in lines[name[3:]]]
    assert ["-".join(direction) for direction in valid.directions] == [name for name in NAMES for _ in lines["en"]]


def test_both_tags_stand_in_front_with_tag_source(corpus: Path) -> None:
    found = prepared(corpus, "data.tag=source")
    line = found.splits["train"].source.line(0)
    assert line.startswith("<en> <2de> ")
    assert found.tokenizers.source.pieces(found.splits["train"].source.ids(0))[:2] == ["▁<en>", "▁<2de>"]


def test_weights_do_not_prepare_a_corpus_again(corpus: Path) -> None:
    fingerprints = {
        fingerprint_of(values.data, values.tokenizer)
        for values in (config(corpus), config(corpus, "data.temperature=5"))
    }
    assert len(fingerprints) == 1
    other = config(corpus, "data.tag=source")
    assert fingerprint_of(other.data, other.tokenizer) not in fingerprints


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.tag=null"], "'en' is translated into 'de' and 'fr', and nothing tells the model which; set data.tag"),
        (["data.corpora=[en-en]"], r"corpora\[0\] \(en-en\): the same language on both sides"),
        (
            ["data.train=null"],
            r"corpora\[0\] \(en-de\): has no train; give it train: PREFIX, or all corpora data.train",
        ),
        (["data.corpora=[english]"], r"data.corpora\[0\]=english: input should be a direction such as en-de"),
        (["data.corpora=[]"], "data.corpora"),
        (["data.temperature=0.5"], "data.temperature=0.5"),
        (["data.tag=both"], "data.tag=both: not one of target, source"),
        (["data.extra=[x]"], "extra=x: has no direction; add it to the train of one of the corpora"),
        (["data.corpora=[{source_lang: en, target_lang: de, size: 2}]"], r"data.corpora\[0\].size: unknown key"),
        (["data.corpora=[{source_lang: 2n, target_lang: de}]"], r"data.corpora\[0\].source_lang=2n"),
        (["training.guided_alignment=0.1"], "word alignments"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(corpus: Path, changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        config(corpus, *changes)
    assert "\n" not in str(error.value)


def test_a_model_that_would_split_tags_is_refused(corpus: Path, tmp_path: Path) -> None:
    prepared(corpus, "data.corpora=[en-de]", "data.tag=null").tokenizers.save(tmp_path)
    changes = [value for value in overrides(corpus) if not value.startswith("tokenizer.")]
    changes += ["tokenizer=file", f"tokenizer.source_model={tmp_path / 'tokenizer.model'}"]
    values = validated(TrainConfig, values_of("train", changes))
    with pytest.raises(UserError, match="lacks the symbol ▁<2de>; train it with --user_defined_symbols=▁<2de>,▁<2en>"):
        prepare(values.data, values.tokenizer)


# Mixture


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0, 100.0])
def test_shares_are_those_of_the_paper(temperature: float) -> None:
    sizes, weights = [1000, 100, 10], [1.0, 2.0, 0.5]
    masses = [(size * weight) ** (1 / temperature) for size, weight in zip(sizes, weights, strict=True)]
    expected = [sum(sizes) * mass / sum(masses) for mass in masses]
    found = shares(sizes, weights, temperature)
    assert sum(found) == sum(sizes)
    assert np.abs(np.array(found) - expected).max() < 1


def test_in_proportion_every_pair_is_read_once() -> None:
    assert shares([1000, 7, 29_000], [1.0] * 3, 1.0) == [1000, 7, 29_000]
    assert shares([100_000, 100, 0], [1.0, 0.004, 1.0], 1.0) == [100_099, 1, 0]  # no corpus is left out


def test_no_pair_is_read_again_before_all_others_of_its_corpus() -> None:
    sizes = [50, 7]
    mixture = Mixture(sizes, [1.0, 1.0], 3.0, seed=1)
    assert mixture.counts[1] > 7  # repeated
    read: Counter[int] = Counter()
    for epoch in range(9):
        indices = mixture.epoch(epoch)
        assert len(indices) == 57
        read.update(indices.tolist())
        for corpus in (range(50), range(50, 57)):
            times = [read[i] for i in corpus]
            assert max(times) - min(times) <= 1
    assert mixture.epoch(3).tolist() == Mixture(sizes, [1.0, 1.0], 3.0, seed=1).epoch(3).tolist()
    assert mixture.epoch(3).tolist() != Mixture(sizes, [1.0, 1.0], 3.0, seed=2).epoch(3).tolist()


def test_batches_hold_what_the_mixture_says_in_as_many_batches_each_epoch(corpus: Path) -> None:
    small = f"{{source_lang: de, target_lang: en, train: {corpus / 'test'}, weight: 2}}"
    values = config(corpus, f"data.corpora=[en-de,{small}]", "data.temperature=3")
    found = prepare(values.data, values.tokenizer)
    batches = make_batches(found, "train", values)
    assert batches.mixture is not None
    for epoch in range(3):
        plan = batches.epoch(epoch)
        assert len(plan) == len(batches.epoch(0))
        assert sorted(np.concatenate(plan)) == sorted(batches.mixture.epoch(epoch))
    assert make_batches(found, "validation", values).mixture is None
    even = config(corpus)
    assert make_batches(prepare(even.data, even.tokenizer), "train", even).mixture is None


@pytest.mark.parametrize(
    ("tag", "expected"),
    [("target", {"target_lang": "de"}), ("source", {"target_lang": "de", "source_lang": "en"})],
)
def test_what_a_translation_must_be_told(corpus: Path, tag: str, expected: dict[str, str]) -> None:
    assert config(corpus, f"data.tag={tag}").data.direction_arguments == expected


# Runs

TEMPERED = "data.corpora=[{source_lang: en, target_lang: de, weight: 3},de-en,en-fr,fr-en]"


@pytest.fixture(scope="module")
def run(corpus: Path) -> Path:
    done = call("nmt-train", *overrides(corpus, TEMPERED, f"hydra.run.dir={corpus / 'run'}"))
    assert done.returncode == 0, done.stderr.decode()
    (hint,) = (line for line in done.stdout.decode().splitlines() if line.startswith("translate: "))
    assert hint.endswith(" target_lang=de")  # of the first direction
    return corpus / "run"


def test_resumed_in_mid_epoch_it_ends_in_the_same_bits(run: Path, corpus: Path, tmp_path: Path) -> None:
    values = config(corpus, TEMPERED)
    assert make_batches(prepare(values.data, values.tokenizer), "train", values).mixture is not None
    few = values.training.model_copy(update={"max_steps": 17})
    assert train(values.model_copy(update={"training": few}), tmp_path / "run", []) == 0
    assert train(values, tmp_path / "run", []) == 0
    names = ("checkpoints/best.safetensors", "hypotheses/test.txt")
    ours, whole = ([(path / name).read_bytes() for name in names] for path in (tmp_path / "run", run))
    weights = [torch.load(path / "checkpoints/last.pt", weights_only=True)["model"] for path in (tmp_path / "run", run)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    assert ours[1] == whole[1]


def test_bleu_of_each_direction_and_their_mean(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())["test"]
    hypotheses = (run / "hypotheses/test.txt").read_text().split("\n")[:-1]
    references = (run / "data/test.target").read_text().split("\n")[:-1]
    sources = (run / "data/test.source").read_text()
    assert "<" not in sources + "".join(hypotheses)
    size = len(references) // 4
    for number, name in enumerate(NAMES):
        part = slice(number * size, (number + 1) * size)
        expected = BLEU(force=True).corpus_score(hypotheses[part], [references[part]]).score
        assert results["directions"][name]["bleu"] == pytest.approx(expected, abs=1e-4)
        assert results["directions"][name]["sentences"] == size
    for metric in ("bleu", "chrf", "ter"):
        mean = sum(each[metric] for each in results["directions"].values()) / 4
        assert results[metric] == pytest.approx(mean, abs=1e-3)
    table = (run / "directions.test.md").read_text()
    assert re.search(rf"^\| mean .* {results['chrf']:.2f} \|", table, re.M)
    validations = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (last,) = [line for line in validations if "validation/bleu" in line][-1:]
    assert last["validation/bleu"] == pytest.approx(sum(last[f"validation/bleu_{name}"] for name in NAMES) / 4)


def test_a_language_is_given_once_or_line_by_line(run: Path) -> None:
    translate = ["nmt-translate", f"run={run}", "threads=1"]
    lines = "dog sees cat .\n\nHund sieht Katze .\n"
    whole = call(*translate, "target_lang=fr", stdin=lines.encode())
    tagged = call(*translate, stdin=lines.replace("dog", "<2fr> dog").replace("Hund", "<2fr> Hund").encode())
    assert whole.returncode == 0, whole.stderr.decode()
    assert whole.stdout == tagged.stdout
    assert whole.stdout.split(b"\n")[1] == b""
    missing = call(*translate, stdin=b"dog sees cat .\n")
    assert missing.returncode == 2
    assert b"line 1: into which language? give target_lang=LANGUAGE (de, en, fr), or start" in missing.stderr
    unknown = call(*translate, "target_lang=es", stdin=b"dog\n")
    assert (unknown.returncode, b"target_lang=es: the model needs one of de, en, fr" in unknown.stderr) == (2, True)


def test_links_count_the_words_of_the_line_without_tags(run: Path) -> None:
    translator = Translator.load(run).towards("de")
    (found,) = translator.translate(["dog sees cat ."])
    assert found.tags == 1
    assert found.source_tokens[0] == "▁<2de>"
    found.alignment[:] = 0.0  # type: ignore[index]
    found.alignment[:, 0] = 0.9  # type: ignore[index]
    found.alignment[:, -2] = 0.1  # type: ignore[index]
    assert {link.split("-")[0] for link in found.word_alignment().split()} == {"3"}  # the full stop


def test_no_unknown_word_is_replaced_by_a_tag(run: Path) -> None:
    translator = Translator.load(run).towards("de")
    target, (pieces,) = translator.tokenizers.target, translator.encode(["dog sees cat ."])[1]
    weights = torch.full((2, len(pieces)), 0.1)
    weights[:, 0], weights[:, -2] = 0.9, 0.2
    hypothesis = Hypothesis([target.unk, target.eos], -1.0, -1.0, weights, [-0.5, -0.5])
    assert translator.translation(pieces, hypothesis).text == "."


@pytest.mark.parametrize("search", [{"kind": "greedy"}, {"beam_size": 3}, {"kind": "sampling", "temperature": 1.0}])
def test_no_search_writes_a_tag(run: Path, search: dict[str, Any]) -> None:
    search = {**search, "top_k": 0, "top_p": 1.0} if search.get("kind") == "sampling" else search
    translator = Translator.load(run, search=search).towards("de")
    ids = translator.tokenizers.target.tag_ids
    wanted = translator.single.decoder.readout if hasattr(translator.single.decoder, "readout") else None
    for name, weight in translator.single.named_parameters():
        if weight.shape == (translator.tokenizers.target.vocab_size,):
            weight.data[ids] = 50.0  # the model would write nothing else
            wanted = name
    assert wanted is not None
    (found,) = translator.translate(["dog sees cat ."])
    assert not [piece for piece in found.tokens if "<2" in piece]


def test_evaluate_compare_and_export_take_the_run(run: Path, corpus: Path, tmp_path: Path) -> None:
    own = json.loads((run / "results.json").read_text())["validation"]
    done = call("nmt-evaluate", f"run={run}", "split=validation", "threads=1", f"output={tmp_path / 'scores'}")
    assert done.returncode == 0, done.stderr.decode()
    printed = json.loads(done.stdout.decode().splitlines()[-1])
    assert printed["directions"] == own["directions"]
    assert (tmp_path / "scores/directions.validation.md").read_text() == (run / "directions.validation.md").read_text()
    few = ["bootstrap_samples=100", "randomisation_trials=100", f"output={tmp_path / 'comparison'}"]
    done = call("nmt-compare", f"runs=[{run},{tmp_path / 'scores'}]", "split=validation", *few)
    assert done.returncode == 0, done.stderr.decode()
    done = call("nmt-export", f"run={run}", f"output={tmp_path / 'model.nmt'}", "held_out=true")
    assert done.returncode == 0, done.stderr.decode()
    lines = ["dog sees cat ."]
    both = [Translator.load(path).towards("fr").translate(lines)[0].text for path in (run, tmp_path / "model.nmt")]
    assert both[0] == both[1]
    shutil.unpack_archive(tmp_path / "model.nmt", tmp_path / "model", "zip")
    assert "target_lang=de < input" in (tmp_path / "model/README.md").read_text()
    texts = [path.read_bytes() for path in (tmp_path / "model").rglob("*") if path.suffix in {".md", ".yaml", ".json"}]
    assert not [text for text in texts if str(corpus).encode() in text]
    done = call("nmt-evaluate", f"run={tmp_path / 'model.nmt'}", "split=validation", f"output={tmp_path / 'again'}")
    assert json.loads(done.stdout.decode().splitlines()[-1])["directions"] == own["directions"]


def test_comet_and_samples_have_sources_without_tags(run: Path, corpus: Path) -> None:
    """COMET is the mean over the directions, whatever their numbers of sentences."""
    values = config(corpus, TEMPERED)
    made = prepare(values.data, values.tokenizer)
    translator, seen = Translator.load(run, precision="fp32"), list[str]()
    split = made.splits["validation"]
    first = [i for i, direction in enumerate(split.directions) if direction == split.directions[0]]
    chosen = np.array([*first, len(split) - 1])  # one sentence of another direction

    def comet(sources: Sequence[str], *_: object) -> list[float]:
        seen.extend(sources)
        return [1.0] * len(first) + [0.0]

    settings = score_settings(values.evaluation, values.data.target_lang)
    validation = values.validation.model_copy(update={"monitor": "comet", "samples": 3})
    batches = make_batches(made, "validation", values)
    validator = Validator(batches, translator, settings, comet, validation, lambda _: None)  # type: ignore[arg-type]
    found = validator(chosen)
    assert seen == [translator.tokenizers.source.tags.without(validator.sources[i]) for i in chosen]
    assert not [line for line in seen if "<2" in line]
    assert found.scores["comet"] == 0.5
    assert {sample.source for sample in found.samples} <= set(seen)


def test_each_direction_is_a_model_of_the_service(run: Path) -> None:
    with serving([str(run)]) as client:
        models = client.get("/v1/models").json()["models"]
        assert [model["name"] for model in models] == [f"run:{name}" for name in NAMES]
        assert models[1]["examples"][0].split()[0] in {noun[1] for noun in NOUNS}
        answer = client.post("/translate", json={"q": "dog sees cat .", "source": "en", "target": "fr"}).json()
        expected = Translator.load(run, precision="fp32").towards("fr").translate(["dog sees cat ."])[0].text
        assert answer["translatedText"] == expected
        source, most = Translator.load(run).tokenizers.source, models[0]["max_tokens"]
        longest = next(text for n in range(most) if len(source.encode([text := "dog " * n])[0]) == most)
        refused = client.post("/v1/translate", json={"text": longest, "model": models[0]["name"]})
        assert f"has {most + 1} tokens, but this service takes at most {most}" in refused.text
        refused = client.post("/translate", json={"q": "x", "source": "de", "target": "fr"})
        assert "this service translates en to de, de to en" in refused.text


def test_a_test_set_of_another_direction_makes_another_corpus(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.tsv").write_text("en\tde\na\tb\n")
    files = f"train: {tmp_path}/train.tsv, validation: {tmp_path}/valid.tsv"
    test = f", test: {tmp_path}/test.tsv"
    directions = "source_lang: en, target_lang: de", "source_lang: de, target_lang: en"
    found = set()
    for tested in range(2):
        corpora = (f"{{{each}, {files}{test if number == tested else ''}}}" for number, each in enumerate(directions))
        settings = validated(TrainConfig, values_of("train", [*SMALL, f"data.corpora=[{','.join(corpora)}]"]))
        found.add(fingerprint_of(settings.data, settings.tokenizer))
    assert len(found) == 2
