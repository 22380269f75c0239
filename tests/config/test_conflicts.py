"""Conflicts of the schema: each message is one line that names both keys and a remedy."""

import re
from collections.abc import Iterator
from functools import cache

import pytest
from conftest import values_of

from nmt.config import schema
from nmt.config.checks import validated
from nmt.config.errors import UserError
from nmt.config.schema.base import Conflict, Section

SCHEMAS = {
    "train": schema.TrainConfig,
    "evaluate": schema.EvaluateConfig,
    "translate": schema.TranslateConfig,
    "export": schema.ExportConfig,
}
SIZES = ["embedding.dim=16", "encoder.hidden=16", "decoder.hidden=32"]
FILES = "data=files data.train=a data.validation=b"
HUB = "data=hub data.id=a/b"
UNSHARED = "tokenizer=sides embedding.tie_source_target=true"
TWO_MODELS = "tokenizer=file tokenizer.source_model=a tokenizer.target_model=b"
TAUGHT = "objective=distillation objective.teachers=a"
# Overrides of nmt-train -> a pattern for the message.
TRAIN = {
    "attention=monotonic attention/window=local_m": "attention: normalizer.kind=monotonic needs positions .*local_m",
    "attention=gaussian_mixture attention/normalizer=mocha": "score.kind=gaussian_mixture needs .*kind=mocha; use",
    "attention=gaussian_mixture attention/coverage=linear": "coverage.kind=linear needs .*score.kind=gaussian_mixture;",
    "attention=luong_location attention/projection=heads": "projection.kind=heads needs .* score.kind=location; use",
    "attention=monotonic attention/alignment=sampled": "alignment.kind=sampled needs .*normalizer.kind=monotonic; use",
    "attention=hard attention.dropout=0.1": "dropout=0.1 needs .* alignment.kind=sampled; set attention.dropout=0",
    "attention=hard attention/coverage=linear": "loss_weight=1.0 needs a gradient .*; set attention.coverage.loss_w",
    "attention=marginal attention/projection=heads": "alignment.kind=marginal needs .* projection.kind=heads; use",
    "attention=posterior attention/coverage=linear": "loss_weight=1.0 needs .* alignment.kind=posterior; set",
    "attention=variational attention/normalizer=sparsemax": "kind=variational needs .* normalizer.kind=sparsemax; use",
    "attention=chorowski attention.score.width=4": "attention.score: width=4 needs to be odd, .*; try width=5$",
    "attention=multihead attention.projection.heads=3": "dim=[0-9]+ needs .* heads=3; try dim=[0-9]+$",
    "encoder.residual=true": "encoder: residual=true needs .* layers=1; set layers=2 or more, or residual=false$",
    "decoder.layers=2 decoder.residual=3": "decoder: residual=3 needs .* layers=2; set layers=3 or more",
    "encoder.bidirectional=first": "bidirectional=first needs .*layers=1; set layers=2 or more, or bidirectional=true",
    "encoder.bidirectional=first encoder.layers=3 encoder.residual=true": "residual=true needs .*=first; set residu",
    "decoder.attend=first_layer": "decoder: attend=first_layer needs .*layers=1; set layers=2 or more, or attend=after",
    "attention=gnmt decoder.input_feeding=true": "input_feeding=true needs .*attend=first_layer; set input_feeding=",
    "attention=none decoder.attend=between": "^decoder.attend=between needs an attention, but attention.kind=none; set",
    "attention=none encoder/self_attention=attention": "self_attention.kind=attention needs .*set decoder.bridge=mean",
    "attention=luong_dot decoder.hidden=100": "score.kind=dot needs .*hidden=100 and encoder.hidden=16.*decoder.hid",
    "attention=luong_dot encoder.bidirectional=first encoder.layers=2": "bidirectional=first; set decoder.hidden=16",
    "decoder.readout_dim=20": "tie_output=true needs .*readout_dim=20 and embedding.dim=16; set them equal, or embe",
    "decoder.lexical=true decoder.readout_dim=20 embedding.tie_output=false": "lexical=true needs .*readout_dim=20",
    "decoder.lexical=true attention=none": "decoder.lexical=true needs an attention, .*=none; set it to false",
    "decoder.copy=true attention=none": "decoder.copy=true needs an attention, .*attention.kind=none; set it to false",
    "decoder.copy=true attention=marginal": "copy=true needs one prediction.*kind=marginal; set decoder.copy=false",
    "attention=posterior decoder.input_feeding=false": "kind=posterior needs .*; set decoder.input_feeding=true",
    "attention=gaussian_mixture attention/alignment=posterior decoder.input_feeding=false": "posterior needs later st",
    "attention=marginal attention.dropout=0.1 decoder.attend=after decoder.input_feeding=false": "dropout=0.1 needs",
    UNSHARED: "embedding.tie_source_target=true needs one vocabulary .*kind=sides; use another tokenizer, such as",
    TWO_MODELS: "tie_source_target=true needs .*target_model=b; leave out tokenizer.target_model, or",
    "tokenizer=sides decoder.copy=true": "decoder.copy=true needs one voc.*or decoder",
    f"{TWO_MODELS} embedding.tie_source_target=false decoder.copy=true": "decoder.copy=true needs .*target_model=b;",
    "attention=none training.guided_alignment=1": "guided_alignment=1.0 needs an attention, .*; set it to 0",
    "attention=none validation.monitor=aer": "validation.monitor=aer needs an attention, .*; monitor bleu or loss",
    "attention=none search.coverage_penalty=0.2": "search.coverage_penalty=0.2 needs an attention, .*; set it to 0",
    "attention=luong_location attention/normalizer=fertility": "kind=fertility needs a score of .*score.kind=location",
    "attention=sparsemax training.guided_alignment=1": "guided_alignment=1.0 needs .* attention.normalizer.kind=spa",
    f"{HUB} data.source_column=x data.target_column=x": "target_column=x needs another column.*source_column=x; cha",
    f"{FILES} data.source_column=de": "target_column=null needs another column: .*but source_column=de; change",
    f"{HUB} training.guided_alignment=1": "guided_alignment=1.0 needs .*data.kind=hub; give data=files with data.align",
    f"{FILES} training.guided_alignment=1": "guided_alignment=1.0 needs .*data.kind=files and data.alignments=null;",
    f"{HUB} validation.monitor=aer": "validation.monitor=aer needs .*data.kind=hub; .* or monitor bleu or loss",
    f"{FILES} validation.monitor=aer": "monitor=aer needs .*data.alignments=null; .* or monitor bleu or loss",
    "attention=hard training.r_drop=5": "training.r_drop=5.0 needs .*kind=sampled; set it to 0, or use attention/al",
    f"attention=hard {TAUGHT}": "objective.kind=distillation needs .*kind=sampled; use objective=likelihood, or",
    f"{TAUGHT} training.r_drop=5": "training.r_drop=5.0 needs objective=likelihood, .*kind=distillation; set it to 0",
    f"{FILES} data.target_lang=en": "data: target_lang=en needs .*source_lang=en; set source_lang and target_lang, or",
    "search.min_length=9 search.max_length=5": "search: min_length=9 needs a limit .*max_length=5; lower min_length or",
    "tokenizer=char tokenizer.sampling=0.1": "tokenizer: sampling=0.1 needs merges .*kind=char; use kind=bpe",
}
OTHERS = {
    "export run=[a,b] output=c": "run=.* needs to be one model, .*; export each, and use all archives",
    "translate run=a references=b nbest=2": "nbest=2 needs a search, .*references=b; leave out nbest",
    **{
        f"translate run=a references=b {key}=c": f"{key}=c needs a search, .*references=b; leave out {key}"
        for key in ("constraints", "glossary", "forbidden", "prefix", "shortlist")
    },
}
CASES = {f"train {overrides}": message for overrides, message in TRAIN.items()} | OTHERS


