"""The program of ``docs/howto/elastic.md``: a process is killed, and the run ends with the same numbers."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/howto/elastic.md").read_text()
LIMIT = 280.0  # seconds for one run


def started(folder):
    """Start the two agents; each writes into a file of its own."""
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    (command,) = re.findall(r"```sh\n(.*?)\n```", TEXT, re.S)
    folder.mkdir()
    (folder / "train.py").write_text(program)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    _, *arguments = shlex.split(command.replace("head:29400", f"localhost:{port}"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    agents = []
    for k in range(2):
        with (folder / f"agent-{k}.txt").open("wb") as file:
            agents.append(
                subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *arguments],
                    cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    return agents


def ended(folder, agents):
    for agent in agents:
        assert agent.wait(LIMIT) == 0, "\n".join(path.read_text() for path in folder.glob("agent-*.txt"))
    return torch.load(folder / "found.pt")["problem"]


def processes_of(agent):
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return [int(child) for child in children if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children of a process are found in /proc")
@pytest.mark.parametrize("which", [0, 1])
def test_a_run_with_a_process_that_is_killed_ends_with_the_same_numbers(which, tmp_path):
    agents = []
    try:
        agents += started(tmp_path / "whole")
        expected = ended(tmp_path / "whole", agents)
        killed = started(tmp_path / "killed")
        agents += killed
        last, begin = tmp_path / "killed/checkpoints/last", time.monotonic()
        while not last.exists():
            assert time.monotonic() - begin < LIMIT
            assert all(agent.poll() is None for agent in killed)
            time.sleep(0.005)
        (process,) = processes_of(killed[which])
        os.kill(process, signal.SIGKILL)
        step = int(last.read_text())
        found = ended(tmp_path / "killed", killed)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # it ends its processes too
                agent.wait(60)
    assert step < 60  # it was killed in the middle
    text = "".join(path.read_text() for path in (tmp_path / "killed").glob("agent-*.txt"))
    assert "RankError: a rank is gone" in text  # the other process has ended its step
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found["log_decay"], torch.full((20,), -3.0))
