"""Controls over translations, in Python and in files: constraints, glossary, forbidden phrases, prefixes, attention."""

import logging
import random
import re
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
from conftest import values_of
from forks import call
from pydantic import TypeAdapter
from trained import LINES, run  # noqa: F401

from nmt import Translator
from nmt.cli.translate import read_controls, zip_with_files
from nmt.config.errors import UserError
from nmt.config.schema.data import TokenizerConfig
from nmt.data.corpus import DemoPairs
from nmt.data.tokenizer import Tokenizer, make_tokenizers
from nmt.translate.constraints import occurrences
from nmt.translate.forbidden import Forbidden
from nmt.translate.guidance import Glossary
from nmt.translate.search import Guidance

BEAM = {"beam_size": 4, "max_length": 60}


@pytest.fixture(scope="module")
def translator(run: Path) -> Translator:  # noqa: F811
    return Translator.load(run, search=BEAM)


def phrases_of(lines: list[str]) -> list[list[str]]:
    """Draw one to four phrases, of one to three words, from each line."""
    draw, found = random.Random(1), []
    for line in lines:
        words, phrases = line.split(), []
        for _ in range(draw.randint(1, 4)):
            length = min(draw.randint(1, 3), len(words))
            start = draw.randrange(len(words) - length + 1)
            phrases.append(" ".join(words[start : start + length]))
        found.append(list(dict.fromkeys(phrases)))
    return found


def holds(text: str, phrase: str) -> bool:
    return f" {phrase} " in f" {text} "


@pytest.mark.parametrize(("members", "shortlist", "forbidden"), [(1, None, []), (1, "auto", ["le"]), (2, None, ["le"])])
def test_all_possible_constraints_are_met(
    run: Path,  # noqa: F811
    members: int,
    shortlist: str | None,
    forbidden: list[str],
) -> None:
    translator, pairs = Translator.load([run] * members, search=BEAM, shortlist=shortlist), [*DemoPairs(1000, 20)]
    sources, constraints = [pair.source for pair in pairs], phrases_of([pair.target for pair in pairs])
    constraints[3], met = [], list[bool]()
    found = translator.translate_nbest(sources, 2, constraints=constraints, forbidden=forbidden)
    free = translator.translate(sources, forbidden=forbidden)
    for nbest, plain, phrases in zip(found, free, constraints, strict=True):
        possible = [phrase for phrase in phrases if not any(holds(phrase, bad) for bad in forbidden)]
        for translation in nbest:
            assert all(holds(translation.text, phrase) for phrase in possible), (translation.text, phrases)
            assert not any(holds(translation.text, bad) for bad in forbidden)
        met += [holds(plain.text, phrase) for phrase in possible]
        assert phrases or nbest[0].text == plain.text
    assert not all(met)


def test_a_phrase_that_is_listed_twice_appears_twice(translator: Translator) -> None:
    (found,) = translator.translate(["the cat sees the dog ."], constraints=[["le chien", "le chien", "chien"]])
    assert len(re.findall(r"\ble chien\b", found.text)) >= 2


def test_a_glossary_holds_for_whole_words_and_the_longest_phrase(translator: Translator) -> None:
    glossary = {"dog": "chien", "red dog": "maison rouge", "cat": "chat"}
    targets = Glossary(tuple(glossary.items()), lowercase=False).targets
    assert list(targets("the dog, a red  dog and dogs; dog")) == ["chien", "maison rouge", "chien"]
    assert list(targets("a cat-dog is no Dog")) == []
    assert list(Glossary((("Dog", "chien"),), lowercase=True).targets("DOG")) == ["chien"]
    assert list(Glossary((("café", "X"),), lowercase=False).targets(normalize("NFD", "the café"))) == ["X"]
    assert list(Glossary((("हिन", "X"),), lowercase=False).targets("हिन्दी")) == []  # a combining mark ends no word
    found = translator.translate(["the red dog sleeps .", "the cats sleep ."], glossary=glossary)
    assert holds(found[0].text, "maison rouge")
    (both,) = translator.translate(["the dog sleeps ."], constraints=[["chien"]])
    for spelling in ("chien", " chien "):
        (again,) = translator.translate(["the dog sleeps ."], glossary=glossary, constraints=[[spelling]])
        assert again.text == both.text


