"""The hardware that a process computes with: device, precision, threads, memory, and how threads wait for each other.

Threads of OpenMP wait for each other at the end of each operation. They wait in a busy loop (they spin), which is
fastest on an idle machine. On a busy machine, threads may spin while the kernel runs another process instead of the
thread that they wait for: beside one busy process, training on two cores fell to a fiftieth of its speed. GNU's OpenMP
soon lets waiting threads sleep if it manages more threads than there are CPUs ("GOMP_SPINCOUNT" in its manual). So
`fair_waiting` adds idle threads while the machine is busy. The number of threads that compute, and so all results, stay
the same.
"""

import ctypes
import gc
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Self, TypeVar

import torch
from numpy.typing import NDArray

from nmt.config.errors import UserError
from nmt.system.processes import cores, local_group_size, local_rank

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # constants of glibc's malloc.h
_VENDORS = ("AuthenticAMD", "GenuineIntel")
KERNELS = 256  # number of compiled kernels that oneDNN caches
PERIOD = 1.0  # seconds between measurements of the CPUs' use
MARGIN = 0.25  # number of CPUs that other processes may use before the machine counts as busy
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # variables by which users set how threads wait
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


S = TypeVar("S", list[Any], NDArray[Any])
R = TypeVar("R")


class Machine(NamedTuple):
    """A device and the precision of matrix products on it. A model's parameters are always float32."""

    device: torch.device
    precision: str  # fp32 | bf16 | fp16
    int8: bool = False  # does a search multiply with 8-bit copies of the parameters?

    @property
    def precision_of_search(self) -> str:
        """The precision of matrix products in a search: "int8", or else `precision`."""
        return "int8" if self.int8 else self.precision

    @classmethod
    def choose(cls, device: str, precision: str, threads: int | None) -> Self:
        """Resolve "auto" and set the number of threads. Raises UserError for an unavailable device or precision.

        precision: "int8" means 8-bit copies of the parameters in a search on a CPU, and float32 for everything else.
        Each process of a group takes the GPU whose number is its rank on the machine.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        kind = next(name for name in available if available[name]) if device == "auto" else device
        if not available[kind]:
            raise UserError(f"device={device}: this machine or this build of torch has none; use device=auto")
        int8 = precision == "int8"
        if int8 and kind != "cpu":
            raise UserError(
                f"precision=int8 is for CPUs, but the device is {kind}; add device=cpu or use precision=auto"
            )
        if int8:
            precision = "fp32"
        if precision == "auto":
            precision = "bf16" if _gains_from_bf16(kind) else "fp16" if kind == "cuda" else "fp32"
        if precision == "fp16" and kind != "cuda":
            raise UserError(f"precision=fp16 needs a CUDA GPU, but the device is {kind}; use fp32 or bf16")
        rank = local_rank()
        if kind != "cuda" or rank is None:
            return cls(torch.device(kind), precision, int8)
        if local_group_size() > torch.cuda.device_count():
            raise UserError(
                f"device={device}: this machine has fewer GPUs ({torch.cuda.device_count()}) than processes; start one "
                "process per GPU"
            )
        torch.cuda.set_device(rank)
        return cls(torch.device(kind, rank), precision)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which matrix products use this precision."""
        reduced = self.precision != "fp32"
        dtype = DTYPES[self.precision] if reduced else None
        return torch.autocast(self.device.type, dtype=dtype, enabled=reduced)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()

    def describe(self) -> dict[str, str | int]:
        """Describe device, precision and threads for the run's manifest."""
        cpu = _cpu_info("model name") or platform.processor() or "CPU"
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu
        return {
            "device": str(self.device),
            "name": name,
            "precision": self.precision_of_search,
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count() or 0,
        }


