"""Compare systems, such as attention presets, over several corpora, with the tests of Demšar (2006).

    python scripts/corpora.py pack SWEEP FOLDER     # add each finished run below SWEEP to the small file of its corpus
    python scripts/corpora.py table FOLDER          # tables, tests and pictures in FOLDER/comparison
    python scripts/corpora.py check FOLDER          # recompute every score, and every figure of that comparison

A corpus is named after its training file: that of dut_train.tsv is `dut`. Its file, dut.npz, has no text of the corpus.
For the validation and the test set it holds the statistics of each output of R runs, with k statistics of N sentences:
`test/wer` (R, k, N), `test/ser` (R, k, N), ... Its `record` is JSON, a list with the configuration, the results and the
machine of each run. Runs that a file already holds are kept. Evaluations of ensembles are packed like runs.

The score of a system on a corpus is the mean over its seeds. The corpora are the blocks of the Friedman test with the
correction of Iman and Davenport (1980), which asks whether the systems differ at all. Wilcoxon's signed-rank test
then compares pairs of systems, corrected by Holm's method: with --baseline, each system with this one, and all pairs
for the picture. A system without a score on every corpus is left out. With fewer than three systems or corpora, the
tables have no tests.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import packing
from matplotlib.figure import Figure
from scipy import stats

from nmt.compare.columns import p_value
from nmt.compare.compare import SIGNIFICANT, group
from nmt.compare.entry import Entry, HeldOut
from nmt.compare.pictures import COLOURS, INK, MUTED, RULE, STYLE, Picture
from nmt.config.errors import UserError
from nmt.config.schema.commands import PATH_KEYS
from nmt.evaluate.metrics import METRICS, Counts, corpus_score, sign_of
from nmt.evaluate.significance import holm, letters
from nmt.export.contents import shared_config, shared_manifest
from nmt.system.files import folders_with, to_json, write_atomically
from nmt.system.run import EVALUATION, FINISHED, RunDirectory, digest, load_values, read_json
from nmt.system.text_table import Column, decimals, human_count, markdown
from nmt.translate.similarity import Floats

PERMUTATIONS = 2**15  # signs of up to 15 differences are all enumerated; of more, so many are drawn
ROUNDING = 9  # decimals of scores in ranks and differences: equal scores tie, whatever the order of their sums
LEAST_SYSTEMS, LEAST_CORPORA = 3, 3
Json = dict[str, Any]


class Packed(NamedTuple):
    """A run in the file of its corpus."""

    record: Json
    counts: Mapping[str, Counts]  # (N, k) by split and metric, such as "test/wer"


def corpus_of(config: Json) -> str:
    """Name the corpus of a run after its first training file. Raises UserError if it has none."""
    files = config["data"].get("train")
    if not files:
        raise UserError("data.train: is not set, so the corpus has no name")
    return re.split(r"[._]", Path(files[0]).name)[0]


def describe(run: RunDirectory) -> tuple[str, Json]:
    """Return the corpus of a run or evaluation, and how its system was trained, without paths."""
    if not (run.path / EVALUATION).is_file():
        config = load_values(run.config)
        return corpus_of(config), {"config": shared_config(config), "manifest": shared_manifest(run.read_manifest())}
    evaluation = read_json(run.path / EVALUATION)
    members = [Path(member) for member in evaluation["members"]]
    choices = {key: value for key, value in evaluation["choices"].items() if key not in PATH_KEYS}
    described = {**evaluation, "members": [member.name for member in members], "choices": choices}
    return corpus_of(load_values(RunDirectory(members[0]).config)), {"evaluation": described}


def pack(sweep: Path, folder: Path) -> int:
    """Add each finished run below `sweep` to the file of its corpus. Returns the exit status."""
    corpora = {file.stem: unpack(file) for file in sorted(folder.glob("*.npz"))}
    held_out: dict[tuple[str, str], tuple[str, HeldOut]] = {}  # the first run of each corpus and split
    changed = set()
    for path in folders_with(sweep, "config.yaml", EVALUATION):
        run, name = RunDirectory(path), packing.name_of(path, sweep)
        if run.status() != FINISHED and not (path / EVALUATION).is_file():
            continue
        corpus, described = describe(run)
        packed = corpora.setdefault(corpus, {})
        if name in packed:
            continue
        results, counts = read_json(run.results), dict[str, Counts]()
        for split, texts, of_split in packing.count_splits(path, results):
            first, others = held_out.setdefault((corpus, split), (name, texts))
            if (difference := others.difference(texts)) is not None:
                raise UserError(f"{first} and {name}: {difference}")
            counts |= of_split
        packed[name] = Packed({"name": name, **described, "results": packing.without_details(results)}, counts)
        changed.add(corpus)
    folder.mkdir(parents=True, exist_ok=True)
    for corpus in sorted(changed):
        file = folder / f"{corpus}.npz"
        packing.write(file, stacked(corpora[corpus]), [run.record for run in corpora[corpus].values()])
        print(f"{file}: {len(corpora[corpus])} runs, {file.stat().st_size / 1000:.0f} kB")
    return check(folder)


def stacked(packed: Mapping[str, Packed]) -> dict[str, Any]:
    """Stack the statistics of all runs of a corpus, (R, k, N) for each split and metric. Raises UserError if the runs
    have different metrics, splits or references."""
    first, *others = packed.values()
    for run in others:
        name, other = first.record["name"], run.record["name"]
        if run.counts.keys() != first.counts.keys():
            raise UserError(f"{name} has scores of {', '.join(first.counts)}, {other} of {', '.join(run.counts)}")
        for key, rows in run.counts.items():
            if not np.array_equal(rows[:, packing.OF_REFERENCE], first.counts[key][:, packing.OF_REFERENCE]):
                raise UserError(f"{name} and {other}: the references of {key.partition('/')[0]} differ")
    return {key: np.stack([run.counts[key].T for run in packed.values()]).astype(np.uint16) for key in first.counts}


def unpack(file: Path) -> dict[str, Packed]:
    """Read the runs of a corpus, by name."""
    records, counts = packing.read(file)
    return {
        record["name"]: Packed(record, {key: rows[row].T for key, rows in counts.items()})
        for row, record in enumerate(records)
    }


def describe_packed(record: Json) -> Entry:
    """Describe a packed run, or a packed evaluation of an ensemble, as nmt-compare does."""
    if "evaluation" not in record:
        return packing.entry_of(record["name"], record)
    name, evaluation = record["name"], record["evaluation"]
    config = digest({key: value for key, value in evaluation.items() if key != "members"})
    return Entry(name, [name], config=config, choices=evaluation["choices"], parameters=evaluation["parameters"])


class Scores(NamedTuple):
    """The scores of one metric and split."""

    by_system: dict[str, dict[str, dict[int | None, float]]]  # of each seed, by system and corpus
    parameters: dict[str, float]  # by system, the mean over the corpora
    corpora: list[str]


def read_scores(folder: Path, key: str) -> Scores:
    """Score all packed runs by a split and metric, such as "test/wer". Raises UserError if a run has no such score."""
    scores = Scores({}, {}, [])
    sizes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.npz")):
        packed, metric = unpack(file), key.rpartition("/")[2]
        for system in group([describe_packed(run.record) for run in packed.values()]):
            for entry in system.entries:
                counts = packed[entry.name].counts.get(key)
                if counts is None:
                    raise UserError(f"{file}: {entry.name} has no {key}")
                of_corpus = scores.by_system.setdefault(system.name, {}).setdefault(file.stem, {})
                of_corpus[entry.seed] = corpus_score(counts, metric)
                sizes.setdefault(system.name, []).append(entry.parameters or 0)
        scores.corpora.append(file.stem)
    return scores._replace(parameters={name: fmean(values) for name, values in sizes.items()})


def friedman(errors: Floats) -> Json:
    """Test whether k systems differ on N corpora, (N, k), and compute Nemenyi's critical difference of average ranks.
    `chi2` is corrected for ties; `f` and `p` are those of Iman and Davenport (1980), as `chi2` is conservative."""
    corpora, systems = errors.shape
    chi2 = float(stats.friedmanchisquare(*errors.T).statistic)
    f = iman_davenport(chi2, corpora, systems)
    q = stats.studentized_range.ppf(1 - SIGNIFICANT, systems, np.inf) / np.sqrt(2)
    return {
        "chi2": chi2,
        "f": f,
        "p": float(stats.f.sf(f, systems - 1, (systems - 1) * (corpora - 1))),
        "critical_difference": float(q * np.sqrt(systems * (systems + 1) / (6 * corpora))),
    }


def iman_davenport(chi2: float, corpora: int, systems: int) -> float:
    """Compute F = (N - 1) chi2 / (N (k - 1) - chi2) from the chi2 of N corpora and k systems."""
    rest = corpora * (systems - 1) - chi2
    return (corpora - 1) * chi2 / rest if rest > 10**-ROUNDING else np.inf


def signed_rank(differences: Floats) -> Floats:
    """Compute the p values of Wilcoxon's signed-rank test: (pairs, N) -> (pairs,).

    scipy.stats.wilcoxon has no exact p where differences tie or are 0, as those of error rates often do, except by a
    permutation test that ranks anew in each permutation. Here the ranks are permuted: differences of 0 have none.
    """
    zeros = (differences == 0).sum(1, keepdims=True)
    ranks = np.sign(differences) * (stats.rankdata(abs(differences), axis=1) - zeros)
    test = stats.permutation_test(
        (ranks,),
        lambda signed, axis: signed.sum(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        batch=512,
        axis=1,
        rng=np.random.default_rng(12345),
    )
    return np.asarray(test.pvalue)


def tested(names: Sequence[str], errors: Floats, pairs: Sequence[tuple[int, int]]) -> list[Json]:
    """Test the first system of each pair against the second one, its `baseline`. errors: (N, k), lower is better."""
    differences = np.array([errors[:, system] - errors[:, baseline] for system, baseline in pairs]).round(ROUNDING)
    p_values = signed_rank(differences).tolist()
    return [
        {
            "system": names[system],
            "baseline": names[baseline],
            "better": int((row < 0).sum()),  # number of corpora
            "worse": int((row > 0).sum()),
            "p_raw": p_raw,
            "p": p,
        }
        for (system, baseline), row, p_raw, p in zip(pairs, differences, p_values, holm(p_values), strict=True)
    ]


def compared(folder: Path, split: str, metric: str, baseline: str | None) -> Json:
    """Rank and test all systems by a metric. Raises UserError if no system is complete, and for an unknown baseline."""
    scores = read_scores(folder, f"{split}/{metric}")
    complete = {name: rows for name, rows in scores.by_system.items() if len(rows) == len(scores.corpora)}
    if not complete:
        raise UserError(f"{folder}: no system has scores on all of {len(scores.corpora)} corpora")
    means = {name: [fmean(rows[corpus].values()) for corpus in scores.corpora] for name, rows in complete.items()}
    errors = (-sign_of(metric) * np.array([*means.values()]).T).round(ROUNDING)  # (N, k)
    ranks = stats.rankdata(errors, axis=1)
    order = sorted(range(len(means)), key=lambda system: (ranks[:, system].mean(), errors[:, system].mean()))
    names = [[*means][system] for system in order]
    errors, ranks = errors[:, order], ranks[:, order]
    if baseline not in (None, *names):
        raise UserError(f"baseline={baseline}: not one of {', '.join(names)}")
    is_tested = len(names) >= LEAST_SYSTEMS and len(scores.corpora) >= LEAST_CORPORA
    against = [(row, names.index(baseline)) for row, name in enumerate(names) if baseline not in (None, name)]
    pairs = [(worse, better) for better, worse in combinations(range(len(names)), 2)]
    rows = [
        {
            "name": name,
            **seeds_of(complete[name]),
            "mean": fmean(means[name]),
            "rank": rank,
            "parameters": round(scores.parameters[name]),
            "scores": dict(zip(scores.corpora, means[name], strict=True)),
        }
        for name, rank in zip(names, ranks.mean(0).tolist(), strict=True)
    ]
    return {
        "split": split,
        "metric": metric,
        "baseline": baseline,
        "left_out": sorted(scores.by_system.keys() - complete.keys()),
        "systems": rows,
        "friedman": friedman(errors) if is_tested else None,
        "differences": tested(names, errors, against) if is_tested and against else [],
        "pairs": tested(names, errors, pairs) if is_tested else [],
    }


def seeds_of(scores: Mapping[str, Mapping[int | None, float]]) -> Json:
    """Count the seeds that a system has on all corpora, and compute the standard deviation of their mean scores."""
    seeds = set.intersection(*map(set, scores.values()))
    means = [fmean(of_corpus[seed] for of_corpus in scores.values()) for seed in sorted(seeds, key=str)]
    return {"seeds": len(seeds), "sd": stdev(means) if len(means) > 1 else None}


def groups(comparison: Json) -> dict[str, list[int]]:
    """List the numbers of the systems, from 0 in the order of rank, in each group without significant differences."""
    names = [row["name"] for row in comparison["systems"]]
    different = [
        (names.index(row["system"]), names.index(row["baseline"]))
        for row in comparison["pairs"]
        if row["p"] < SIGNIFICANT
    ]
    members: dict[str, list[int]] = {}
    for number, joined in enumerate(letters(len(names), different)):
        for letter in re.findall(r"[A-Za-z]\d*", joined):
            members.setdefault(letter, []).append(number)
    return members


def report(comparison: Json) -> str:
    """Format a comparison in Markdown: the systems in the order of their average ranks, and the tests."""
    metric, baseline = METRICS[comparison["metric"]], comparison["baseline"]
    corpora = comparison["systems"][0]["scores"]
    against = {row["system"]: row for row in comparison["differences"]}
    show = decimals(metric.decimals)
    rows = []
    for row in comparison["systems"]:
        test = against.get(row["name"])
        p = test and f"{p_value(test['p'])}{' *' if test['p'] < SIGNIFICANT else ''}"
        rows.append({**row, **row["scores"], "p": p, "better": test and f"{test['better']} of {len(corpora)}"})
    columns = [
        Column("name", "system", "`{}`".format),
        Column("seeds", "seeds"),
        Column("mean", f"mean {metric.heading}", show),
        Column("sd", "sd of seeds", show),
        Column("rank", "average rank", decimals(2)),
        *([Column("better", f"better than `{baseline}`"), Column("p", "p, corrected")] if baseline else []),
        Column("parameters", "parameters", human_count),
        *(Column(corpus, corpus, decimals(1)) for corpus in corpora),
    ]
    parts = [markdown(rows, columns)]
    if test := comparison["friedman"]:
        pairs = comparison["pairs"]
        significant = sum(pair["p"] < SIGNIFICANT for pair in pairs)
        parts.append(
            f"Friedman test: chi-squared {test['chi2']:.2f}, F {test['f']:.2f}, p {p_value(test['p'])}. Nemenyi's "
            f"critical difference of average ranks is {test['critical_difference']:.2f}. By Wilcoxon's signed-rank "
            f"test with Holm's correction, {significant} of {len(pairs)} pairs differ significantly."
        )
    if comparison["left_out"]:
        parts.append(f"Left out, for lack of runs: {', '.join(f'`{name}`' for name in comparison['left_out'])}.")
    return "\n\n".join(parts)


def picture(comparison: Json) -> Picture:
    """Draw the average ranks, with a line through the members of each group of systems that the tests do not tell
    apart: Demšar's diagram, but with a row for each system."""
    systems, lines = comparison["systems"], groups(comparison)
    heading, distance = METRICS[comparison["metric"]].heading, comparison["friedman"]["critical_difference"]
    title = f"Average rank by {heading} over {len(systems[0]['scores'])} corpora"
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "corpora"}):
        figure = Figure(figsize=(8.6, 1.2 + 0.215 * len(systems)), layout="constrained")
        ranks, grouped = figure.subplots(1, 2, sharey=True, width_ratios=(4, 0.3 + 0.12 * len(lines)))
        ranks.plot([row["rank"] for row in systems], range(len(systems)), "o", color=COLOURS[0], markersize=5.5)
        ranks.plot([1, 1 + distance], [-1.2, -1.2], "|-", color=INK, linewidth=1.4)
        ranks.text(1 + distance, -1.2, f"  critical difference {distance:.1f} (Nemenyi)", va="center", color=MUTED)
        ranks.set_yticks(range(len(systems)), [row["name"] for row in systems])
        ranks.set(title=title, xlim=(0.8, len(systems) + 0.2), ylim=(len(systems) - 0.3, -2), xlabel="average rank")
        ranks.grid(axis="x")
        for column, members in enumerate(lines.values()):
            grouped.plot([column] * len(members), members, "-", color=RULE, linewidth=3, solid_capstyle="round")
            grouped.plot([column] * len(members), members, "o", color=INK, markersize=4)
        grouped.set(xlim=(-0.8, len(lines) - 0.2), xticks=[], xlabel="no significant\ndifference")
        for axes in (ranks, grouped):
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
    return Picture(f"{comparison['metric']}_ranks", title, figure, {})