def trained(lines: list[str], *overrides: str) -> Tokenizer:
    config = values_of("train", [*overrides])["tokenizer"]
    settings = TypeAdapter(TokenizerConfig).validate_python(config)
    return make_tokenizers(settings, lines, lines).target


def test_phrases_of_bytes_are_forbidden_too() -> None:
    tokenizer = trained(["a dog", "a cat"] * 9, "tokenizer.vocab_size=275", "tokenizer.byte_fallback=true")
    spelled = ["".join(tokenizer.pieces(tokenizer.encode_phrase(phrase))) for phrase in ("d\u00f6g", "\u72ac", "dog")]
    forbidden = Forbidden(spelled, tokenizer.vocabulary())
    contained = {"a d\u00f6g": True, "\u9ce5\u72ac": True, "a dog": True, "a d\u00e4g": False, "\u72ad": False}
    contained["a \u00f6dog"] = False  # bytes of a letter are no sign before a phrase
    assert {line: forbidden.contained(tokenizer.encode([line])[0]) for line in contained} == contained


def test_phrases_of_a_language_without_spaces_are_found_within_a_sentence() -> None:
    lines = ["我们今天去学校。", "他的学校很大。", "学校在哪里。", "我买了一本书。", "这本书很好看。"]
    chinese = trained(lines, "tokenizer.vocab_size=40")
    tokens, phrase = chinese.encode(["我们今天去学校学校。"])[0][:-1], chinese.encode_phrase("学校")
    assert chinese.decode(phrase) == "学校"
    assert occurrences(tokens, phrase, chinese.boundary) == 2
    assert occurrences(tokens, chinese.encode_phrase("今天"), chinese.boundary) == 1
    forbidden = Forbidden(["学校"], chinese.vocabulary())
    assert forbidden.contained(tokens)
    assert not forbidden.contained(chinese.encode(["我们去大学。"])[0])
    glossary = Glossary((("学校", "school"), ("学", "study")), lowercase=False)
    assert list(glossary.targets("我们去学校。他学")) == ["school", "study"]
    assert list(Glossary((("GPU", "X"),), lowercase=False).targets("一个GPU很快")) == ["X"]


def test_spellings_with_the_same_tokens_are_one_phrase(translator: Translator) -> None:
    composed, decomposed = "fran\u00e7ais", normalize("NFD", "fran\u00e7ais")
    controls: dict[str, Any] = {"constraints": [[decomposed]], "glossary": {"French": composed}}
    (found,) = translator.translate(["the French dog sleeps ."], **controls)
    assert found.text.split().count(composed) == 1


def test_a_glossary_leaves_out_what_was_cut_off(run: Path) -> None:  # noqa: F811
    short = Translator.load(run, search={**BEAM, "max_source_length": 6})
    line, glossary = "the small dogs see the red house .", {"house": "maison", "dogs": "chats"}
    (found,) = short.translate([line], glossary=glossary)
    assert holds(found.text, "chats")
    assert not holds(found.text, "maison")
    assert holds(Translator.load(run, search=BEAM).translate([line], glossary=glossary)[0].text, "maison")


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"constraints": [["le chien", "chat"]], "forbidden": ["chien"]}, "'le chien', which holds a forbidden"),
    ({"constraints": [["☃", "chat"]]}, "'☃', which holds characters that the tokenizer does not know"),
    ({"constraints": [["chat", "le chien " * 30]]}, "for which a length of at most"),
    ({"constraints": [["chat"]], "prefixes": ["le chien"], "forbidden": ["chien"]}, "which holds a forbidden phrase"),
    ({"constraints": [["chat", " "]]}, "'', which is empty"),
]


