"""Runs a function of a test file on every rank of a gloo group, in processes that are kept for the next test."""

import contextlib
import datetime
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from pathlib import Path

import pytest

MOST = 4
SECONDS = 20  # the timeout of a group's operations, and then some for all of a test
MEETING = datetime.timedelta(minutes=3)  # of ranks that a busy machine keeps from starting


def serve(pipe):
    """A worker: function after function, each in a group of its own."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    modules = {}
    while (call := pipe.recv()) is not None:
        file, name, rank, world, store, seed, arguments = call
        try:
            if file not in modules:
                spec = importlib.util.spec_from_file_location(Path(file).stem, file)
                modules[file] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(modules[file])
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=MEETING)
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=SECONDS))
            dist.barrier()  # who ends at once must not close connections that others still make
            torch.manual_seed(seed)
            getattr(modules[file], name)(rank, world, *arguments)
            said = None
        except BaseException:
            said = traceback.format_exc()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        pipe.send(said)


class Ranks:
    """Called with a number of ranks, a function of a test file (rank, world, …) and the rest of its arguments."""

    def __init__(self):
        self.processes, self.pipes = [], []

    def start(self):
        os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "fretwork", "fretwork.distributed"])
        for _ in range(MOST):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=serve, args=(there,), daemon=True))
            self.processes[-1].start()
            self.pipes.append(here)
            there.close()

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def __call__(self, world, function, *arguments, dies=()):
        """Fails with what ranks say, but those of `dies`, which are expected to."""
        import torch

        if not self.processes:
            self.start()
        with tempfile.TemporaryDirectory() as folder:
            call = function.__code__.co_filename, function.__name__
            for rank, pipe in enumerate(self.pipes[:world]):
                pipe.send((*call, rank, world, f"{folder}/store", torch.initial_seed(), arguments))
            said = {}
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:world])}
            while waiting and (
                ready := multiprocessing.connection.wait(waiting, MEETING.total_seconds() + 3 * SECONDS)
            ):
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    try:
                        said[rank] = pipe.recv()
                    except (EOFError, OSError):
                        said[rank] = "died"
            said |= dict.fromkeys(waiting.values(), "hangs")
        if any(said.values()):  # those that are left may count their groups in another way
            self.stop()
        wrong = [f"rank {rank} of {world}: {text}" for rank, text in sorted(said.items()) if text and rank not in dies]
        if wrong:
            pytest.fail("\n".join(wrong), pytrace=False)


@pytest.fixture(scope="module")
def on_ranks():
    ranks = Ranks()
    yield ranks
    ranks.stop()
