"""The figures in the prose about the leaderboards are those of the committed evidence.

`scripts/evidence.py table` writes the comparisons, and `scripts/evidence.py check` recomputes them. Here each figure of
a sentence is computed from them, or from the record of a packed run, and the sentence must stand in the page.
"""

import json
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from nmt.cli.compose import compose
from nmt.config.schema import TrainConfig
from nmt.evaluate.significance import holm

DOCS = Path(__file__).parents[2] / "docs"
BOARDS = DOCS / "results" / "leaderboard"
BOARD = "results/leaderboard.md"
SIGNIFICANT = 0.05
NUMBERS = {3: "three", 4: "four", 8: "eight", 11: "eleven"}
LATENT = ("hard_monotonic", "posterior", "marginal")


def said(page: str, *sentences: str) -> None:
    """Check that a page has these sentences, wherever its lines are broken."""
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    for sentence in sentences:
        assert " ".join(sentence.split()) in text, f"{page} does not say: {sentence}"


@cache
def comparison(corpus: str) -> dict[str, Any]:
    values: dict[str, Any]
    (values,) = json.loads((BOARDS / corpus / "comparison" / "comparison.json").read_text())["comparisons"]
    return values


def system(name: str, corpus: str = "multi30k") -> dict[str, Any]:
    values: dict[str, Any]
    (values,) = [row for row in comparison(corpus)["systems"] if row["name"] == name]
    return values


def bleu(name: str, corpus: str = "multi30k") -> float:
    return float(system(name, corpus)["bleu"])