@pytest.mark.parametrize(("controls", "reason"), IMPOSSIBLE)
def test_what_is_impossible_is_left_out_with_a_warning(
    translator: Translator, caplog: pytest.LogCaptureFixture, controls: dict[str, Any], reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        found = translator.translate_nbest(["the cat sleeps ."], 1, first_line=12, **controls)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("line 12: translated without ")
    assert reason in message
    assert holds(found[0][0].text, "chat")


def test_what_was_not_found_has_a_warning(translator: Translator, caplog: pytest.LogCaptureFixture) -> None:
    target = translator.tokenizers.target
    wanted = [[tokens[:-1]] for tokens in target.encode(["chat dort", "chien", "un"])]
    pieces = [target.pieces(tokens) for tokens in target.encode(["un chat dort .", "un chat .", "une ."])]
    with caplog.at_level(logging.WARNING):
        translator.guide.warn_of_unmet(Guidance(constraints=wanted), pieces, first_line=4)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(" up to ")[0] for message in messages] == [
        "line 5: nothing found with 'chien'",
        "line 6: nothing found with 'un'",
    ]


def test_an_empty_line_stays_empty(translator: Translator, caplog: pytest.LogCaptureFixture) -> None:
    for controls in ({"constraints": [["chat"]]}, {"prefixes": ["le"]}):
        assert translator.translate([""], **controls)[0].text == ""  # type: ignore[arg-type]
        assert caplog.messages.pop() == "line 1: translated without its prefix and constraints, as the line is empty"


@pytest.mark.parametrize(
    ("error", "controls", "message"),
    [
        (UserError, {"constraints": [[], []]}, "constraints: one for each line is expected, 1 in all, not 2"),
        (UserError, {"prefixes": ["le"], "prefix": "le"}, "prefix starts all translations, and prefixes each"),
        (UserError, {"forbiden": ["le"]}, "forbiden: unknown argument of a translation; did you mean 'forbidden'"),
        (UserError, {"beam_size": 1}, r"beam_size: unknown argument of a translation; .* belong to Translator\.load"),
        (TypeError, {"constraints": ["chat"]}, "a list of phrases is expected"),
        (UserError, {"attend": {0: 99}}, "step 0 attends to position 99, but the source has positions 0 to"),
        (UserError, {"attend": {-1: 0}}, "step -1 does not exist"),
        (UserError, {"attend": {2: [0.5]}}, "step 2 needs a weight for each source token, .* not 1"),
        (UserError, {"prefix": ["not a piece"]}, "'not a piece' is no piece"),
    ],
)
def test_wrong_controls_are_refused(
    translator: Translator, error: type[Exception], controls: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=message):
        translator.translate(["the cat"], **controls)


def test_other_wrong_arguments_are_refused(run: Path, translator: Translator) -> None:  # noqa: F811
    for kind, controls in (("greedy", {"constraints": [["chat"]]}), ("sampling", {"glossary": {"cat": "chat"}})):
        with pytest.raises(UserError, match=f"need search=beam, but this search is {kind}"):
            Translator.load(run, search={"kind": kind}).translate(["the cat"], **controls)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="sources: 1, translations: 2; give one"):
        translator.score(["the cat"], ["le chat", "le"])
    with pytest.raises(UserError, match="nbest=0: less than one"):
        translator.translate_nbest(["the cat"], 0)


