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
import threading
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


NO_MIG = "[N/A]"
"""What cells say that a card in MIG mode no longer has."""
MIG_SIZES = {"1g.10gb": 9984, "2g.20gb": 20096, "3g.40gb": 40448, "4g.40gb": 40448, "7g.80gb": 81280}
"""MiB that an H100 gives to a slice of a profile: less than its name says."""


class Slice:
    """A MIG slice. `mib` None: `-q -x` says nothing about its memory."""

    __slots__ = ("card", "device", "mib", "profile", "uuid")

    def __init__(self, card: dict[str, str], device: int, described: object) -> None:
        fields = described if isinstance(described, dict) else {"profile": described}
        self.card = card
        self.device = device
        self.profile = str(fields["profile"])
        self.uuid = str(fields.get("uuid") or f"MIG-fa4e0000-0000-4000-9000-{int(card['index']):06x}{device:06x}")
        mib = fields.get("memory", MIG_SIZES.get(self.profile))
        self.mib = int(str(mib)) if mib is not None else None


class Machine:
    """The described machine. Whatever `gpus.json` lacks is that of a node with eight H100, all linked by NVLink:

    - `gpus`: a number, or a list with one object for each card, of fields that differ from `default_gpu` (by the names
      that nvidia-smi has for them: `{"ecc.errors.uncorrected.volatile.total": 2}`, `{"gpu_recovery_action": "Reset"}`)
      or of these:
      - `mig`: the slices of a card in MIG mode, each a profile (`"3g.40gb"`) or an object with `profile` and, where
        they differ, `uuid` and `memory` in MiB (null: not told); an empty list is a card in MIG mode without slices;
      - `vgpu`: a profile (`"A40-48Q"`): the card is a vGPU, which tells neither ECC nor power;
      - `state`: `lost` or `requires_reset`: the row stays and has that text in its cells;
    - `nvlink`: groups of indexes in which each has NVLink to each other one, `[[0, 1], [2, 3]]`; `[]` is none;
    - `numa`: the NUMA node of each card; cards without NVLink are near (NODE) on one node and far (SYS) else;
    - `nics`: RDMA devices, each with the index of the card that it sits beside, `{"mlx5_0": 0}`;
    - `driver_version`, `cuda_version`, `unknown_fields` (names that this driver does not know);
    - `behaviour`: how nvidia-smi misbehaves, see `llmgw.fake.nvidia_smi`.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        data: dict[str, object] = {}
        if directory is not None and (directory / "gpus.json").exists():
            data = json.loads((directory / "gpus.json").read_text())
        described = data.get("gpus", DEFAULT_COUNT)
        count = described if isinstance(described, int) else len(described) if isinstance(described, list) else 0
        self.gpus = [default_gpu(index) for index in range(count)]
        self.slices: list[Slice] = []
        self.driver_version = str(data.get("driver_version", "580.95.05"))
        self.cuda_version = str(data.get("cuda_version", "13.0"))
        self.states: dict[str, str] = {}
        """Index -> `lost` or `requires_reset`, of cards that say so in their rows."""
        for index, changes in enumerate(described if isinstance(described, list) else ()):
            self._change(self.gpus[index], dict(changes))
        unknown = data.get("unknown_fields", [])
        self.unknown_fields = [str(name) for name in unknown] if isinstance(unknown, list) else []
        behaviour = data.get("behaviour", {})
        self.behaviour: dict[str, object] = behaviour if isinstance(behaviour, dict) else {}
        for gpu in self.gpus:
            gpu["driver_version"] = self.driver_version
        groups = data.get("nvlink", [[int(gpu["index"]) for gpu in self.gpus]])
        self.nvlink = [{str(index) for index in group} for group in groups] if isinstance(groups, list) else []
        numa = data.get("numa", [])
        self._numa = [str(node) for node in numa] if isinstance(numa, list) else []
        nics = data.get("nics", {})
        self.nics = {str(name): str(index) for name, index in nics.items()} if isinstance(nics, dict) else {}

    def _change(self, gpu: dict[str, str], changes: dict[str, object]) -> None:
        profile = changes.pop("vgpu", None)
        if profile is not None:
            gpu.update({name: NO_MIG for name in gpu if name.startswith(("ecc.", "remapped_rows.", "power.", "mig."))})
            gpu["name"] = f"NVIDIA {profile}"
        slices = changes.pop("mig", None)
        state = changes.pop("state", None)
        if isinstance(slices, list):
            gpu.update({name: NO_MIG for name in gpu if name.startswith(("remapped_rows.", "utilization."))})
            gpu["mig.mode.current"] = "Enabled"
        gpu.update({name: str(value) for name, value in changes.items()})
        if isinstance(slices, list):
            self.slices += [Slice(gpu, device, described) for device, described in enumerate(slices)]
        if state is not None:
            self.states[gpu["index"]] = str(state)

    def find(self, name: str) -> dict[str, str] | None:
        """The GPU with this index or UUID (which may be abbreviated, as CUDA allows), or that this slice is on."""
        found = self.find_slice(name)
        if found is not None:
            return found.card
        for gpu in self.gpus:
            if name == gpu["index"] or (name.startswith("GPU-") and gpu["uuid"].startswith(name)):
                return gpu
        return None

    def find_slice(self, name: str) -> Slice | None:
        return next((one for one in self.slices if name.startswith("MIG-") and one.uuid.startswith(name)), None)

    def numa(self, index: str) -> str:
        return self._numa[int(index)] if int(index) < len(self._numa) else "0"

    def link(self, one: str, other: str) -> str:
        """How two cards are connected, by index, in the words of `topo -m`."""
        if one == other:
            return "X"
        if any(one in group and other in group for group in self.nvlink):
            return "NV18"
        return "NODE" if self.numa(one) == self.numa(other) else "SYS"

    def nic_link(self, nic: str, index: str) -> str:
        beside = self.nics[nic]
        return "PIX" if beside == index else "NODE" if self.numa(beside) == self.numa(index) else "SYS"


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
        if not _is_still(path, descriptor):
            return _read_unless_free(path)
        if record["release"] == "never":
            return record
        now = time.monotonic()
        ended = float(str(record.setdefault("ended", now)))
        if now - ended >= float(str(record["release"])):
            path.unlink(missing_ok=True)
            return None
        _replace(path, record)
        return record
    finally:
        os.close(descriptor)


def _replace(path: Path, record: dict[str, object]) -> None:
    """Write a record whole: readers wait for no lock, and a writer that is killed half-way must leave the old one."""
    hidden = path.with_name(f".{os.getpid()}-{threading.get_ident()}-{path.stem}")
    hidden.write_text(json.dumps(record))
    hidden.rename(path)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file has not been replaced or removed since it was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_stranger(directory: Path, gpu: str, mib: int, pid: int, process_name: str) -> Path:
    """Note memory held by a process that no fake engine started."""
    held = directory / "held"
    held.mkdir(parents=True, exist_ok=True)
    path = held / f"stranger-{gpu}-{pid}.json"
    _replace(path, {"gpu": gpu, "mib": mib, "pid": pid, "process_name": process_name, "stranger": True})
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
        part = machine.find_slice(name)
        size = gpu["memory.total"] if part is None else str(part.mib)
        total = int(size) if size.isdigit() else None
        place = gpu["index"] if part is None else part.uuid
        used = sum(
            holder.mib
            for holder in current_holders(directory)
            if (holder.gpu == place if part is not None else machine.find(holder.gpu) is gpu)
        )
        if total is not None and used + self._knobs.gpu_mib > total:
            return (
                f"Free memory on device cuda:{name} ({(total - used) / 1024:.2f}/{total / 1024:.2f} GiB) on startup "
                f"is less than desired GPU memory utilization (0.9, {self._knobs.gpu_mib / 1024:.2f} GiB)."
            )
        held = directory / "held"
        held.mkdir(parents=True, exist_ok=True)
        record = {
            "gpu": place,
            "mib": self._knobs.gpu_mib,
            "pid": os.getpid(),
            "release": self._knobs.gpu_release,
        }
        # Locked before it is visible, else a reader between the two would take the holder for dead.
        hidden = held / f".{os.getpid()}-{place}"
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)
        hidden.rename(held / f"{place}-{os.getpid()}.json")
        self._locks.append(descriptor)
        return None