def table(folder: Path, split: str, baseline: str | None) -> int:
    """Compare by each metric, and write tables, pictures and figures to FOLDER/comparison. Returns the exit status."""
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise UserError(f"{folder}: has no packed runs")
    keys = next(iter(unpack(files[0]).values())).counts
    metrics = [metric for metric in METRICS if f"{split}/{metric}" in keys]
    if not metrics:
        raise UserError(f"{files[0]}: has no scores of split {split}")
    comparisons = [compared(folder, split, metric, baseline) for metric in metrics]
    written = folder / packing.COMPARISON
    for comparison in comparisons:
        text = report(comparison)
        print(f"{text}\n")
        write_atomically(written / f"{comparison['metric']}.md", f"{text}\n".encode())
        if comparison["friedman"]:
            drawn = picture(comparison)
            write_atomically(written / f"{drawn.name}.svg", drawn.svg.encode())
    write_atomically(written / "comparison.json", to_json({"comparisons": comparisons}, indent=1).encode())
    return 0


def check(folder: Path) -> int:
    """Recompute all scores, and the comparison if there is one. Returns 1 if a figure differs from the recorded one."""
    runs, wrong = 0, list[str]()
    for file in sorted(folder.glob("*.npz")):
        packed = unpack(file)
        runs += len(packed)
        for name, (record, counts) in packed.items():
            wrong += packing.wrong_scores(f"{file}: {name}", counts, record["results"])
    written, differs = folder / packing.COMPARISON / "comparison.json", packing.tell_wrong_scores(runs, wrong)
    if written.is_file():
        recorded = read_json(written)["comparisons"]
        again = [compared(folder, one["split"], one["metric"], one["baseline"]) for one in recorded]
        differs |= packing.tell_differences(written, recorded, again)
    return int(differs)


def main() -> int:
    split = {"choices": packing.SPLITS, "default": "test"}
    baseline = {"help": "a system of the table, with which the others are compared"}
    return packing.run_command(__doc__, pack, table, check, split=split, baseline=baseline)


if __name__ == "__main__":
    sys.exit(main())