def _gains_from_bf16(kind: str) -> bool:
    """Does the hardware have instructions for bf16 matrix products? Emulated bf16 is slower than float32."""
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind != "cpu":
        return False
    capabilities = cpu_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def cpu_capabilities() -> dict[str, bool]:
    """Return whether the CPU has each instruction set, such as "avx512_vnni"; {} if this torch cannot tell."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities


def tune_memory() -> None:
    """Let glibc keep freed memory, oneDNN cache fewer kernels, and Python's garbage collector leave what is imported
    alone. Call it before the first matrix product.

    It affects the whole process, so only commands call it. If glibc returned freed memory to the system, page faults
    would cost up to a tenth of each update's time. oneDNN compiles a kernel for each new shape of a product (in bf16;
    on AMD also in float32). By default it caches 1,024 kernels, which take half a gigabyte. Every epoch replaces some
    of them, which fragments the heap, so that it keeps growing. A full garbage collection visits all objects, most of
    which belong to imported modules: it takes a tenth of a second, again and again in a long run.
    """
    gc.freeze()
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # read by oneDNN and by torch
        os.environ.setdefault(name, str(KERNELS))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)  # allocate large blocks on the heap too
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)  # return memory only if more bytes than this are free at the heap's end


def is_out_of_memory(error: BaseException) -> bool:
    """Is this an out-of-memory error of torch (also of cuBLAS or cuDNN), NumPy or Python?"""
    messages = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in messages)
    )


def release_memory() -> None:
    """Give the cached GPU memory of torch back to the system: it may be too fragmented for a large tensor."""
    gc.collect()  # frees tensors that only reference cycles keep alive
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def retry_in_halves(work: Callable[[S], R], items: S) -> list[R]:
    """Return [work(items)]; if it runs out of memory, halve the items recursively and return the result of each part.
    Raises UserError if memory does not suffice for one item."""
    try:
        return [work(items)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release_memory()  # outside `except`, whose traceback holds tensors
    if len(items) == 1:
        raise UserError("out of memory with one sentence per batch; use a smaller beam or model")
    middle = len(items) // 2
    return retry_in_halves(work, items[:middle]) + retry_in_halves(work, items[middle:])


def cpu_vendor() -> str:
    """Return the CPU's vendor id, such as GenuineIntel or AuthenticAMD; empty if unknown."""
    return _cpu_info("vendor_id") or next((name for name in _VENDORS if name in platform.processor()), "")


def _cpu_info(field: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith(field)), "")
    except OSError:
        return ""


# Waiting threads


class Usage(NamedTuple):
    """CPU time used up to a moment."""

    all: float  # CPU seconds of all processes, on the CPUs that this process may use
    here: float  # CPU seconds of this process
    clock: float  # time of the measurement in seconds

    @classmethod
    def now(cls) -> "Usage":
        """Read the current usage from /proc (Linux only)."""
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        with open("/proc/stat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
        # user, nice, system, idle, iowait, irq, softirq, steal; later columns are already part of user and nice
        ticks = [[int(word) for word in words[1:9]] for words in lines if words[0] in allowed]
        busy = sum(sum(times) - times[3] - times[4] for times in ticks) / os.sysconf("SC_CLK_TCK")
        used = os.times()
        return cls(busy, used.user + used.system, time.monotonic())


def is_contended(before: Usage, after: Usage, threads: int, cpus: int) -> bool:
    """Did other processes leave fewer than `threads` of the `cpus` CPUs free between the two measurements?"""
    others = (after.all - before.all - (after.here - before.here)) / (after.clock - before.clock)
    return others > MARGIN and threads + others > cpus + MARGIN


class IdleThreads:
    """Threads of OpenMP that do nothing. Together with those that compute, they are more than there are CPUs."""

    def __init__(self, threads: int, cpus: int) -> None:
        """threads: number of threads that compute, at least 2. Each Python thread that calls OpenMP gets a team of
        `threads` threads, of which it is one."""
        groups = math.ceil(max(1, cpus + 1 - threads) / (threads - 1))  # each adds threads - 1 threads of OpenMP
        self._end, started = threading.Event(), threading.Barrier(groups + 1)
        for _ in range(groups):
            threading.Thread(target=self._wait, args=(started,), daemon=True).start()
        started.wait()

    def _wait(self, started: threading.Barrier) -> None:
        torch.ones(2**17).add_(1.0)  # large enough for OpenMP to start its threads
        started.wait()
        self._end.wait()

    def end(self) -> None:
        """End the Python threads, and with them the threads of OpenMP that they started."""
        self._end.set()


@contextmanager
def fair_waiting() -> Iterator[None]:
    """Within this context, let waiting threads sleep while other processes are busy.

    It affects the whole process, so only commands enter it, after they have set the number of threads. It changes
    nothing with a single thread, without GNU's OpenMP on Linux, or if the user has set a variable of SETTINGS.
    """
    threads = torch.get_num_threads()
    if threads == 1 or not _has_gnu_openmp() or any(name in os.environ for name in SETTINGS):
        yield
        return
    end = threading.Event()
    watch = threading.Thread(target=_watch, args=(threads, cores(), end), daemon=True)
    watch.start()
    try:
        yield
    finally:
        end.set()
        watch.join()


def _has_gnu_openmp() -> bool:
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return any("libgomp" in line for line in file)


def _watch(threads: int, cpus: int, end: threading.Event) -> None:
    """Until `end` is set, add idle threads each time the machine gets busy, and end them when it is idle again."""
    idle, before = None, Usage.now()
    while not end.wait(PERIOD):
        after = Usage.now()
        contended = is_contended(before, after, threads, cpus)
        if contended and idle is None:
            idle = IdleThreads(threads, cpus)
        elif idle is not None and not contended:
            idle.end()
            idle = None
        before = after
    if idle is not None:
        idle.end()
