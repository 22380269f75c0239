"""The commands nmt-evaluate, nmt-compare, nmt-serve and nmt-export: checks before the work, and printed results."""

import ipaddress
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from nmt.cli.app import STOPPED, run_command
from nmt.cli.compose import configured
from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.launch import shared_by_processes
from nmt.config import schema
from nmt.config.errors import CONTROL, UserError, user_path
from nmt.system.files import short_name
from nmt.system.processes import leave_group

if TYPE_CHECKING:
    from nmt.evaluate.metrics import ScoreSettings
    from nmt.system.distributed import ProcessGroup
    from nmt.system.run import RunDirectory

log = logging.getLogger(__name__)
MAX_NAME = 150  # characters of the settings in a file's name
TOKEN = "NMT_SERVE_TOKEN"
SERVE_PACKAGES = ("fastapi", "uvicorn")
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
T = TypeVar("T", bound=BaseModel)


def evaluate_main() -> None:
    run = shared_by_processes("evaluate", _evaluate)
    run_command("evaluate", lambda arguments: run(configured("evaluate", schema.EvaluateConfig, arguments)))


def compare_main() -> None:
    _run_alone("compare", schema.CompareConfig, _compare)


def serve_main() -> None:
    _run_alone("serve", schema.ServeConfig, _serve)


def export_main() -> None:
    _run_alone("export", schema.ExportConfig, _export)


def _run_alone(command: str, schema: type[T], work: Callable[[T], None]) -> None:
    """Run a command whose work is not shared by several processes."""
    leave_group()
    run_command(command, lambda arguments: work(configured(command, schema, arguments)))


def _evaluate(config: schema.EvaluateConfig) -> None:
    with exit_at_ctrl_c("evaluate"):
        from nmt.system.distributed import ProcessGroup
        from nmt.system.machine import fair_waiting, tune_memory
    run = config.run[0] if len(config.run) == 1 else config.run
    tune_memory()
    with ProcessGroup.join() as group, fair_waiting():
        evaluate(config, group, lambda result: print(json.dumps({"run": run, "split": config.split, **result})))


