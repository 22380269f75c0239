"""Start processes that compete for the processor, and measure the share that the kernel leaves to this process."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SPIN = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
MEASURE = f"{SPIN}\nprint(time.process_time())"
MAX_SECONDS = 900.0  # after this time a competing process ends by itself
PROBE_SECONDS = 2.0


@contextmanager
def competing(processes: int) -> Iterator[None]:
    """Run this number of busy processes within the context, each in a new session, like those of other users."""
    command = [sys.executable, "-c", SPIN, str(MAX_SECONDS)]
    started = [subprocess.Popen(command, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def processor_share(threads: int) -> float:
    """Measure the share of time, from 0 to 1, for which each of `threads` busy threads has a processor. A process of
    this session stands for each thread. These processes never wait for each other."""
    command = [sys.executable, "-c", MEASURE, str(PROBE_SECONDS)]
    began = time.perf_counter()
    probes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(threads)]
    seconds = [float(probe.communicate()[0]) for probe in probes]
    return sum(seconds) / threads / (time.perf_counter() - began)
