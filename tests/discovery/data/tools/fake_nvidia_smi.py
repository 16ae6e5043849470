#!/usr/bin/env python3
"""Replay a recorded nvidia-smi.

A case is a folder with case.json (see README.md). The case is taken from
--case DIR, or from the environment variable FAKE_NVIDIA_SMI_CASE.
Everything after "--" (or all arguments when the variable is used) is what the
caller passed to nvidia-smi. A request the case cannot answer ends with exit
code 99 and a line on stderr, so a test sees it at once.
"""

import json
import os
import pathlib
import signal
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent

ALIAS = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "gpu_serial": "serial",
}
APP_ALIAS = {"name": "process_name", "used_memory": "used_gpu_memory"}
APP_FIELDS = ["timestamp", "gpu_name", "gpu_bus_id", "gpu_serial", "gpu_uuid", "pid", "process_name", "used_gpu_memory"]
UNIT_PREFIX = [
    ("memory.", "MiB"),
    ("protected_memory.", "MiB"),
    ("used_gpu_memory", "MiB"),
    ("utilization.", "%"),
    ("fan.speed", "%"),
    ("power.management", None),
    ("power.", "W"),
    ("enforced.power", "W"),
    ("module.power", "W"),
    ("module.enforced", "W"),
    ("clocks.", "MHz"),
]


def unit_of(field):
    for prefix, unit in UNIT_PREFIX:
        if field.startswith(prefix):
            return unit
    return None


def out(text):
    sys.stdout.write(text)
    sys.stdout.flush()


def give_up(why):
    sys.stderr.write(f"fake_nvidia_smi: {why}\n")
    raise SystemExit(99)


class Case:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.data = json.loads((self.folder / "case.json").read_text())
        self.gpus = self.data.get("gpus", [])
        sets = json.loads((HERE / "known_fields.json").read_text())
        self.known = set(sets[self.data.get("field_set", "595")])

    def text(self, name):
        path = self.folder / name
        return path.read_text() if path.exists() else None


def table(fields, rows, fmt, header):
    lines = []
    if "noheader" not in fmt:
        lines.append(", ".join(header))
    for row in rows:
        cells = []
        for field, value in zip(fields, row, strict=False):
            unit = unit_of(field)
            if "nounits" in fmt and unit and value.endswith(" " + unit):
                value = value[: -len(unit) - 1]
            cells.append(value)
        lines.append(", ".join(cells))
    out("".join(line + "\n" for line in lines))


def titles(fields):
    return [f + (f" [{unit_of(f)}]" if unit_of(f) else "") for f in fields]


def bad_field(name):
    out(f'Field "{name}" is not a valid field to query.\n\n')
    raise SystemExit(2)


def pick(case, wanted):
    if wanted is None:
        return case.gpus
    chosen = []
    for token in wanted.split(","):
        for gpu in case.gpus:
            bus = gpu.get("pci.bus_id", "").lower()
            if token == gpu.get("index") or token == gpu.get("uuid") or (":" in token and bus.endswith(token.lower())):
                chosen.append(gpu)
                break
        else:
            out("No devices were found\n")
            raise SystemExit(6)
    return chosen


def query_gpu(case, names, fmt, wanted):
    fields = []
    for raw in names.split(","):
        field = ALIAS.get(raw.strip(), raw.strip())
        if field not in case.known:
            bad_field(raw.strip())
        fields.append(field)
    rows = [[g.get(f, "[N/A]") for f in fields] for g in pick(case, wanted)]
    errors = case.data.get("row_errors", {})
    sys.stderr.write(errors.get("stderr", ""))
    sys.stderr.flush()
    out(errors.get("stdout_before", ""))
    table(fields, rows, fmt, titles(fields))
    raise SystemExit(errors.get("rc", 0))