def evaluate(
    config: schema.EvaluateConfig,
    group: "ProcessGroup | None" = None,
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Score a trained run, or an ensemble, on a split of its corpus; save the results, and return them.

    They go to `config.output`. By default, the results of one run go to its own directory, and those of an ensemble or
    an archive to a new folder below outputs/evaluate. Rank 0 calls `on_result` with the results even if they cannot be
    saved. A progress bar is shown only if `on_result` is given. Raises UserError.
    """
    from tqdm.auto import tqdm

    from nmt.evaluate.evaluation import EvaluationFolder, evaluate_run, warn_if_texts_differ
    from nmt.system.run import EVALUATION, RunDirectory, load_config
    from nmt.translate.translator import Translator

    runs = [RunDirectory.existing(path) for path in config.run]
    trained = load_config(runs[0].config)
    settings = run_score_settings(config, trained)
    sentences = len(runs[0].held_out(config.split)[0])
    folder = _results_folder(config.output, runs)
    load = partial(Translator.load, config.run, **config.load_arguments)
    translator = load() if group is None else group.everywhere(partial(load, group=group))
    hidden = True if on_result is None else translator.group.hides_progress
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        warn_if_texts_differ(runs, config.split)
        output, suffix = None, ""
        if folder is None:
            suffix = changed_settings(config, trained, runs[0].last_machine().get("precision"))
        else:
            opened = output_folder(folder, EVALUATION, "an evaluation")
            created = translator.group.on_main(lambda: stack.enter_context(opened))
            output = EvaluationFolder.at(created, runs, translator, settings, config.checkpoint)
        bar = stack.enter_context(tqdm(total=sentences, desc=f"translate {config.split}", unit=" sent", disable=hidden))
        try:
            evaluate_run(
                runs[0],
                translator,
                config.split,
                settings,
                config.checkpoint,
                progress=bar.update,
                output=output,
                suffix=suffix,
                on_result=result.update,
            )
        except OSError as error:
            if not result:
                raise
            raise UserError(
                f"{error.filename}: cannot be written ({error.strerror}); the scores are printed, but not saved: give "
                "output=FOLDER to save them elsewhere"
            ) from None
        finally:
            if result and on_result is not None and translator.group.is_main:
                bar.close()
                on_result(result if folder is None else {"output": folder, **result})
    return result


def run_score_settings(config: schema.EvaluateConfig, trained: schema.TrainConfig) -> "ScoreSettings":
    """Return the score settings of a run, in which values from the command line replace those of training.

    Raises UserError for settings that sacreBLEU refuses.
    """
    from nmt.evaluate.evaluation import score_settings

    changes = {"metrics": config.metrics, "tokenize": config.tokenize, "lowercase": config.lowercase}
    evaluation = trained.evaluation.model_copy(update={k: v for k, v in changes.items() if v is not None})
    try:
        return score_settings(evaluation, trained.data.target_lang)
    except UserError as error:
        raise UserError(str(error).removeprefix("evaluation.")) from None


def _results_folder(output: str | None, runs: list["RunDirectory"]) -> str | None:
    """Choose the folder for the results of an evaluation; None stands for the directory of the only run.

    Raises UserError if that directory cannot be written.
    """
    if output is not None:
        return output
    if len(runs) > 1 or runs[0].is_archive:  # the results belong to none of the runs
        return f"outputs/evaluate/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"
    _check_writable(runs[0])
    return None


def _check_writable(run: "RunDirectory") -> None:
    """Raises UserError, before anything is translated, if the results could not be written."""
    for folder in (run.path, run.hypotheses, run.alignments):
        if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise UserError(f"{folder}: cannot be written; give output=FOLDER to save the results elsewhere")


def changed_settings(config: schema.EvaluateConfig, trained: schema.TrainConfig, precision: str | None) -> str:
    """Return the settings that differ from those of training, such as "seed-2_beam_size-10", to name files and results.

    A name that is too long for a file is cut and ends in a digest of all settings. `precision` is that of training.
    """
    before = {"checkpoint": "best", "seed": trained.seed, "precision": precision, "shortlist": None}
    before |= {**trained.evaluation.model_dump(), **trained.search.model_dump()}
    names = ("checkpoint", "seed", "precision", "shortlist", "metrics", "tokenize", "lowercase")
    settings = {**{name: getattr(config, name) for name in names}, **config.search}
    changed = {k: v for k, v in settings.items() if v is not None and before.get(k) != v}
    texts = {key: "+".join(value) if isinstance(value, list) else value for key, value in changed.items()}
    return short_name("_".join(f"{key}-{text}" for key, text in texts.items()), MAX_NAME)


def _compare(config: schema.CompareConfig) -> None:
    table, folder = compare(config)
    print(table)
    print(f"page: {os.path.relpath(folder / 'index.html')}")


def compare(config: schema.CompareConfig) -> tuple[str, Path]:
    """Rank systems, test their differences for significance, show where they differ.

    Returns the table and the folder of all results. Raises UserError.
    """
    with exit_at_ctrl_c("compare"):
        from nmt.compare.report import write_comparison

    settings = config.model_dump(exclude={"output"})
    with output_folder(config.output, "comparison.json", "a comparison") as output:
        return write_comparison(output=output, **settings), output


@contextmanager
def output_folder(output: str, marker: str, content: str, option: str = "output=") -> Iterator[Path]:
    """Create the folder `output` if it is missing. If the body raises, remove new folders that are empty.

    Raises UserError if the folder cannot be created or written, or if it holds files but not `marker`, the file by
    which an earlier result is recognised. In messages, `option` names the argument and `content` the kind of result.
    """
    folder = user_path(output)
    if any(path.exists() and not path.is_dir() for path in (folder, *folder.parents)):
        raise UserError(f"{option}{output}: is a file or lies below a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / marker).is_file():
        raise UserError(f"{option}{output}: holds files other than {content}; name another folder")
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}{output}: cannot be created ({error.strerror})") from None
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{option}{output}: cannot be written; name another folder")
        yield folder
    except BaseException:
        with suppress(OSError):
            for path in created:
                path.rmdir()
        raise


def _serve(config: schema.ServeConfig) -> None:
    if missing := [name for name in SERVE_PACKAGES if find_spec(name) is None]:
        packages = " ".join(name.replace("_", "-") for name in SERVE_PACKAGES)
        raise UserError(f"the package {missing[0]} is missing: pip install {packages}")
    token = _token(config)
    with exit_at_ctrl_c("serve"):
        import torch

        from nmt.serve.models import load_models
        from nmt.serve.server import Rules, address, application, listen, run
        from nmt.serve.service import QueueSettings, Service, worker_count
        from nmt.system.machine import fair_waiting, tune_memory

    tune_memory()
    listening = listen(config.host, config.port)  # first, so that a port in use is reported before models are loaded
    limits = config.limits
    with listening, fair_waiting():
        models = load_models(config.run, config.load_arguments, limits.beam_size)
        threads = torch.get_num_threads()
        workers = worker_count(config.workers, next(iter(models.values())).translator.machine.device.type, threads)
        queue = QueueSettings(workers, max(1, threads // workers), limits.queued_sentences, config.batch_wait_seconds)
        service = Service(models, queue, limits.request_texts)
        own_names = {name.lower() for name in (config.host, *config.hosts)}
        hosts = None if not _is_loopback(config.host) and not config.hosts else LOOPBACK | own_names
        rules = Rules(hosts, token, limits.body_bytes, limits.request_seconds)
        names = f"{len(models)} models ({', '.join(models)})" if len(models) > 1 else next(iter(models))
        url = address(listening) + (f"#token={quote(token, safe='')}" if token and config.token else "")
        log.info("serving %s at %s; Ctrl-C stops", names, url)
        app = application(service, rules, config.log_requests)
        # uvicorn raises the signal again when it has stopped: then leave this block, which deletes unpacked archives.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(STOPPED + number))
        try:
            run(app, listening, limits.connections, limits.request_seconds)
        finally:
            service.batcher.close()


def _token(config: schema.ServeConfig) -> str | None:
    """Return the token that clients must send, without surrounding white space, which HTTP drops; None without a token.

    Raises UserError if no client could send the token, or if other machines could use the service without a token.
    """
    if setting := config.token or os.environ.get(TOKEN):
        token = setting.strip()
        if not token or CONTROL.search(token):
            name = "token" if config.token else TOKEN
            raise UserError(f"{name}: is blank or holds control characters, which no client can send")
        return token
    if not _is_loopback(config.host):
        raise UserError(
            f"host={config.host}: other machines could use this service; give token=... or the environment variable "
            f"{TOKEN}, which clients then have to send"
        )
    return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _export(config: schema.ExportConfig) -> None:
    with exit_at_ctrl_c("export"):
        from nmt.export.contents import contents
        from nmt.system.files import write_archive
        from nmt.system.run import RunDirectory

    run = RunDirectory.existing(config.run[0])
    file = user_path(config.output)
    _check_file(config, file)
    if run.owns(file):
        raise UserError(f"output={config.output}: lies among the run's own files; name another file")
    packed = contents(
        run,
        file.name,
        checkpoint=config.checkpoint,
        license=config.license,
        sentences=config.sentence or [],
        held_out=config.held_out,
        half=config.precision == "fp16",
    )
    _check_file(config, file)  # again: another process may have created the file while the model was loading
    write_archive(file, packed)
    print(f"archive: {os.path.relpath(file)} ({file.stat().st_size / 1e6:,.1f} MB)")


def _check_file(config: schema.ExportConfig, file: Path) -> None:
    """Raises UserError, before the model is loaded, if the file could not be written."""
    if file.is_dir():
        raise UserError(f"output={config.output}: is a folder; name a file, such as model.nmt")
    if os.path.lexists(file) and not config.overwrite:
        raise UserError(f"output={config.output}: exists; name another file, or set overwrite=true")
    folder = next(folder for folder in file.absolute().parents if os.path.lexists(folder))
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UserError(f"output={config.output}: cannot be written; {folder} is no folder that may be written to")
