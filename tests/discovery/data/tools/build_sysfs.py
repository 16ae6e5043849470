#!/usr/bin/env python3
"""Lay out a sysfs-like tree from a fabric case.

    build_sysfs.py CASE_DIR TARGET_DIR [--einval auto|proc|dir]

TARGET_DIR becomes the stand-in for /sys (class/infiniband, class/net,
devices/...). Devices are real folders under devices/, class entries are
symlinks, as on a host. A null in tree.json stands for a file whose read()
fails with EINVAL: as root a link to /proc/self/clear_refs gives exactly that;
otherwise a folder in place of the file (the open fails with EISDIR).
"""

import argparse
import json
import os
import pathlib


def write(path, value, einval):
    path.parent.mkdir(parents=True, exist_ok=True)
    if value is None:
        if einval == "proc":
            path.symlink_to("/proc/self/clear_refs")
        else:
            path.mkdir()
    elif isinstance(value, dict):  # {"raw": "..."}: no newline added
        path.write_text(value["raw"])
    else:
        path.write_text(value + "\n")


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def build(case_dir, target, einval="auto"):
    tree = json.loads((pathlib.Path(case_dir) / "tree.json").read_text())
    root = pathlib.Path(target)
    root.mkdir(parents=True, exist_ok=True)
    if einval == "auto":
        usable = os.geteuid() == 0 and os.path.exists("/proc/self/clear_refs")
        einval = "proc" if usable else "dir"
    if tree.get("class_dir", True):
        (root / "class" / "infiniband").mkdir(parents=True)
    (root / "class" / "net").mkdir(parents=True)
    for dev in tree["devices"]:
        name = dev["name"]
        entry = root / "class" / "infiniband" / name
        if dev.get("dangling"):
            entry.symlink_to("../../devices/pci0000:00/gone/infiniband/" + name)
            continue
        bdf = dev.get("pci")
        if bdf:
            bridge = dev.get("bridge", f"pci{bdf[:7]}")
            home = root / "devices" / bridge / bdf
        else:
            home = root / "devices" / "virtual"
        ib = home / "infiniband" / name
        ib.mkdir(parents=True)
        link(entry, ib)
        if bdf:
            link(ib / "device", home)
            for key in ("numa_node", "vendor", "device"):
                if key in dev:
                    write(home / key, str(dev[key]), einval)
            if "driver" in dev:
                drv = root / "bus" / "pci" / "drivers" / dev["driver"]
                drv.mkdir(parents=True, exist_ok=True)
                link(home / "driver", drv)
            if "physfn" in dev:
                pf = root / "devices" / bridge / dev["physfn"]
                pf.mkdir(parents=True, exist_ok=True)
                link(home / "physfn", pf)
        for key, value in dev.get("files", {}).items():
            write(ib / key, value, einval)
        for number, port in dev.get("ports", {}).items():
            base = ib / "ports" / number
            base.mkdir(parents=True)
            for key, value in port.get("files", {}).items():
                write(base / key, value, einval)
            for group, folder in (
                ("gids", "gids"),
                ("types", "gid_attrs/types"),
                ("ndevs", "gid_attrs/ndevs"),
                ("pkeys", "pkeys"),
            ):
                for key, value in port.get(group, {}).items():
                    write(base / folder / key, value, einval)
    for net in tree.get("net", []):
        home = root / "devices" / net.get("at", "virtual") / "net" / net["name"]
        home.mkdir(parents=True)
        link(root / "class" / "net" / net["name"], home)
        for key, value in net.get("files", {}).items():
            write(home / key, value, einval)
        if net.get("device"):
            link(home / "device", root / "devices" / net["at"])
    for path, text in tree.get("proc", {}).items():
        write(root.parent / "proc" / path, {"raw": text}, einval)
    return root


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("target")
    parser.add_argument("--einval", choices=["auto", "proc", "dir"], default="auto")
    ns = parser.parse_args()
    print(build(ns.case, ns.target, ns.einval))