def query_apps(case, names, fmt, wanted):
    fields = []
    for raw in names.split(","):
        field = APP_ALIAS.get(raw.strip(), raw.strip())
        if field not in APP_FIELDS:
            bad_field(raw.strip())
        fields.append(field)
    allowed = {g.get("uuid") for g in pick(case, wanted)}
    rows = []
    for proc in case.data.get("processes", []):
        if proc["gpu_uuid"] not in allowed:
            continue
        gpu = next(g for g in case.gpus if g["uuid"] == proc["gpu_uuid"])
        full = {
            "timestamp": "2026/07/03 08:33:53.650",
            "gpu_name": gpu.get("name", "[N/A]"),
            "gpu_bus_id": gpu.get("pci.bus_id", "[N/A]"),
            "gpu_serial": gpu.get("serial", "[N/A]"),
        }
        full.update(proc)
        rows.append([full.get(f, "[N/A]") for f in fields])
    table(fields, rows, fmt, titles(fields))
    errors = case.data.get("row_errors", {})
    sys.stderr.write(errors.get("stderr", ""))
    raise SystemExit(errors.get("rc", 0))


def list_gpus(case):
    errors = case.data.get("row_errors", {})
    text = case.text("list.txt")
    if text is None:
        text = "".join("GPU {}: {} (UUID: {})\n".format(g["index"], g["name"], g["uuid"]) for g in case.gpus)
    sys.stderr.write(errors.get("stderr", ""))
    out(text)
    raise SystemExit(errors.get("rc", 0))


def xml(case):
    recorded = case.text("query.xml")
    out(recorded if recorded is not None else "<nvidia_smi_log></nvidia_smi_log>\n")


def main():
    args = sys.argv[1:]
    folder = os.environ.get("FAKE_NVIDIA_SMI_CASE")
    if args[:1] == ["--case"]:
        folder, args = args[1], args[2:]
        if args[:1] == ["--"]:
            args = args[1:]
    if not folder:
        give_up("no case given")
    case = Case(folder)
    log = os.environ.get("FAKE_NVIDIA_SMI_LOG")
    if log:
        with open(log, "a") as handle:
            handle.write(json.dumps(args) + "\n")
    if case.data.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if case.data.get("partial_stdout"):
        out(case.data["partial_stdout"])
    if case.data.get("hang"):
        # capped, so that a leaked process does not stay for ever
        time.sleep(float(os.environ.get("FAKE_NVIDIA_SMI_MAX_HANG", "120")))
        raise SystemExit(1)
    time.sleep(case.data.get("delay_s", 0))
    fail = case.data.get("fail")
    if fail:
        sys.stderr.write(fail.get("stderr", ""))
        out(fail.get("stdout", ""))
        raise SystemExit(fail["rc"])

    names = apps = wanted = None
    fmt, flags, rest = "", [], []
    i = 0
    while i < len(args):
        arg = args[i]
        key, _, value = arg.partition("=")
        if key in ("--query-gpu", "--query-compute-apps", "--format", "-i", "--id"):
            if not value:
                i += 1
                value = args[i] if i < len(args) else ""
            if key == "--query-gpu":
                names = value
            elif key == "--query-compute-apps":
                apps = value
            elif key == "--format":
                fmt = value
            else:
                wanted = value
        elif arg.startswith("-"):
            flags.append(arg)
        else:
            rest.append(arg)
        i += 1

    if names is not None or apps is not None:
        if "csv" not in fmt.split(","):
            give_up("--query-* needs --format=csv")
        (query_gpu if names is not None else query_apps)(
            case, names if names is not None else apps, fmt.split(","), wanted
        )
    elif flags and set(flags) <= {"-L", "--list-gpus"}:
        list_gpus(case)
    elif {"-q", "-x"} <= set(flags):
        xml(case)
    elif rest[:1] == ["topo"] and "-m" in flags:
        text = case.text("topo.txt")
        if text is None:
            give_up("this case has no topo.txt")
        out(text)
    elif flags == ["--version"]:
        v = case.data["driver_version"]
        out(
            "NVIDIA-SMI version  : {}\nNVML version        : {}\nDRIVER version      : {}\n"
            "CUDA Version        : {}\n".format(v, ".".join(v.split(".")[:2]), v, case.data.get("cuda_version", "N/A"))
        )
    elif "--help-query-gpu" in flags:
        out('List of valid properties to query for the switch "--query-gpu":\n')
        for field in sorted(case.known):
            out(f'\n"{field}"\n(description left out)\n')
    else:
        give_up(f"no recorded reply for {args!r}")


if __name__ == "__main__":
    main()
