"""Pretended GPU memory: who holds how much of which GPU, in a directory that the fakes and the fake nvidia-smi share.

`FAKE_GPU_DIR` names the directory. In it:

- `gpus.json` (optional) describes the machine and how nvidia-smi behaves, see `Machine`;
- `held/*.json` is one file per holder and GPU. A live holder keeps a lock (flock) on its file, so that its end
  is noticed however it came. The memory is free `release` seconds after the end was first noticed by a reader.
  A file with `"stranger": true` needs no lock: it stands for a process of somebody else.
"""

import fcntl
import json
import os
import time
from pathlib import Path

from llmgw.fake.knobs import Knobs

DEFAULT_COUNT = 8


def default_gpu(index: int) -> dict[str, str]:
    """Every field the fake nvidia-smi can be asked for, of an H100 with 80 GB."""
    return {
        "index": str(index),
        "uuid": f"GPU-fa4e0000-0000-4000-8000-{index:012x}",
        "name": "NVIDIA H100 80GB HBM3",
        "pci.bus_id": f"00000000:{0x1A + index * 0x11:02X}:00.0",
        "memory.total": "81559",
        "memory.reserved": "479",
        "compute_cap": "9.0",
        "mig.mode.current": "Disabled",
        "ecc.mode.current": "Enabled",
        "ecc.errors.uncorrected.volatile.total": "0",
        "remapped_rows.pending": "No",
        "remapped_rows.failure": "No",
        "persistence_mode": "Enabled",
        "temperature.gpu": "34",
        "power.draw": "71.52",
        "power.limit": "700.00",
        "gpu_recovery_action": "None",
        "utilization.gpu": "0",
        "pstate": "P0",
        "serial": f"165212300{index:04}",
        "count": "1",
        "fabric.state": "Completed",
        "clocks.sm": "345",
    }


class Machine:
    """The described machine.

    `gpus.json` may hold: `gpus` (a list of fields that differ from `default_gpu`, or a number), `driver_version`,
    `cuda_version`, `unknown_fields` (names that this driver does not know) and `behaviour`, see
    `llmgw.fake.nvidia_smi`. Whatever is missing is that of a node with eight H100.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        data: dict[str, object] = {}
        if directory is not None and (directory / "gpus.json").exists():
            data = json.loads((directory / "gpus.json").read_text())
        described = data.get("gpus", DEFAULT_COUNT)
        count = described if isinstance(described, int) else len(described) if isinstance(described, list) else 0
        self.gpus = [default_gpu(index) for index in range(count)]
        if isinstance(described, list):
            for gpu, changes in zip(self.gpus, described, strict=True):
                gpu.update({key: str(value) for key, value in changes.items()})
        self.driver_version = str(data.get("driver_version", "580.95.05"))
        self.cuda_version = str(data.get("cuda_version", "13.0"))
        unknown = data.get("unknown_fields", [])
        self.unknown_fields = [str(name) for name in unknown] if isinstance(unknown, list) else []
        behaviour = data.get("behaviour", {})
        self.behaviour: dict[str, object] = behaviour if isinstance(behaviour, dict) else {}
        for gpu in self.gpus:
            gpu["driver_version"] = self.driver_version

    def find(self, name: str) -> dict[str, str] | None:
        """The GPU with this index or UUID (which may be abbreviated, as CUDA allows)."""
        for gpu in self.gpus:
            if name == gpu["index"] or (name.startswith("GPU-") and gpu["uuid"].startswith(name)):
                return gpu
        return None


class Holder:
    """Memory that is not free: whose, where, how much."""

    __slots__ = ("gpu", "mib", "path", "pid", "process_name")

    def __init__(self, path: Path, record: dict[str, object]) -> None:
        self.path = path
        self.gpu = str(record["gpu"])
        self.pid = int(str(record["pid"]))
        self.mib = int(str(record["mib"]))
        self.process_name = str(record.get("process_name", "python3"))


def directory_from_environment() -> Path | None:
    name = os.environ.get("FAKE_GPU_DIR", "")
    return Path(name) if name else None


def current_holders(directory: Path | None) -> list[Holder]:
    """Whoever holds memory now, the dead whose memory is not back yet included."""
    if directory is None:
        return []
    holders = []
    for path in sorted((directory / "held").glob("*.json")):
        record = _read_unless_free(path)
        if record is not None:
            holders.append(Holder(path, record))
    return holders


def _read_unless_free(path: Path) -> dict[str, object] | None:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        record: dict[str, object] = json.loads(os.pread(descriptor, 65536, 0))
        if record.get("stranger"):
            return record
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return record
        if record["release"] == "never":
            return record
        now = time.monotonic()
        ended = float(str(record.setdefault("ended", now)))
        if now - ended >= float(str(record["release"])):
            path.unlink(missing_ok=True)
            return None
        text = json.dumps(record).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        return record
    finally:
        os.close(descriptor)


def write_stranger(directory: Path, gpu: str, mib: int, pid: int, process_name: str) -> Path:
    """Note memory held by a process that no fake engine started."""
    held = directory / "held"
    held.mkdir(parents=True, exist_ok=True)
    path = held / f"stranger-{gpu}-{pid}.json"
    record = {"gpu": gpu, "mib": mib, "pid": pid, "process_name": process_name, "stranger": True}
    path.write_text(json.dumps(record))
    return path


class Holdings:
    """What the calling process holds."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._directory = directory_from_environment()
        self._locks: list[int] = []

    def visible(self) -> list[str]:
        """The GPUs this process may use, by index or UUID as given; without a restriction all of the machine."""
        if self._directory is None:
            return []
        names = os.environ.get("CUDA_VISIBLE_DEVICES")
        if names is None:
            return [gpu["index"] for gpu in Machine(self._directory).gpus]
        return [name.strip() for name in names.split(",") if name.strip()]

    def take_all(self) -> None:
        for name in self.visible():
            self.take(name)

    def take_rank(self, rank: int) -> str | None:
        """Take the GPU of one rank. Returns why not, worded as the engine would (None = taken or nothing to take)."""
        visible = self.visible()
        return self.take(visible[rank]) if rank < len(visible) else None

    def take(self, name: str) -> str | None:
        """Hold `gpu_mib` on one GPU until this process ends. Returns the reason when the memory is not free."""
        directory = self._directory
        if directory is None or self._knobs.gpu_mib <= 0:
            return None
        machine = Machine(directory)
        gpu = machine.find(name)
        if gpu is None:
            return "CUDA error: invalid device ordinal"
        total = int(gpu["memory.total"])
        used = sum(holder.mib for holder in current_holders(directory) if machine.find(holder.gpu) is gpu)
        if used + self._knobs.gpu_mib > total:
            return (
                f"Free memory on device cuda:{name} ({(total - used) / 1024:.2f}/{total / 1024:.2f} GiB) on startup "
                f"is less than desired GPU memory utilization (0.9, {self._knobs.gpu_mib / 1024:.2f} GiB)."
            )
        held = directory / "held"
        held.mkdir(parents=True, exist_ok=True)
        record = {
            "gpu": gpu["index"],
            "mib": self._knobs.gpu_mib,
            "pid": os.getpid(),
            "release": self._knobs.gpu_release,
        }
        # Locked before it is visible, else a reader between the two would take the holder for dead.
        hidden = held / f".{os.getpid()}-{gpu['index']}"
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)
        hidden.rename(held / f"{gpu['index']}-{os.getpid()}.json")
        self._locks.append(descriptor)
        return None
