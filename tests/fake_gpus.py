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
    """`gpus = FakeGpus(node)` gives the node an nvidia-smi of its own; `describe` says what it shows.

    The methods change one thing of what was described, while llmgw runs or before:

        gpus = FakeGpus(node, gpus=4)
        gpus.link([0, 1], [2, 3])                # two NVLink pairs; link() is none
        gpus.slice(3, "3g.40gb", "3g.40gb")      # a card in MIG mode
        gpus.change(1, **{"gpu_recovery_action": "Reset"})
        gpus.break_ecc(1)
        gpus.drop(0)                             # dropped off: no row, a line says so
        gpus.lose(2)                             # the row stays and says that it is lost
        gpus.hang("topology", "xml")             # those calls only; without names: every one
        gpus.fail("unknown_error"); gpus.misbehave(garbage=True); gpus.behave()
    """

    def __init__(self, node: Node, **machine: Any) -> None:
        self.directory = node.folder / "gpus"
        self.directory.mkdir()
        self._machine: dict[str, Any] = {}
        self.describe(**machine)
        programs = node.folder / "bin"
        run(["--fake-install", str(programs), "--fake-gpu-dir", str(self.directory)])
        self.program = programs / "nvidia-smi"
        node.env["PATH"] = f"{programs}:{os.environ['PATH']}"
        node.env["FAKE_GPU_DIR"] = str(self.directory)

    def describe(self, **machine: Any) -> None:
        """`gpus`: a number or a list of what differs from an H100; `behaviour`: how nvidia-smi misbehaves; what else
        there is stands in `llmgw.fake.gpu.Machine`. What was described before is forgotten.
        """
        machine.setdefault("gpus", 2)
        self._machine = machine
        hidden = self.directory / ".gpus.json"
        hidden.write_text(json.dumps(machine))
        hidden.replace(self.directory / "gpus.json")

    def change(self, gpu: int, **fields: Any) -> None:
        """Other values in the fields of one card, and `mig`, `vgpu` and `state`."""
        described = self._machine["gpus"]
        cards = [{} for _ in range(described)] if isinstance(described, int) else [dict(card) for card in described]
        cards[gpu].update(fields)
        self.describe(**{**self._machine, "gpus": cards})

    def slice(self, gpu: int, *profiles: Any) -> None:
        """The card is in MIG mode and has these slices."""
        self.change(gpu, mig=list(profiles))

    def break_ecc(self, gpu: int, errors: int = 1) -> None:
        self.change(gpu, **{"ecc.errors.uncorrected.volatile.total": errors})

    def lose(self, gpu: int) -> None:
        self.change(gpu, state="lost")

    def drop(self, *gpus: int, code: int = 0) -> None:
        """These cards, and no others, have dropped off."""
        self._behave({**self._machine.get("behaviour", {}), "lost": list(gpus), "lost_code": code})

    def link(self, *groups: list[int]) -> None:
        """NVLink within these groups of cards and nowhere else."""
        self.describe(**{**self._machine, "nvlink": list(groups)})

    def hang(self, *calls: str, seconds: float = 600) -> None:
        """Calls of these names (`llmgw.fake.nvidia_smi.CALLS`) do not end, and ignore SIGTERM."""
        self.misbehave(*calls, hang=seconds)

    def fail(self, name: str, *calls: str) -> None:
        self.misbehave(*calls, fail=name)

    def misbehave(self, *calls: str, **behaviour: Any) -> None:
        """See `llmgw.fake.nvidia_smi`. Cards that dropped off stay away."""
        kept = {key: value for key, value in self._machine.get("behaviour", {}).items() if key.startswith("lost")}
        self._behave({**kept, **behaviour, **({"only": list(calls)} if calls else {})})

    def behave(self) -> None:
        """nvidia-smi answers well again, and no card is away."""
        self._behave({})

    def _behave(self, behaviour: dict[str, Any]) -> None:
        self.describe(**{**self._machine, "behaviour": behaviour})

    def hold(self, gpu: int, mib: int, pid: int = STRANGER) -> Path:
        """Memory of a process that is nobody's; unlinking the returned file gives it back."""
        return write_stranger(self.directory, str(gpu), mib, pid, "/opt/x/train, and more")

    def used(self, gpu: int) -> int:
        from llmgw.fake.gpu import current_holders

        return sum(holder.mib for holder in current_holders(self.directory) if holder.gpu == str(gpu))
