"""Two processes on this machine that talk through gloo, each running one function of a module of tests."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CALL = "import sys, pair; sys.exit(pair.call(*sys.argv[1:]))"


def environment(**more):
    """Environment of a process that finds the tests and runs on one thread."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def call(module, function, folder):
    """What each of the two does."""
    os.chdir(folder)
    return getattr(__import__(module), function)()


def run_pair(function, folder, limit=60):
    """Run a function in two processes; exit codes, outputs and errors of both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CALL, function.__module__, function.__name__, str(folder)],
            env=environment(
                RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=limit) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *streams) for process, streams in zip(started, ended, strict=True)]


def keep(folder, name, value):
    """Write a small result for the test that started the pair."""
    (Path(folder) / name).write_text(json.dumps(value), encoding="utf-8")
