"""Two processes on this machine that talk through gloo, each running one function of a module of tests."""

import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

# One process imports these once; all others are copies of it.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pair_measure", "pair_sharded"])


def run_pair(function, folder, limit=60):
    """Run a function in two processes; exit codes, outputs and errors of both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [
        SERVER.Process(target=call, args=(function, folder, rank, port), daemon=True) for rank in range(2)
    ]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=path):  # for the server, which does not inherit `sys.path`
        for process in started:
            process.start()
    deadline = time.monotonic() + limit
    for process in started:
        process.join(max(0, deadline - time.monotonic()))
        process.kill()  # does nothing to one that has ended
        process.join()
    streams = [[Path(folder, f"{name}{rank}").read_text() for name in ("out", "err")] for rank in range(2)]
    return [(process.exitcode, *texts) for process, texts in zip(started, streams, strict=True)]


def call(function, folder, rank, port):
    """What each of the two does."""
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    try:
        code = function()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.exit(code)


def keep(folder, name, value):
    """Write a small result for the test that started the pair."""
    Path(folder, name).write_text(json.dumps(value), encoding="utf-8")
