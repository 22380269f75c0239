"""nmt-serve: the page and the service for one or several trained models."""

import logging
import os
import signal
import sys
from importlib.util import find_spec
from urllib.parse import quote

from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.run_command import STOPPED, run_configured
from nmt.config.errors import CONTROL, UserError
from nmt.config.schema import ServeConfig
from nmt.system.processes import leave_group

log = logging.getLogger(__name__)
TOKEN = "NMT_SERVE_TOKEN"
SERVE_PACKAGES = ("fastapi", "uvicorn")
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def main() -> None:
    leave_group()  # processes of torchrun, if any, do not share this work
    run_configured("serve", ServeConfig, _serve)


def _serve(config: ServeConfig) -> None:
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
        hosts = None if config.host not in LOOPBACK and not config.hosts else LOOPBACK | own_names
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


def _token(config: ServeConfig) -> str | None:
    """Return the token that clients must send, without surrounding white space, which HTTP drops; None without a token.

    Raises UserError if no client could send the token, or if other machines could use the service without a token.
    """
    if setting := config.token or os.environ.get(TOKEN):
        token = setting.strip()
        if not token or CONTROL.search(token):
            name = "token" if config.token else TOKEN
            raise UserError(f"{name}: is blank or holds control characters, which no client can send")
        return token
    if config.host not in LOOPBACK:
        raise UserError(
            f"host={config.host}: other machines could use this service; give token=... or the environment variable "
            f"{TOKEN}, which clients then have to send"
        )
    return None
