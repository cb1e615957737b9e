"""A function over many jobs in worker processes, with a time limit for each job: one that raises, dies, hangs or forks costs
its own result and no other.

    run(function, [(a, b), ...], workers=4, timeout=5.0) -> [value or Failure, ...]     in the order of the jobs

Workers are forked anew for every call: they inherit function and jobs, so neither needs to be picklable (results do), edits
and closures just work, and nothing a job leaves behind reaches the next call. The price is a fork per worker and call (about
4 ms per GB of this process) and that a job must not touch what does not survive a fork: the GPU, collectives, thread pools.
The limit is kept from outside with SIGKILL, so it also holds in native code (a regular expression that never ends), in any
thread, and for functions with alarms of their own. Left out: batching of tiny jobs, machines other than this one.
"""

import contextlib
import ctypes
import gc
import math
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

LIBC = ctypes.CDLL(None)  # loaded before any fork
PR_SET_PDEATHSIG = 1
BEAT = 0.05  # seconds between looks for workers that died without a word


@dataclass
class Failure:
    """Why a job has no result. what: "ValueError: ...", one line; where: file:line in function, "" if it is not known."""

    what: str
    where: str = ""


def failure(error: BaseException) -> Failure:
    """An exception in one line, with its innermost place."""
    what = " ".join(traceback.format_exception_only(error)[-1].split())[:300]
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    return Failure(what, *(f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in frames))


def attempt(function: Callable, job: tuple):
    """function(*job), or the Failure that came of it. A copy of this process that the function forked ends here."""
    me = os.getpid()
    try:
        out = function(*job)
    except (Exception, SystemExit) as e:  # not a Ctrl-C, which is meant for the run
        out = failure(e)
    if os.getpid() != me:
        os._exit(0)
    return out


class Worker:
    """A forked process that does one job of the list at a time; the pipes carry the job's number and the pickled result."""

    def __init__(self, function: Callable, jobs: list[tuple]):
        numbers, self.numbers = os.pipe()
        self.answers, answers = os.pipe()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()  # or the worker would print what waits there once more
        self.pid = os.fork()
        if not self.pid:
            try:
                settle(parent)
                serve(function, jobs, numbers, answers)
            finally:
                os._exit(1)
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)  # here too: it may have to be killed before it got so far
        os.close(numbers)
        os.close(answers)
        self.job, self.deadline, self.read, self.open, self.status = None, math.inf, bytearray(), True, None

    def give(self, job: int, timeout: float) -> None:
        self.job, self.deadline = job, time.monotonic() + timeout
        with contextlib.suppress(BrokenPipeError):  # dead already: look() will tell
            os.write(self.numbers, job.to_bytes(8, "little"))

    def look(self, ready: bool, timeout: float) -> tuple | None:
        """(result or Failure, can the worker go on?); None: nothing yet."""
        part = os.read(self.answers, 1 << 20) if ready else b""
        self.read += part
        size = int.from_bytes(self.read[:8], "little")
        if len(self.read) >= 8 and len(self.read) - 8 >= size:
            body, self.read = bytes(self.read[8:]), bytearray()
            try:
                return pickle.loads(body), True  # from our own function in our own child
            except Exception as e:
                return failure(e), True
        if time.monotonic() > self.deadline:
            return Failure(f"TimeoutError: no result within {timeout:g} s"), False
        if part:
            return None
        self.open &= not ready  # nothing to read: the process is ending, or the function closed what is not its own
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        self.status = os.waitstatus_to_exitcode(status)
        how = f"signal {-self.status}" if self.status < 0 else f"exit code {self.status}"
        return Failure(f"ChildProcessError: the process of the job ended with {how}"), False

    def close(self) -> None:
        """Kill the worker and whatever it started."""
        for kill in (os.killpg, os.kill) if self.status is None else (os.killpg,):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        if self.status is None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        os.close(self.numbers)
        os.close(self.answers)


def settle(parent: int) -> None:
    """First steps of a worker: a process group of its own, no handler of the parent, and an end with the parent."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what a Ctrl-C means
    if sys.platform == "linux":  # a killed parent closes no worker, and native code that hangs sees no closed pipe
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    gc.freeze()  # never free here what belongs to the parent: GPU memory, locks, files
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # the threads of the parent's pool are not here; waiting for them would never end


def serve(function: Callable, jobs: list[tuple], numbers: int, answers: int) -> None:
    """Life of a worker: a number comes in, a result goes out."""
    with open(answers, "wb") as pipe:
        while number := os.read(numbers, 8):
            out = attempt(function, jobs[int.from_bytes(number, "little")])
            try:
                body = pickle.dumps(out)
            except Exception as e:
                body = pickle.dumps(failure(e))
            with contextlib.suppress(AttributeError, OSError, ValueError):
                sys.stdout.flush()  # what the function printed; os._exit would lose it
            pipe.write(len(body).to_bytes(8, "little") + body)
            pipe.flush()


def run(function: Callable, jobs: list[tuple], workers=0, timeout=math.inf, most=math.inf) -> list:
    """function(*job) of every job, or a Failure in its place, in order. At most ceil(jobs / workers) * timeout seconds.

    workers 0: in this process, where a job that hangs or kills itself cannot be helped. Stops behind more than `most`
    failures; what has not been tried by then stays None.
    """
    out, failed = [None] * len(jobs), 0
    if not workers:
        for i, job in enumerate(jobs):
            out[i] = attempt(function, job)
            failed += isinstance(out[i], Failure)
            if failed > most:
                break
        return out
    queue, pool = deque(range(len(jobs))), []
    try:
        while failed <= most and (queue or any(w.job is not None for w in pool)):
            while len(pool) < workers and len(queue) > sum(w.job is None for w in pool):
                pool.append(Worker(function, jobs))
            for w in pool:
                if w.job is None and queue:
                    w.give(queue.popleft(), timeout)
            busy = [w for w in pool if w.job is not None]
            poll = select.poll()
            for w in filter(lambda w: w.open, busy):
                poll.register(w.answers, select.POLLIN)
            wait = min(BEAT, min(w.deadline for w in busy) - time.monotonic())
            ready = {fd for fd, _ in poll.poll(max(0, math.ceil(1000 * wait)))}
            for w in busy:
                if (found := w.look(w.answers in ready, timeout)) is None:
                    continue
                out[w.job], w.job = found[0], None
                failed += isinstance(found[0], Failure)
                if not found[1]:
                    pool.remove(w)
                    w.close()
    finally:
        for w in pool:
            w.close()
    return out
