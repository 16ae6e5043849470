"""Pretended GPUs for a whole llmgw: a directory that fake engines and the fake nvidia-smi share, and that program."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llmgw.fake.gpu import write_stranger
from llmgw.fake.nvidia_smi import run
from tests.node import Node

STRANGER = 4190001
"""A pid that no process of this machine can have."""


class FakeGpus:
    """`gpus = FakeGpus(node)` gives the node an nvidia-smi of its own; `describe` says what it shows."""

    def __init__(self, node: Node, **machine: Any) -> None:
        self.directory = node.folder / "gpus"
        self.directory.mkdir()
        self.describe(**machine)
        programs = node.folder / "bin"
        run(["--fake-install", str(programs), "--fake-gpu-dir", str(self.directory)])
        self.program = programs / "nvidia-smi"
        node.env["PATH"] = f"{programs}:{os.environ['PATH']}"
        node.env["FAKE_GPU_DIR"] = str(self.directory)

    def describe(self, **machine: Any) -> None:
        """`gpus`: a number or a list of what differs from an H100; `behaviour`: how nvidia-smi misbehaves."""
        machine.setdefault("gpus", 2)
        hidden = self.directory / ".gpus.json"
        hidden.write_text(json.dumps(machine))
        hidden.replace(self.directory / "gpus.json")

    def hold(self, gpu: int, mib: int, pid: int = STRANGER) -> Path:
        """Memory of a process that is nobody's; unlinking the returned file gives it back."""
        return write_stranger(self.directory, str(gpu), mib, pid, "/opt/x/train, and more")

    def used(self, gpu: int) -> int:
        from llmgw.fake.gpu import current_holders

        return sum(holder.mib for holder in current_holders(self.directory) if holder.gpu == str(gpu))
