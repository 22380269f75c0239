"""nmt-evaluate: score a trained run on a split of its corpus."""

import json
import re

from nmt.cli.app import run
from nmt.config.schema import EvaluateConfig


def main() -> None:
    """Entry point."""
    run("evaluate", EvaluateConfig, _evaluate)


def _evaluate(config: EvaluateConfig, overrides: list[str]) -> None:
    from tqdm import tqdm

    from nmt.config import schema
    from nmt.config.compose import load_values, typed
    from nmt.evaluation import evaluate_run, score_settings
    from nmt.machine import keep_freed_memory
    from nmt.run import RunDirectory
    from nmt.translator import Translator

    keep_freed_memory()
    directory = RunDirectory.existing(config.run)
    trained = typed(schema.TrainConfig, load_values(directory.config))
    given = {"tokenize": config.tokenize, "lowercase": config.lowercase}
    evaluation = trained.evaluation.model_copy(update={k: v for k, v in given.items() if v is not None})
    settings = score_settings(evaluation, trained.data.target_lang)
    own = {"checkpoint": "best", "seed": trained.seed, **trained.evaluation.model_dump(), **trained.search.model_dump()}
    wanted = {"checkpoint": config.checkpoint, "seed": config.seed, **given, **config.search}
    changed = {k: v for k, v in wanted.items() if v is not None and own.get(k) != v}
    variant = re.sub(r"[^\w.-]", "-", "_".join(f"{key}-{value}" for key, value in changed.items()))
    sources, _, _ = directory.held_out(config.split)
    translator = Translator.load(config.run, **config.loading)
    with tqdm(total=len(sources), desc=f"translate {config.split}", unit=" sent", disable=None) as bar:
        result, _ = evaluate_run(directory, translator, config.split, settings, config.checkpoint, bar.update, variant)
    print(json.dumps({"run": config.run, "split": config.split, **result}, ensure_ascii=False))
