"""How this process was started: alone, or with others by torchrun or a cluster. Imports no torch until it must."""

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def started_in_group() -> bool:
    """Was this process started together with others?"""
    names = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return names <= os.environ.keys() and int(os.environ["WORLD_SIZE"]) > 1


def rank() -> int:
    """The number of this process among all, from 0."""
    return int(os.environ["RANK"]) if started_in_group() else 0


def local_rank() -> int | None:
    """The number of this process among those on its machine, from 0; None for a process alone."""
    return int(os.environ.get("LOCAL_RANK", "0")) if started_in_group() else None


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def join_cluster() -> None:
    """In a cluster's job of several tasks, started by submitit, set the variables that torchrun would set."""
    if "SUBMITIT_EXECUTOR" not in os.environ or started_in_group():
        return
    import submitit

    if submitit.JobEnvironment().num_tasks > 1:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


def agreed(name: str, value: str) -> str:
    """The value of the first process that calls this, also after torchrun has restarted the processes."""
    return bytes(agent_store().compare_set(f"nmt/{name}", "", value)).decode() if has_agent() else value


def has_agent() -> bool:
    """Does torchrun watch over this process and others, and restart them?"""
    return started_in_group() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agent_store() -> "TCPStore":
    """torchrun's store, which outlives a restart."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def end_with(launcher: int) -> None:
    """Send this process SIGTERM within a second after its parent, the process `launcher`, has ended.

    A launcher that is killed cannot end its processes. SIGTERM lets a run save a checkpoint first.
    """

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
