"""`llmgw-fake-nvidia-smi`: answers nvidia-smi's queries from the directory that the fake engines hold memory in.

Called as `nvidia-smi` (see `--fake-install`) it takes the real program's arguments. Its own commands:

- `--fake-install DIR [--fake-gpu-dir DIR]` writes an executable `nvidia-smi` into DIR, to be put first in PATH;
- `--fake-hold GPU MIB [PID]` notes memory held by a stranger; `--fake-drop GPU` takes that away.

`gpus.json` describes the machine, see `llmgw.fake.gpu.Machine`: slices, vGPUs, NVLink groups, ECC errors, recovery
actions, adapters. Its `behaviour` makes nvidia-smi misbehave:

- `fail`: one of FAILURES, with that program's text and exit code;
- `hang`: seconds to hang, ignoring SIGTERM; `delay`: seconds before each answer;
- `partial`: write only so many bytes of the answer (then hang, if `hang` is set); `garbage`: random bytes instead;
  `flood`: write so many MiB of lines that mean nothing instead;
- `only`: list of the calls that all of the above is for, by their names in CALLS; without it: every call;
- `lost`: list of GPU indexes that have dropped off: their rows are missing, a line says so (on stderr with
  `lost_on_stderr`), exit code `lost_code`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from llmgw.fake import gpu
from llmgw.fake.loop import write_all

FAILURES = {
    "no_driver": (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
        "NVIDIA driver is installed and running.\n\n",
        9,
    ),
    "library_missing": (
        "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display "
        "Driver is properly installed and present in your system.\nPlease also try adding directory that contains "
        "libnvidia-ml.so to your system PATH.\n",
        12,
    ),
    "driver_mismatch": ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580\n", 18),
    "unknown_error": ("Failed to initialize NVML: Unknown Error\n", 255),
    "no_permission": ("Failed to initialize NVML: Insufficient Permissions\n", 4),
    "version_mismatch": ("Mismatch in versions between nvidia-smi and NVML.\nUse the same for both.\n", 255),
    "no_devices": ("No devices were found\n", 6),
}  # fmt: skip

UNITS = {"memory": "MiB", "used_gpu_memory": "MiB", "power": "W", "utilization": "%", "clocks": "MHz"}
ALIASES = {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id", "gpu_serial": "serial"}
COMPUTED = ("memory.used", "memory.free")
APP_FIELDS = ("timestamp", "gpu_name", "gpu_bus_id", "gpu_serial", "gpu_uuid", "pid", "process_name", "used_gpu_memory")
APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}

CALLS = ("gpus", "processes", "recovery", "list", "topology", "xml", "other")
"""What a call asks for: rows of cards, of compute processes, of recovery actions, `-L`, `topo -m`, `-q -x`."""

LOST_KEEPS = ("index", "uuid", "pci.bus_id")
"""Fields that a card which is lost still has in its row."""

Rows = list[list[str]]


class Answer(Exception):
    """What to print and the exit code."""

    def __init__(self, text: str, code: int = 0, errors: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.code = code
        self.errors = errors


class Query:
    """The real program's arguments."""

    def __init__(self, argv: list[str]) -> None:
        self.fields: dict[str, str] = {}
        self.flags: set[str] = set()
        self.words: list[str] = []
        words = iter(argv)
        for word in words:
            name, equals, value = word.partition("=")
            name = {"-i": "--id"}.get(name, name)
            if name in ("--query-gpu", "--query-compute-apps", "--format", "--id"):
                self.fields[name] = value if equals else next(words, "")
            elif word.startswith("-"):
                self.flags.add(word)
            else:
                self.words.append(word)

    @property
    def call(self) -> str:
        """Which of CALLS this is."""
        if "--query-gpu" in self.fields:
            return "recovery" if "gpu_recovery_action" in self.fields["--query-gpu"] else "gpus"
        if "--query-compute-apps" in self.fields:
            return "processes"
        if self.flags & {"-L", "--list-gpus"}:
            return "list"
        if self.words[:1] == ["topo"] and "-m" in self.flags:
            return "topology"
        return "xml" if {"-q", "-x"} <= self.flags else "other"

    @property
    def format(self) -> list[str]:
        return [word.strip() for word in self.fields.get("--format", "").split(",")]