@pytest.mark.system
def test_files_of_the_command(run: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "constraints").write_text("chat\tdort\n\nle chien\r\n")
    (tmp_path / "prefix").write_text("un\n\nle\n")
    (tmp_path / "glossary").write_text("dog\tmaison\n")
    (tmp_path / "forbidden").write_text("rouge\n")
    lines = b"the cat\nthe dog sleeps\nthe red dog\n"
    files = [f"{key}={key}" for key in ("constraints", "prefix", "glossary", "forbidden")]
    done = call("nmt-translate", f"run={run}", *files, stdin=lines, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    found = done.stdout.decode().splitlines()
    for text, phrases in zip(found, (["chat", "dort"], ["maison"], ["le chien", "maison"]), strict=True):
        assert all(holds(text, phrase) for phrase in phrases)
        assert not holds(text, "rouge")
    assert found[0].startswith("un ")
    assert found[2].startswith("le ")


WRONG = [
    ("constraints", b"chat\n", "constraints=wrong: line 2 is missing in this file; line N of this file belongs to"),
    ("constraints", b"\n\n\n", "constraints=wrong: line 3 is missing in the input"),
    ("constraints", b"chat\t\tdort\n\n", "constraints=wrong: line 1 has an empty phrase; separate phrases by one tab"),
    ("constraints", b"\n\xff\n", "constraints=wrong, line 2: not valid UTF-8 (byte 1 of the line); convert the file"),
    ("prefix", b"\nle\tla\n", "prefix=wrong: line 2 holds a tab; give the start of translation 2 alone"),
    ("glossary", b"a\tb\nc\n", "glossary=wrong: line 2 is 'c'; write a source phrase, one tab and a target phrase"),
    ("glossary", b"a\tb\na\tc\n", "glossary=wrong: line 2 translates 'a' in another way than line 1; keep one of them"),
    ("forbidden", b"chat\n\nle\n", "forbidden=wrong: line 2 is empty; give one phrase per line"),
    ("forbidden", "chat\n\u200b\n".encode(), "forbidden=wrong: line 2 is empty"),
    ("forbidden", b"a\tb\n", "forbidden=wrong: line 1 holds a tab; give one phrase per line"),
]


@pytest.mark.parametrize(("key", "content", "message"), WRONG)
def test_a_wrong_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong").write_bytes(content)

    def read() -> None:
        with Path("wrong").open("rb") as file:
            if key in ("constraints", "prefix"):
                list(zip_with_files(["the cat", "the dog"], {key: file}))
            else:
                read_controls(**{"glossary": None, "forbidden": None} | {key: "wrong"})

    with pytest.raises(UserError) as error:
        read()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module", params=["beam", pytest.param("greedy", marks=pytest.mark.slow)])
def steered(run: Path, request: pytest.FixtureRequest) -> Translator:  # noqa: F811
    return Translator.load(run, search={"kind": request.param})


def test_a_steered_step_attends_there_and_the_steps_before_stay(steered: Translator) -> None:
    (free,) = steered.translate([LINES[2]])
    step = len(free.tokens) // 2
    for position in np.arange(len(free.source_tokens)):  # positions may be NumPy's integers
        (again,) = steered.translate([LINES[2]], attend={step: position}, prefix=free.tokens[:step])
        assert again.tokens[:step] == free.tokens[:step]
        assert again.alignment is not None
        assert free.alignment is not None
        assert again.alignment[step].tolist() == np.eye(len(free.source_tokens))[position].tolist()
        np.testing.assert_allclose(again.alignment[:step], free.alignment[:step], atol=1e-6)


def test_somewhere_else_the_probabilities_change(steered: Translator) -> None:
    (free,) = steered.translate([LINES[2]])
    (scored,) = steered.score([LINES[2]], [free.text])
    (again,) = steered.score([LINES[2]], [free.text], attend={1: 0})
    assert again.alignment is not None
    assert again.alignment[1].tolist() == np.eye(len(free.source_tokens))[0].tolist()
    assert again.token_log_probs[0] == pytest.approx(scored.token_log_probs[0], abs=1e-6)
    assert again.token_log_probs[1] != pytest.approx(scored.token_log_probs[1], abs=1e-6)


def test_a_text_is_continued(steered: Translator) -> None:
    (continued,) = steered.translate([LINES[2]], prefix="le chien")
    assert continued.text.startswith("le chien")
    assert sum(continued.token_log_probs) == pytest.approx(continued.log_prob, abs=1e-4)
    (scored,) = steered.score([LINES[2]], [continued.text])
    if scored.tokens == continued.tokens:  # the search may have split the text into other pieces
        assert scored.token_log_probs == pytest.approx(continued.token_log_probs, abs=1e-4)