@cache
def pairs(corpus: str) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return the difference of the first system from the second, its interval and its raw p, for each pair."""
    rows = json.loads((BOARDS / corpus / "comparison" / "pairs.json").read_text())["pairs"]
    return {
        pair: (sign * row["difference"], row["difference_ci"], row["p_raw"])
        for row in rows
        for sign, pair in ((1, (row["system"], row["baseline"])), (-1, (row["baseline"], row["system"])))
    }


def gain(a: str, b: str, corpus: str = "multi30k") -> float:
    return pairs(corpus)[a, b][0]


def corrected(baseline: str, corpus: str = "multi30k") -> dict[str, float]:
    """Return the p of each system compared with a baseline, corrected for all these comparisons."""
    names = [row["name"] for row in comparison(corpus)["systems"] if row["name"] != baseline]
    return dict(zip(names, holm([pairs(corpus)[name, baseline][2] for name in names]), strict=True))


def different(baseline: str, corpus: str = "multi30k") -> set[str]:
    return {name for name, p in corrected(baseline, corpus).items() if p < SIGNIFICANT}


@cache
def packed(file: str) -> dict[str, Any]:
    """Return the record of a packed run; of validation also the ratio of the lengths of output and references."""
    with np.load(BOARDS / f"{file}.npz", allow_pickle=False) as arrays:
        record: dict[str, Any] = json.loads(arrays["record"].tobytes())
        output, reference = arrays["validation/bleu"][:2].sum(1, dtype=float)
    return {**record, "length": output / reference}


def curve(file: str) -> list[float]:
    return [record["validation/bleu"] for record in packed(file)["metrics"] if "validation/bleu" in record]


def final_bleu(file: str) -> float:
    return float(packed(file)["results"]["test"]["bleu"])


def run(preset: str, seed: int = 1, corpus: str = "multi30k") -> str:
    return f"{corpus}/attention-{preset}_seed-{seed}"


def before(preset: str, seed: int = 1) -> str:
    return run(preset, seed, "multi30k_before")


def listed(values: list[float]) -> str:
    """Format a cell row, or the end of one: "1.00 | 2.00 |"."""
    return " | ".join(f"{value:.2f}" for value in values) + " |"


def test_the_recipe_and_the_notes_below_the_table() -> None:
    (updates,) = {row["curve"][-1]["updates"] for row in comparison("multi30k")["systems"]}
    low, high = system("bahdanau")["longest_words"]
    old, new = ([run("hard", seed, corpus) for seed in (1, 2, 3)] for corpus in ("multi30k_before", "multi30k"))
    first_old, first_new = ([f"{curve(file)[0]:.2f}" for file in files] for files in (old, new))
    said(
        BOARD,
        f"four epochs, which are {updates:,} updates of 64 sentences",
        f"needs for its {updates:,} updates",
        f"corrected](../comparison.md#many-comparisons) for {comparison('multi30k')['comparisons']} comparisons",
        f"sentences with {low} to {high} source words",
        f"`hard` had {np.mean([*map(final_bleu, old)]):.2f} test BLEU instead of {bleu('hard'):.2f}",
        f"({first_new[0]}, {first_new[1]} and {first_new[2]} with seeds 1, 2 and 3, instead of {first_old[0]}, "
        f"{first_old[1]} and {first_old[2]})",
    )


def test_what_the_table_shows() -> None:
    better = {name for name in different("bahdanau") if gain(name, "bahdanau") > 0}
    worse = different("bahdanau") - better
    said(
        BOARD,
        f"{NUMBERS[len(better)].capitalize()} presets are significantly better than `bahdanau`, and "
        f"{NUMBERS[len(worse)]} are significantly worse",
    )
    assert bleu("none") < bleu("bahdanau") / 2
    first = [row["name"] for row in comparison("multi30k")["systems"][:4]]
    assert sorted(first) == sorted([*LATENT, "nematus"])
    assert not {*LATENT} & different("nematus")
    times = sorted(system(name)["update_milliseconds"] / system("nematus")["update_milliseconds"] for name in LATENT)
    scores = [bleu(name) for name in LATENT]
    assert system("linear_chain")["curve"][-1]["seconds"] < min(system(name)["curve"][0]["seconds"] for name in LATENT)
    said(
        BOARD,
        f"`marginal` ({min(scores):.1f} to {max(scores):.1f} BLEU)",
        f"better than `nematus` ({bleu('nematus'):.1f})",
        f"their updates take {times[0]:.1f} to {times[-1]:.0f} times",
        f"with {system('linear_chain')['curve'][-1]['score']:.1f} validation BLEU, before any of",
    )
    said(
        "attention/index.md",
        f"not than `nematus`, and their updates take {times[0]:.1f}, {times[1]:.0f} and {times[2]:.0f} times as long",
    )


def test_presets_that_attend_after_the_step_without_a_latent_position() -> None:
    presets = {f"luong_{kind}" for kind in ("general", "concat", "location", "local_m", "local_p")}
    presets |= {"scaled_dot", "multihead", "ntm_cosine", "chorowski", "coverage", "gaussian_mixture"}
    presets |= {"sparsemax", "entmax", "fertility"}
    exceptions = {"scaled_dot", "luong_location", "gaussian_mixture", "ntm_cosine"}
    assert presets & different("luong_dot") == exceptions
    others = [bleu(name) for name in presets - exceptions | {"luong_dot", "ntm_cosine"}]
    assert (min(others), max(others)) == (bleu("luong_dot"), bleu("ntm_cosine"))
    assert np.median([pairs("multi30k")[name, "luong_dot"][1] for name in presets]) == pytest.approx(0.75, abs=0.02)
    (_, m_interval, _), (_, p_interval, _) = (
        pairs("multi30k")[f"luong_local_{kind}", "luong_general"] for kind in ("m", "p")
    )
    said(
        BOARD,
        f"They lie within {max(others) - min(others):.1f} BLEU, from `luong_dot` ({min(others):.2f}) to `ntm_cosine` "
        f"({max(others):.2f})",
        f"only {NUMBERS[len(exceptions)]} presets differ significantly",
        f"`scaled_dot` is {gain('luong_dot', 'scaled_dot'):.1f} BLEU below it",
        f"without the source words, {gain('luong_dot', 'luong_location'):.1f} BLEU",
        f"only moves forward, {gain('luong_dot', 'gaussian_mixture'):.1f} BLEU",
        f"One is better, `ntm_cosine` by {gain('ntm_cosine', 'luong_dot'):.1f} BLEU, at the border of significance "
        f"(p = {corrected('luong_dot')['ntm_cosine']:.4f})",
        f"differ by {gain('luong_local_m', 'luong_general'):.1f} and {gain('luong_local_p', 'luong_general'):.1f} BLEU",
        f"with intervals of ± {m_interval:.1f} and ± {p_interval:.1f}",
    )


def test_presets_that_lose_to_bahdanau() -> None:
    sentences = {
        ("gaussian_mixture", "monotonic", "mocha"): "(`monotonic`, `mocha`, `gaussian_mixture`) has {} to {} BLEU less",
        ("gumbel", "hard"): "(`hard`, `gumbel`) have {} to {} BLEU less than `bahdanau`",
    }
    for names, sentence in sentences.items():
        losses = [gain("bahdanau", name) for name in names]
        said(BOARD, sentence.format(f"{min(losses):.1f}", f"{max(losses):.1f}"))


def test_tatoeba() -> None:
    leaders = {"nematus", "posterior", "marginal"}
    gains = [gain(name, "bahdanau", "tatoeba") for name in leaders]
    next_gains = [gain(name, "bahdanau", "tatoeba") for name in ("linear_chain", "ntm_cosine")]
    assert not leaders & different("nematus", "tatoeba")
    assert not {"luong_general", "luong_local_m", "hard_monotonic"} & different("bahdanau", "tatoeba")
    perplexity = system("hard_monotonic", "tatoeba")["perplexity"]
    lower = {row["name"] for row in comparison("tatoeba")["systems"] if row["perplexity"] < perplexity}
    assert lower == leaders
    low, high = system("bahdanau", "tatoeba")["longest_words"]
    length = packed(run("hard_monotonic", corpus="tatoeba"))["length"]
    for name in ("posterior", "marginal"):
        assert packed(run(name, corpus="tatoeba"))["length"] == pytest.approx(length, abs=0.02)
    said(
        BOARD,
        f"one epoch: {packed(run('bahdanau', corpus='tatoeba'))['manifest']['training']['steps']:,} updates",
        f"lead here too, {min(gains):.1f} to {max(gains):.1f} BLEU above `bahdanau`",
        f"are {min(next_gains):.1f} to {max(next_gains):.1f} BLEU above `bahdanau`, similarly",
        f"a lower perplexity than it ({perplexity:.2f})",
        f"The test set has {comparison('tatoeba')['sentences']:,} sentences",
        f"sentences with {low} to {high} source words",
        f"p is corrected for {NUMBERS[comparison('tatoeba')['comparisons']]} comparisons",
        f"short, {length:.2f} of the length of the references",
    )


def test_the_general_score_was_slow_to_learn() -> None:
    below = f"{final_bleu(run('luong_dot')) - final_bleu(before('luong_general')):.1f} BLEU below"
    said(
        BOARD,
        f"`luong_general` was {below} `luong_dot`",
        "were {:.1f} and {:.1f} BLEU below `bahdanau`".format(
            *(final_bleu(run("bahdanau")) - final_bleu(before(name)) for name in ("sparsemax", "luong_local_p"))
        ),
        f"| `luong_dot` | {listed(curve(run('luong_dot')))}",
        f"| `luong_general`, learns $W$ (earlier version) | {listed(curve(before('luong_general')))}",
        rf"| `luong_general`, learns $\sqrt{{Q}} W$ | {listed(curve(run('luong_general')))}",
        f"| `luong_local_p`, as in the paper (earlier version) | {listed(curve(before('luong_local_p')))}",
        f"| `luong_local_p` with the root in its centre (earlier version) "
        f"| {listed(curve(before('luong_local_p_root')))}",
        f"| `luong_local_p` with the roots in centre and score | {listed(curve(run('luong_local_p')))}",
        f"it lowers `bahdanau` from {curve(run('bahdanau'))[0]:.2f} to",
    )
    assert min(bleu("sparsemax"), bleu("luong_local_p")) > bleu("bahdanau")
    said(
        "attention/luong_general.md",
        f"validation BLEU of `luong_general` from {curve(before('luong_general'))[-1]:.2f} to "
        f"{curve(run('luong_general'))[-1]:.2f}",
    )
    said(
        "attention/luong_local_p.md",
        f"from {curve(before('luong_local_p'))[-1]:.2f} to {curve(before('luong_local_p_root'))[-1]:.2f}",
    )
    said(BOARD, f"`luong_general` is {below} `luong_dot`, as in the paper")


def test_a_scaled_score_starts_too_flat() -> None:
    sharper = "multi30k_experiments/scaled_dot_temperature-0.25"
    rows = {"`luong_dot`, $d \\cdot h$": run("luong_dot"), "`scaled_dot`, $d \\cdot h / 16$": run("scaled_dot")}
    rows["`scaled_dot`, $d \\cdot h / 4$"] = sharper
    below = f"{gain('luong_dot', 'scaled_dot'):.1f} BLEU"
    said(BOARD, *(f"| {name} | {listed([*curve(file), final_bleu(file)])}" for name, file in rows.items()))
    said(BOARD, f"`scaled_dot` is {below} below `luong_dot`, and differs")
    said("attention/scaled_dot.md", f"`scaled_dot` has {below} less than `luong_dot`")


def test_the_default_readout_is_the_best_on_the_validation_set() -> None:
    means: dict[str, list[float]] = {}
    for readout in ("attentional", "deep", "maxout"):
        cells = []
        for preset in ("bahdanau", "luong_general"):
            files = [
                run(preset, seed) if readout == "deep" else f"multi30k_readouts/{preset}_{readout}_{seed}"
                for seed in (1, 2, 3)
            ]
            assert {packed(file)["config"]["decoder"]["readout"] for file in files} == {readout}
            scores = [float(packed(file)["results"]["validation"]["bleu"]) for file in files]
            means.setdefault(preset, []).append(fmean(scores))
            cells.append(f"{', '.join(f'{score:.2f}' for score in scores)} (mean {fmean(scores):.2f})")
        said(BOARD, f"| `{readout}` | {' | '.join(cells)} |")
    assert all(values[-1] == max(values) for values in means.values())
    assert compose("train", TrainConfig, []).decoder.readout == "maxout"


def test_attending_after_the_step_gains_without_input_feeding() -> None:
    plain, fed, base = "multi30k_experiments/luong_concat_input_feeding-false", run("luong_concat"), run("bahdanau")
    rows = {"`bahdanau`": base, "`luong_concat` without input feeding": plain, "`luong_concat`": fed}
    said(
        BOARD,
        "`luong_concat`, whose score is also additive, is "
        f"{gain('luong_concat', 'bahdanau'):.1f} BLEU above `bahdanau`",
        *(f"| {name} | {listed([*curve(file), final_bleu(file)])}" for name, file in rows.items()),
        f"without it is {curve(plain)[-1] - curve(fed)[-1]:.1f} BLEU ahead on the validation set, and "
        f"{final_bleu(fed) - final_bleu(plain):.1f} behind on the test set",
        f"the lead of `luong_concat` is {final_bleu(run('luong_concat', 2)) - final_bleu(run('bahdanau', 2)):.1f} BLEU",
    )


def test_four_layers_start_slowly() -> None:
    curves = {(name, seed): curve(run(name, seed)) for name in ("bahdanau", "gnmt") for seed in (1, 2)}
    gaps = np.mean([np.subtract(curves["bahdanau", seed], curves["gnmt", seed]) for seed in (1, 2)], axis=0)
    value, interval, _ = pairs("multi30k")["gnmt", "bahdanau"]
    times = system("gnmt")["update_milliseconds"] / system("bahdanau")["update_milliseconds"]
    said(
        BOARD,
        *(f"| `{name}`, seed {seed} | {listed(values)}" for (name, seed), values in curves.items()),
        f"from {gaps[0]:.1f} BLEU after the first epoch to {gaps[-1]:.1f} BLEU after the last",
        f"the difference on the test set is {value:.2f} ± {interval:.2f} BLEU",
        f"An update of `gnmt` takes {times:.1f} times as long",
    )
    said(
        "attention/gnmt.md", f"`gnmt` is {gaps[0]:.1f} BLEU below `bahdanau` after one epoch, and {gaps[-1]:.1f} after"
    )


def test_what_the_leaderboard_says_about_papers() -> None:
    statements = [("bahdanau", "none"), ("luong_dot", "luong_location"), ("luong_dot", "luong_general")]
    statements += [("luong_local_p", "luong_local_m"), ("marginal", "luong_general")]
    statements += [("variational", "luong_general"), ("bahdanau", "hard"), ("bahdanau", "monotonic")]
    effects = [pairs("multi30k")[pair] for pair in statements]
    for (a, b), (value, interval, _), p in zip(statements, effects, holm([p for *_, p in effects]), strict=True):
        holds = "undecided" if p >= SIGNIFICANT else "yes" if value > 0 else "no"
        number = f"{value:.2f}".replace("-", "\N{MINUS SIGN}")
        said(BOARD, f"| `{a}`, `{b}` | {number} ± {interval:.2f} | {holds} |")
    short, long = ([system(name)["by_length"][part] for name in ("none", "bahdanau")] for part in (0, -1))
    (low, high), (long_low, long_high) = short[0]["words"], long[0]["words"]
    falls = [100 * (1 - late["score"] / early["score"]) for early, late in zip(short, long, strict=True)]
    points = [early["score"] - late["score"] for early, late in zip(short, long, strict=True)]
    leads = [gain(name, "luong_local_p") for name in ("luong_local_m", "luong_general")]
    said(
        BOARD,
        f"without attention, BLEU is {short[0]['score']:.1f} for sentences of {low} to {high} words",
        f"{falls[0]:.0f} % less ({long[0]['score']:.1f}) for {long_low} to {long_high} words",
        f"With attention, it is {short[1]['score']:.1f} and {falls[1]:.0f} % less ({long[1]['score']:.1f})",
        f"BLEU falls by {points[0]:.1f} without attention, and by {points[1]:.1f} with it",
        f"`luong_local_m` and `luong_general` have {leads[0]:.1f} more BLEU",
        f"`monotonic` loses {100 * gain('bahdanau', 'monotonic') / bleu('bahdanau'):.0f} % of the BLEU of `bahdanau`",
    )
    assert f"{leads[0]:.1f}" == f"{leads[1]:.1f}"
    said(
        "attention/idea.md",
        f"{short[0]['score']:.1f} BLEU for captions of",
        f"only {long[0]['score']:.1f} for captions",
    )


def test_figures_on_the_pages_of_presets() -> None:
    milliseconds = {row["name"]: row["update_milliseconds"] for row in comparison("multi30k")["systems"]}
    said(
        "attention/bahdanau.md",
        f"`luong_concat` has {bleu('luong_concat'):.2f} BLEU, `nematus` {bleu('nematus'):.2f} and `bahdanau` "
        f"{bleu('bahdanau'):.2f}",
    )
    said(
        "attention/hard.md",
        f"`hard` has {bleu('hard'):.2f} BLEU",
        f"[soft attention](idea.md#soft-and-hard-attention) has {bleu('bahdanau'):.2f}",
    )
    said(
        "attention/nematus.md",
        f"takes {milliseconds['nematus'] / milliseconds['luong_dot']:.1f} times as long as with",
    )
    said(
        "attention/idea.md",
        f"`scaled_dot` has {bleu('scaled_dot'):.2f} BLEU",
        f"[`luong_concat`](luong_concat.md) has {bleu('luong_concat'):.2f} BLEU",
        f"BLEU, and an update takes {milliseconds['luong_dot']:.0f} milliseconds",
    )
