"""nmt-serve: a page and a service for trained models."""

import ipaddress
import logging
import os
from importlib.util import find_spec
from urllib.parse import quote

from nmt.cli.app import run_command
from nmt.cli.entry import exit_at_ctrl_c
from nmt.config.errors import CONTROL, UserError
from nmt.config.schema import ServeConfig

log = logging.getLogger(__name__)
TOKEN = "NMT_SERVE_TOKEN"
PACKAGES = ("fastapi", "prometheus_client", "python_multipart", "uvicorn")
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def main() -> None:
    """Entry point."""
    run_command("serve", ServeConfig, _serve)


def _serve(config: ServeConfig, overrides: list[str]) -> None:
    _check_packages()
    token = _token(config)
    with exit_at_ctrl_c("serve"):
        import torch

        from nmt.serve.app import application
        from nmt.serve.batcher import QueueSettings
        from nmt.serve.connections import Connections
        from nmt.serve.guard import Rules
        from nmt.serve.models import load_models
        from nmt.serve.server import address, listen, run
        from nmt.serve.service import Service
        from nmt.system.contention import fair_waiting
        from nmt.system.machine import tune_memory

    tune_memory()
    listening = listen(config.host, config.port)  # before models are loaded, which takes longer
    limits = config.limits
    with listening, fair_waiting():
        models = load_models(config.run, config.load_arguments, limits.beam_size)
        threads = torch.get_num_threads()
        on_cpu = next(iter(models.values())).translator.machine.device.type == "cpu"
        workers = config.workers or (threads if on_cpu else 1)
        queue = QueueSettings(workers, max(1, threads // workers), limits.queued_sentences, config.batch_wait_seconds)
        service = Service(models, queue, limits.request_texts)
        own_names = {name.lower() for name in (config.host, *config.hosts)}
        hosts = None if not _is_loopback(config.host) and not config.hosts else LOOPBACK | own_names
        rules = Rules(hosts, token, limits.body_bytes, limits.body_seconds, limits.request_seconds)
        names = f"{len(models)} models ({', '.join(models)})" if len(models) > 1 else next(iter(models))
        url = address(listening) + (f"#token={quote(token, safe='')}" if token and config.token else "")
        log.info("serving %s at %s; Ctrl-C stops", names, url)
        connections = Connections(limits.connections, limits.header_seconds, config.log_requests)
        try:
            run(application(service, rules, config.log_requests), listening, connections, limits.request_seconds)
        finally:
            service.batcher.close()


def _check_packages() -> None:
    """Raises UserError if the packages of the extra `serve` are missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f"the package {missing[0]} is missing: pip install 'nmt[serve]'")


def _token(config: ServeConfig) -> str | None:
    """The token without white space around it, which HTTP drops. Raises UserError if no client could send it, or if
    other machines could use a service without one."""
    given = config.token or os.environ.get(TOKEN)
    if given:
        token = given.strip()
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