class Report:
    """Answers a query about one machine."""

    def __init__(self, machine: gpu.Machine) -> None:
        self._machine = machine
        lost = machine.behaviour.get("lost", [])
        self._lost = {str(index) for index in lost} if isinstance(lost, list) else set()
        self._holders = gpu.current_holders(machine.directory)
        for card in machine.gpus:
            used = sum(holder.mib for holder in self._holders if machine.find(holder.gpu) is card)
            reserved = int(card["memory.reserved"]) if card["memory.reserved"].isdigit() else 0
            if card["memory.total"].isdigit():
                card.setdefault("memory.used", str(used))
                card.setdefault("memory.free", str(max(0, int(card["memory.total"]) - reserved - used)))
            state = machine.states.get(card["index"])
            if state == "lost":
                card.update({name: "[GPU is lost]" for name in card if name not in LOST_KEEPS})
            elif state == "requires_reset":
                card.update({name: "[GPU requires reset]" for name in card if name.startswith("memory.")})

    def answer(self, query: Query) -> Answer:
        call = query.call
        if call in ("gpus", "recovery"):
            text = self._query_gpu(query)
        elif call == "processes":
            text = self._query_apps(query)
        elif call == "list":
            text = self._list(query)
        elif call == "topology":
            text = self._topology()
        elif call == "xml":
            text = self._xml()
        elif "--version" in query.flags:
            version = self._machine.driver_version
            text = f"NVIDIA-SMI version  : {version}\nDRIVER version      : {version}\n"
        elif not query.flags and not query.words:
            text = f"NVIDIA-SMI {self._machine.driver_version}  CUDA Version: {self._machine.cuda_version}\n"
        else:
            bad = next(iter(sorted(query.flags)), "") or query.words[0]
            return Answer(f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help. ({bad})\n", 2)
        if not self._lost:
            return Answer(text)
        lines = "".join(
            f"Unable to determine the device handle for GPU{card['index']}: {card['pci.bus_id'][4:]}: Unknown Error\n"
            for card in self._machine.gpus
            if card["index"] in self._lost
        )
        code = self._machine.behaviour.get("lost_code", 0)
        exit_code = code if isinstance(code, int) else 0
        if self._machine.behaviour.get("lost_on_stderr"):
            return Answer(text, exit_code, lines)
        return Answer(lines + text, exit_code)

    def _cards(self, query: Query) -> list[dict[str, str]]:
        cards = [card for card in self._machine.gpus if card["index"] not in self._lost]
        wanted = query.fields.get("--id")
        if wanted is None:
            return cards
        chosen = []
        for token in wanted.split(","):
            found = [
                card
                for card in cards
                if token in (card["index"], card["uuid"])
                or (":" in token and card["pci.bus_id"].lower().endswith(token.lower()))
            ]
            if not found:
                raise Answer("No devices were found\n", 6)
            chosen += found
        return chosen

    def _query_gpu(self, query: Query) -> str:
        known = set(gpu.default_gpu(0)) | {"driver_version", *COMPUTED}
        for card in self._machine.gpus:
            known |= card.keys()
        known -= set(self._machine.unknown_fields)
        names = self._names(query.fields["--query-gpu"], ALIASES, known)
        rows = [[card.get(name, "[N/A]") for name in names] for card in self._cards(query)]
        return _table(names, rows, query.format)

    def _query_apps(self, query: Query) -> str:
        names = self._names(query.fields["--query-compute-apps"], APP_ALIASES, set(APP_FIELDS))
        cards = self._cards(query)
        rows = []
        for holder in self._holders:
            card = self._machine.find(holder.gpu)
            if card is None or card not in cards:
                continue
            full = {
                "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
                "gpu_name": card["name"],
                "gpu_bus_id": card["pci.bus_id"],
                "gpu_serial": card["serial"],
                "gpu_uuid": card["uuid"],
                "pid": str(holder.pid),
                "process_name": holder.process_name,
                "used_gpu_memory": str(holder.mib),
            }
            rows.append([full[name] for name in names])
        return _table(names, rows, query.format)

    @staticmethod
    def _names(text: str, aliases: dict[str, str], known: set[str]) -> list[str]:
        """The canonical fields; the first that is unknown fails the whole query, as with the real program."""
        names = []
        for raw in text.split(","):
            name = aliases.get(raw.strip(), raw.strip())
            if name not in known:
                raise Answer(f'Field "{raw.strip()}" is not a valid field to query.\n\n', 2)
            names.append(name)
        return names

    def _list(self, query: Query) -> str:
        lines = []
        for card in self._cards(query):
            lines.append(f"GPU {card['index']}: {card['name']} (UUID: {card['uuid']})")
            lines += [
                f"  MIG {one.profile:<11} Device {one.device:>2}: (UUID: {one.uuid})"
                for one in self._machine.slices
                if one.card is card
            ]
        return "".join(line + "\n" for line in lines)

    def _topology(self) -> str:
        machine = self._machine
        indexes = [card["index"] for card in machine.gpus if card["index"] not in self._lost]
        names = [f"GPU{index}" for index in indexes] + [f"NIC{number}" for number in range(len(machine.nics))]
        head = "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
        # The real program underlines the head also when nobody sees it.
        lines = [f"\t\x1b[4m{head}\x1b[0m"]
        for index in indexes:
            links = [machine.link(index, other) for other in indexes]
            links += [machine.nic_link(nic, index) for nic in machine.nics]
            cells = [" X " if link == "X" else link for link in links]
            lines.append("\t".join([f"GPU{index}", *cells, "0-51", machine.numa(index), "", "N/A"]))
        lines += ["", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of # NVLinks"]
        if machine.nics:
            lines += ["", "NIC Legend:", "", *(f"  NIC{number}: {nic}" for number, nic in enumerate(machine.nics))]
        return "\n".join(lines) + "\n"

    def _xml(self) -> str:
        machine = self._machine
        cards = [card for card in machine.gpus if card["index"] not in self._lost]
        parts = [
            '<?xml version="1.0" ?>',
            '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">',
            "<nvidia_smi_log>",
            f"\t<driver_version>{machine.driver_version}</driver_version>",
            f"\t<cuda_version>{machine.cuda_version}</cuda_version>",
            f"\t<attached_gpus>{len(cards)}</attached_gpus>",
        ]
        for card in cards:
            memory = "".join(
                f"<{part}>{_size(card.get('memory.' + part, '[N/A]'))}</{part}>"
                for part in ("total", "reserved", "used", "free")
            )
            parts += [
                f'\t<gpu id="{card["pci.bus_id"]}">',
                f"\t\t<product_name>{card['name']}</product_name>",
                f"\t\t<uuid>{card['uuid']}</uuid>",
                *self._xml_slices(card),
                f"\t\t<fb_memory_usage>{memory}</fb_memory_usage>",
                "\t</gpu>",
            ]
        return "\n".join([*parts, "</nvidia_smi_log>", ""])

    def _xml_slices(self, card: dict[str, str]) -> list[str]:
        slices = [one for one in self._machine.slices if one.card is card]
        if not slices:
            return ["\t\t<mig_devices>\n\t\t\tNone\n\t\t</mig_devices>"]
        lines = ["\t\t<mig_devices>"]
        for one in slices:
            used = sum(holder.mib for holder in self._holders if holder.gpu == one.uuid)
            size = "N/A" if one.mib is None else f"{one.mib} MiB"
            lines += [
                "\t\t\t<mig_device>",
                f"\t\t\t\t<index>{one.device}</index>",
                f"\t\t\t\t<fb_memory_usage><total>{size}</total><used>{used} MiB</used></fb_memory_usage>",
                "\t\t\t</mig_device>",
            ]
        return [*lines, "\t\t</mig_devices>"]


def _size(value: str) -> str:
    return f"{value} MiB" if value.isdigit() else value.strip("[]")


def _unit(name: str) -> str:
    return UNITS.get(name, UNITS.get(name.partition(".")[0], ""))


def _table(names: list[str], rows: Rows, form: list[str]) -> str:
    if "csv" not in form:
        raise Answer("--query-* switches need --format=csv\n", 2)
    lines = []
    if "noheader" not in form:
        lines.append(", ".join(f"{name} [{_unit(name)}]" if _unit(name) else name for name in names))
    for row in rows:
        cells = []
        for name, value in zip(names, row, strict=True):
            with_unit = _unit(name) and "nounits" not in form and not value.startswith("[")
            cells.append(f"{value} {_unit(name)}" if with_unit else value)
        lines.append(", ".join(cells))
    return "".join(line + "\n" for line in lines)


def run(argv: list[str]) -> int:
    directory = gpu.directory_from_environment()
    if argv and argv[0].startswith("--fake-"):
        return _own_command(argv, directory)
    machine = gpu.Machine(directory)
    query = Query(argv)
    behaviour = machine.behaviour
    only = behaviour.get("only")
    if isinstance(only, list) and query.call not in only:
        behaviour = {}
    hang = float(str(behaviour.get("hang", 0)))
    if hang:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(float(str(behaviour.get("delay", 0))))
    try:
        answer = _failure(behaviour) or Report(machine).answer(query)
    except Answer as refused:
        answer = refused
    data = answer.text.encode()
    if behaviour.get("garbage"):
        data = os.urandom(4096)
    if "flood" in behaviour:
        data = b"0, what is this\n" * (int(str(behaviour["flood"])) << 16)
    if "partial" in behaviour:
        data = data[: int(str(behaviour["partial"]))]
    if not hang or "partial" in behaviour:
        write_all(2, answer.errors.encode())
        write_all(1, data)
    time.sleep(hang)
    return answer.code


def _failure(behaviour: dict[str, object]) -> Answer | None:
    name = behaviour.get("fail")
    return Answer(*FAILURES[str(name)]) if name else None


def _own_command(argv: list[str], directory: Path | None) -> int:
    commands: dict[str, Callable[[list[str], Path | None], None]] = {
        "--fake-install": _install,
        "--fake-hold": _hold,
        "--fake-drop": _drop,
    }
    command = commands.get(argv[0])
    if command is None or len(argv) < 2:
        sys.stderr.write(__doc__ or "")
        return 2
    try:
        command(argv[1:], directory)
    except (ValueError, IndexError, OSError) as error:
        sys.stderr.write(f"llmgw-fake-nvidia-smi: cannot do {argv[0]}: {error}\n")
        return 2
    return 0


def _install(argv: list[str], directory: Path | None) -> None:
    import shlex

    target = Path(argv[0])
    target.mkdir(parents=True, exist_ok=True)
    if argv[1:2] == ["--fake-gpu-dir"]:
        directory = Path(argv[2])
    setting = f"FAKE_GPU_DIR={shlex.quote(str(directory.absolute()))} " if directory is not None else ""
    program = target / "nvidia-smi"
    # The package may not be installed where the wrapper is called from, so its place is written down.
    place = shlex.quote(str(Path(__file__).resolve().parents[2]))
    program.write_text(
        f'#!/bin/sh\n{setting}PYTHONPATH={place} exec {shlex.quote(sys.executable)} -m llmgw.fake.nvidia_smi "$@"\n'
    )
    program.chmod(0o755)


def _hold(argv: list[str], directory: Path | None) -> None:
    if directory is None:
        raise ValueError("FAKE_GPU_DIR is not set")
    pid = int(argv[2]) if len(argv) > 2 else 4190001
    gpu.write_stranger(directory, argv[0], int(argv[1]), pid, "/opt/stranger/bin/train, and more")


def _drop(argv: list[str], directory: Path | None) -> None:
    if directory is None:
        raise ValueError("FAKE_GPU_DIR is not set")
    for path in (directory / "held").glob(f"stranger-{argv[0]}-*.json"):
        path.unlink()


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
