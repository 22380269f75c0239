"""The page of a finding: complete, escaped, and without a network."""

from typing import Any
from xml.etree.ElementTree import fromstring

from test_page import HOSTILE, Parsed

from nmt.compare.finding_page import _charts, finding_page


def model(label: str, published: float | None, **by_seed: float) -> dict[str, Any]:
    scores = {int(seed.removeprefix("s")): bleu for seed, bleu in by_seed.items()}
    parts = [{"words": [1, 9], "sentences": 5, "bleu": 40.0}, {"words": [10, 20], "sentences": 5, "bleu": 30.0}]
    return {
        **{"label": label, "choices": {"attention": label}, "published": published, "seeds": list(scores)},
        **{"bleu": sum(scores.values()) / len(scores) if scores else None, "bleu_sd": 0.5 if scores else None},
        **{"bleu_by_seed": scores, "bleu_by_length": parts if scores else None},
    }


def result(text: str = "Mann", **changes: object) -> dict[str, Any]:
    measured = {"value": 12.345, "low": 10.0, "high": 14.69, "seeds": [1, 2], "verdict": "reproduced here"}
    unknown = {"value": None, "low": None, "high": None, "seeds": [], "verdict": "undecided"}
    shared = {"text": f"{text} wins", "published": f"{text} 3", "unit": f"{text} BLEU", "above": 0.0, "reason": text}
    return {
        **{"name": "x", "verdict": "undecided", "title": f"{text} title", "source": text, "setting": text},
        **{"caveat": text, "rule": text, "split": "test", "sentences": 1500, "signature": f"nrefs:1|{text}"},
        "by_length": True,
        "models": [model(text, 17.8, s1=20.0, s2=22.0), model("b", 26.75)],
        "statements": [{**shared, **measured}, {**shared, **unknown}],
        **changes,
    }


def test_text_is_escaped_everywhere() -> None:
    harmless, hostile = Parsed(finding_page(result())), Parsed(finding_page(result(HOSTILE)))
    assert hostile.elements == harmless.elements
    assert sum(HOSTILE in text for text in hostile.texts) == sum("Mann" in text for text in harmless.texts) > 10


def test_it_is_one_file_without_scripts_that_leads_to_the_comparison() -> None:
    parsed = Parsed(finding_page(result()))
    names = [name for _, *attributes in parsed.elements for name in attributes]
    assert not {"src", "action", "srcset", "data"} & set(names)
    assert [value for value in parsed.values if value.endswith(".html")] == ["index.html"]
    assert names.count("href") == 1
    assert "script" not in {element[0] for element in parsed.elements}
    policy = "default-src 'none'; style-src 'unsafe-inline';"
    assert any(value.startswith(policy) and "script-src" not in value for value in parsed.values)


def test_figures_stand_beside_each_other() -> None:
    texts = Parsed(finding_page(result())).texts
    assert {"12.35", "10.00 to 14.69", "1, 2", "17.80", "26.75", "21.00 ± 0.50"} <= set(texts) | {
        text.replace("\n", "") for text in texts
    }
    assert texts.count("reproduced here") == 1
    assert texts.count("undecided") == 2  # the finding and a statement
    assert any("1,500 sentences" in text for text in texts)


def test_charts_show_what_is_known() -> None:
    def titles(**changes: object) -> list[str]:
        return [title for title, _ in _charts(result(**changes))]

    assert titles() == ["Published: BLEU", "Here: BLEU of each seed", "Here: BLEU by source length"]
    assert titles(by_length=False) == ["Published: BLEU", "Here: BLEU of each seed"]
    assert titles(models=[model("a", None, s1=3.0), model("b", None)], by_length=False) == ["Here: BLEU of each seed"]
    assert titles(models=[model("a", 3.0), model("b", 2.0)]) == ["Published: BLEU"]


def test_a_model_has_a_marker_for_each_seed_at_its_own_place() -> None:
    models = [model("a", 1.0, s1=20.0, s2=22.0, s3=21.0), model("b", 2.0, s1=30.0)]
    chart = fromstring(dict(_charts(result(models=models)))["Here: BLEU of each seed"])
    groups = [group for group in chart.iter("g") if "data-system" in group.attrib]
    places = [[mark.get("transform", "") for mark in group if mark.get("class") == "marker"] for group in groups]
    assert [len(marks) for marks in places] == [3, 1]
    assert len({mark.split()[0] for mark in places[0]}) == 1
    assert places[0][0].split()[0] != places[1][0].split()[0]