@cache
def refusal(case: str) -> str:
    command, *overrides = case.split()
    values = values_of(command, [*(SIZES if command == "train" else []), *overrides])
    with pytest.raises(UserError) as caught:
        validated(SCHEMAS[command], values)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_a_conflict_names_both_keys_and_the_remedy(case: str) -> None:
    message = refusal(case)
    assert "\n" not in message
    assert re.search(CASES[case], message), message


def conflicts(section: type[Section] = Section) -> Iterator[Conflict]:
    for subclass in section.__subclasses__():
        yield from subclass.conflicts
        yield from conflicts(subclass)


def test_every_conflict_has_a_case() -> None:
    messages = [refusal(case) for case in CASES]
    for conflict in conflicts():
        subject = re.sub("takes_window$|latent$", "kind", conflict.terms[0].key)
        tested = any(re.search(rf"\b{subject}=.+ needs {re.escape(conflict.needs)}", message) for message in messages)
        assert tested, (
            f"add to TRAIN or another table above an override that this refuses: {subject} needs {conflict.needs}"
        )


class Toy(Section):
    number: int | None
    flag: bool


def test_a_statement_is_the_message_that_it_gives() -> None:
    statement = "number=2 needs company, but not here, but flag=false; set number=3"
    assert Conflict(statement).message(Toy(number=2, flag=False)) == statement
    other = Conflict("number=1|2 needs company, but flag; set number={self.number}0", lambda toy: toy.flag)
    assert other.message(Toy(number=1, flag=True)) == "number=1 needs company, but flag=true; set number=10"
    assert not other.occurs_in(Toy(number=1, flag=False))
