"""`llmgw inventory` as its users and their scripts see it: every recorded node through the real command."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from schema_check import faults
from scripted_control import ControlServer, a_shard, a_status, environment, llmgw

from llmgw.cli import inventory
from llmgw.cli.main import main
from llmgw.discovery.inventory_json import read_node
from llmgw.discovery.pci import has_nvidia_card

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "tests/discovery/data"
SCHEMA = json.loads((REPOSITORY / "docs/reference/inventory.schema.json").read_text())
EXPECTATIONS = json.loads((DATA / "expected.schema.json").read_text())["$defs"]

GPU_CASES = sorted(path.name for path in (DATA / "gpu").iterdir() if path.is_dir())
FABRIC_CASES = sorted(path.name for path in (DATA / "fabric").iterdir() if path.is_dir())
ISLAND_CASES = sorted(path.name for path in (DATA / "islands").glob("*.json"))
FAILING = {"driver-mismatch", "nvml-library-missing", "hang"}
"""Nodes whose GPUs are there and cannot be read. Those without command or driver have no card in what is read."""
NOT_PRINTED = {"needs_retry_without", "tp_group_of_both_allowed", "note", "notes"}

NO_CARD = pytest.mark.skipif(has_nvidia_card(), reason="a host without a card is needed")


def differences(found: Any, expected: Any, place: str = "") -> Iterator[str]:
    """Where keys that the expectation has differ; flags are a set."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            if key in NOT_PRINTED:
                continue
            if not isinstance(found, dict) or key not in found:
                yield f"{place}.{key} is missing"
            else:
                yield from differences(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list) and place.endswith("health_flags"):
        if set(found) != set(expected):
            yield f"{place}: {found} is not {expected}"
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, f"{place}[{n}]")
    elif found != expected:
        yield f"{place}: {found!r} is not {expected!r}"


def keys_beside(answer: dict[str, Any]) -> Iterator[str]:
    """Places of keys `gpus` or `ports` where none may be: the first in `gpu`, the second in `fabric` and in its
    fabrics."""

    def below(value: Any, place: str) -> Iterator[str]:
        if isinstance(value, dict):
            for key, entry in value.items():
                if key in ("gpus", "ports"):
                    yield f"{place}.{key}"
                yield from below(entry, f"{place}.{key}")
        elif isinstance(value, list):
            for entry in value:
                yield from below(entry, f"{place}[]")

    allowed = {".gpu.gpus", ".fabric.ports", ".fabric.fabrics[].ports"}
    yield from (place for place in below(answer, "") if place not in allowed)


def one_object(stdout: str) -> dict[str, Any]:
    """The answer, which is one object on one line; it has the documented form and reads back."""
    assert stdout.endswith("\n") and stdout.count("\n") == 1
    answer: dict[str, Any] = json.loads(stdout)
    assert list(faults(answer, SCHEMA, SCHEMA)) == []
    assert list(keys_beside(answer)) == []
    assert set(EXPECTATIONS["gpu_case"]["properties"]) - NOT_PRINTED <= set(answer["gpu"])
    assert set(EXPECTATIONS["fabric_case"]["properties"]) - NOT_PRINTED <= set(answer["fabric"])
    gpu_keys = set(EXPECTATIONS["gpu"]["properties"]) - NOT_PRINTED
    assert all(gpu_keys <= set(gpu) for gpu in answer["gpu"]["gpus"])
    port = EXPECTATIONS["port"]
    for entry in answer["fabric"]["ports"]:
        assert set(port["required"]) <= set(entry) <= set(port["properties"])
    read_node(answer)
    return answer


def alone(tmp_path: Path, **changes: str) -> dict[str, str]:
    """An environment in which no configuration, no llmgw and no records of the tester are found."""
    (tmp_path / "home").mkdir(exist_ok=True)
    folder = str(tmp_path / "home")
    return environment(HOME=folder, XDG_RUNTIME_DIR=folder, XDG_STATE_HOME=folder, XDG_CONFIG_HOME=folder, **changes)


def gpu_words(case: str) -> list[str]:
    folder = DATA / "gpu" / case
    words = ["--nvidia-smi", str(folder / "bin/nvidia-smi")]
    return [*words, "--meminfo", str(folder / "meminfo")] if (folder / "meminfo").exists() else words


@pytest.fixture
def build_sysfs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DATA / "tools"))
    return import_module("build_sysfs").build


def fabric_words(case: str, tmp_path: Path, build: Any) -> list[str]:
    folder = DATA / "fabric" / case
    build(folder, tmp_path / "sys")
    addresses = tmp_path / "addresses.json"
    addresses.write_text(json.dumps(json.loads((folder / "tree.json").read_text()).get("addresses", {})))
    return ["--sysfs", str(tmp_path / "sys"), "--addresses", str(addresses)]


# -- recorded nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in GPU_CASES if case != "hang"])
def test_recorded_gpus_are_told_as_they_are(case: str, tmp_path: Path) -> None:
    expected = json.loads((DATA / "gpu" / case / "expected.json").read_text())
    done = llmgw("inventory", "--json", *gpu_words(case), env=alone(tmp_path))
    answer = one_object(done.stdout)
    assert list(differences(answer["gpu"], expected)) == []
    assert done.returncode == (1 if case in FAILING else 0)
    assert (answer["api"], answer["source"]) == (1, "local")
    # What is not offered is not read: nothing of this host's adapters, devices and limits.
    assert answer["fabric"]["ports"] == [] and answer["fabric"]["multi_node"] is False
    assert answer["host"]["shm_total_mib"] is None and answer["host"]["nvidia_uvm"] is None
    for gpu in answer["gpu"]["gpus"]:
        assert gpu["assignable"] is (gpu["why_not"] is None)
        assert [holder["pid"] for holder in gpu["holders"]] == [pid for pid, _ in gpu["processes"]]


def test_an_nvidia_smi_that_hangs_ends_the_survey_and_leaves_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inventory, "PATIENCE", 1.0)
    assert main(["inventory", "--json", *gpu_words("hang")]) == 1
    shown = capsys.readouterr()
    expected = json.loads((DATA / "gpu/hang/expected.json").read_text())
    assert list(differences(one_object(shown.out)["gpu"], expected)) == []
    assert "cannot read the GPUs" in shown.err


@pytest.mark.parametrize("case", FABRIC_CASES)
def test_recorded_adapters_are_told_as_they_are(case: str, tmp_path: Path, build_sysfs: Any) -> None:
    expected = json.loads((DATA / "fabric" / case / "expected.json").read_text())
    done = llmgw("inventory", "--json", *fabric_words(case, tmp_path, build_sysfs), env=alone(tmp_path))
    answer = one_object(done.stdout)
    assert list(differences(answer["fabric"], expected)) == []
    assert done.returncode == 0
    # Only the adapters were offered, so no nvidia-smi of this host was asked.
    assert answer["gpu"]["error_kind"] == "command_missing"


@pytest.mark.parametrize("case", ISLAND_CASES)
def test_recorded_nodes_form_the_islands_that_they_should(case: str, tmp_path: Path) -> None:
    found = json.loads((DATA / "islands" / case).read_text())
    empty = json.loads(llmgw("inventory", "--json", *gpu_words("command-missing"), env=alone(tmp_path)).stdout)
    files = []
    for node in found["nodes"]:
        path = tmp_path / f"{node['node']}.json"
        path.write_text(
            json.dumps({**empty, "node": node["node"], "fabric": {**empty["fabric"], "fabrics": node["fabrics"]}})
        )
        files.append(str(path))
    done = llmgw("inventory", *files, "--json", env=alone(tmp_path))
    assert done.returncode == 0
    islands = {frozenset(island) for island in json.loads(done.stdout)["islands"]}
    assert islands == {frozenset(island) for island in found["expected_islands"]}
    shown = llmgw("inventory", *files, env=alone(tmp_path)).stdout
    assert all(node["node"] in shown for node in found["nodes"])


def test_gpus_and_adapters_of_one_call_belong_together(tmp_path: Path, build_sysfs: Any) -> None:
    words = [*gpu_words("h100-sxm-8x"), *fabric_words("h100-8x-ndr-plus-bond", tmp_path, build_sysfs)]
    answer = one_object(llmgw("inventory", "--json", *words, env=alone(tmp_path)).stdout)
    assert len(answer["gpu"]["gpus"]) == 8 and answer["fabric"]["nccl_ib_hca"].startswith("=mlx5_0:1,")
    assert answer["gpu"]["topology"]["nvlink_sets"] == [list(range(8))]


# -- exit codes and inputs ---------------------------------------------------------------------------------


def with_card(tmp_path: Path) -> Path:
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    return tmp_path / "sys"


@pytest.mark.parametrize("case", ["command-missing", "no-driver"])
def test_a_card_without_its_driver_is_a_failure_and_a_host_without_a_card_is_none(case: str, tmp_path: Path) -> None:
    words = ["inventory", "--json", *gpu_words(case)]
    (tmp_path / "empty").mkdir()
    assert llmgw(*words, "--sysfs", str(tmp_path / "empty"), env=alone(tmp_path)).returncode == 0
    failed = llmgw(*words, "--sysfs", str(with_card(tmp_path)), env=alone(tmp_path))
    assert failed.returncode == 1
    assert one_object(failed.stdout)["gpu"]["status"] == "error"
    assert failed.stderr.startswith("warning: cannot read the GPUs: ")


def test_a_program_that_cannot_be_started_is_a_missing_command(tmp_path: Path) -> None:
    (tmp_path / "no-program").write_text("text")
    for path in (tmp_path / "none", tmp_path / "no-program", tmp_path):
        done = llmgw("inventory", "--json", "--nvidia-smi", str(path), env=alone(tmp_path))
        assert one_object(done.stdout)["gpu"]["error_kind"] == "command_missing"
        assert done.returncode == 0


def test_a_named_nvidia_smi_is_a_file_and_not_looked_for_on_path(tmp_path: Path) -> None:
    env = alone(tmp_path, PATH=f"{DATA / 'gpu/l40s-busy/bin'}:/usr/bin:/bin")
    done = llmgw("inventory", "--json", "--nvidia-smi", "nvidia-smi", env=env, cwd=tmp_path)
    assert one_object(done.stdout)["gpu"]["gpus"] == []


def test_with_offline_inputs_neither_configuration_nor_daemon_is_asked(tmp_path: Path) -> None:
    broken = tmp_path / "llmgw.toml"
    broken.write_text("this is no toml")
    with ControlServer(tmp_path / "s", lambda *_: (500, {})) as server:
        words = ["-s", server.path, "-c", str(broken), "inventory", "--json", *gpu_words("l40s-busy")]
        done = llmgw(*words, env=alone(tmp_path))
        assert server.asked == []
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("option", ["--addresses", "--meminfo"])
def test_an_input_that_cannot_be_read_is_told_and_the_rest_is_shown(option: str, tmp_path: Path) -> None:
    words = ["--nvidia-smi", str(DATA / "gpu/gb10-spark/bin/nvidia-smi"), option, str(tmp_path / "none")]
    done = llmgw("inventory", "--json", *words, env=alone(tmp_path))
    answer = one_object(done.stdout)
    assert done.returncode == 1 and done.stderr.startswith(f"error: cannot read {tmp_path / 'none'}: ")
    assert len(answer["gpu"]["gpus"]) == 1
    if option == "--meminfo":
        # The host's own memory does not stand in for that of another one.
        assert answer["host"]["memory_total_mib"] is None


@pytest.mark.parametrize("text", ["[]", "no json", '{"eth0": "10.0.0.5/24"}', '{"eth0": [1]}', "[" * 100_000])
def test_addresses_of_another_form_are_refused_in_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "addresses.json"
    path.write_text(text)
    done = llmgw("inventory", "--json", "--addresses", str(path), env=alone(tmp_path))
    one_object(done.stdout)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot use {path}: ") and "Traceback" not in done.stderr


@NO_CARD
def test_a_host_without_a_card_has_an_inventory_of_nothing_and_that_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    env = alone(tmp_path, PATH=str(tmp_path / "bin"))
    done = llmgw("inventory", env=env, cwd=tmp_path)
    assert done.returncode == 0
    assert "0 GPUs" in done.stdout
    assert "no GPU: nvidia-smi is not on PATH" in done.stdout
    answer = one_object(llmgw("inventory", "--json", env=env, cwd=tmp_path).stdout)
    assert answer["gpu"]["gpus"] == []
    assert answer["host"]["memory_total_mib"] > 0 and answer["host"]["memlock_soft_bytes"] is not None


@pytest.mark.parametrize("text", [None, "this is no toml"])
def test_a_configuration_that_cannot_be_used_does_not_keep_the_hardware_from_being_shown(
    text: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "some.toml"
    if text is not None:
        path.write_text(text)
    done = llmgw("-c", str(path), "inventory", "--json", env=alone(tmp_path))
    one_object(done.stdout)
    assert done.stderr.startswith("warning: ") and str(path) in done.stderr


# -- the running llmgw -------------------------------------------------------------------------------------


def told(tmp_path: Path, case: str = "l40s-busy") -> dict[str, Any]:
    done = llmgw("inventory", "--json", *gpu_words(case), env=alone(tmp_path))
    return {**json.loads(done.stdout), "source": "daemon", "node": "gpu-01"}


def test_a_running_llmgw_is_asked_and_its_answer_printed(tmp_path: Path) -> None:
    answer = told(tmp_path)
    with ControlServer(tmp_path / "s", lambda *_: (200, answer)) as server:
        done = llmgw("-s", server.path, "inventory", "--json", env=alone(tmp_path))
        assert [path for _, path, _ in server.asked] == ["/v1/inventory"]
    assert one_object(done.stdout) == answer
    assert done.returncode == 0


def test_asking_a_running_llmgw_loads_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from llmgw.cli.main import main; main(sys.argv[1:]); "
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    with ControlServer(tmp_path / "s", lambda *_: (200, told(tmp_path))) as server:
        for words in (["--json"], []):
            done = subprocess.run(
                [sys.executable, "-c", program, "-s", server.path, "inventory", *words],
                capture_output=True, text=True, env=alone(tmp_path), timeout=60, check=True,
            )  # fmt: skip
            loaded = {name.partition(".")[0] for name in done.stderr.splitlines()}
            assert loaded & {"trio", "httpx", "attrs", "attr", "cattrs", "h11", "psutil"} == set()


@pytest.mark.parametrize("answers", [(500, {"error": {"code": "bug", "message": "no"}}), (200, {"api": 1})])
def test_where_the_running_llmgw_has_no_answer_the_command_looks_itself(
    answers: tuple[int, Any], tmp_path: Path
) -> None:
    with ControlServer(tmp_path / "s", lambda *_: answers) as server:
        done = llmgw("-s", server.path, "inventory", "--json", env=alone(tmp_path), cwd=tmp_path)
    assert one_object(done.stdout)["source"] == "local"
    assert "warning: " in done.stderr


def test_where_no_llmgw_runs_at_the_named_socket_the_command_says_so_and_looks_itself(tmp_path: Path) -> None:
    done = llmgw("-s", str(tmp_path / "none"), "inventory", "--json", env=alone(tmp_path), cwd=tmp_path)
    assert one_object(done.stdout)["source"] == "local"
    assert done.stderr.startswith("warning: no llmgw is running here")


# -- for people --------------------------------------------------------------------------------------------


def shown(tmp_path: Path, answer: dict[str, Any], **env: str) -> tuple[str, str, int]:
    with ControlServer(tmp_path / "s", lambda *_: (200, answer)) as server:
        done = llmgw("-s", server.path, "inventory", env=alone(tmp_path, **env))
    (tmp_path / "s").unlink()
    return done.stdout, done.stderr, done.returncode


def test_shards_and_strangers_on_the_cards_are_told_apart(tmp_path: Path) -> None:
    answer = told(tmp_path, "h100-sxm-8x")
    for gpu, holder in zip(answer["gpu"]["gpus"], itertools.chain("aaaab", itertools.repeat(None)), strict=False):
        gpu.update(memory_free_mib=6246, why_not=None, assignable=True, holders=[])
        if holder is not None:
            gpu["holders"] = [
                {"pid": 1, "memory_mib": 9, "user": "u", "command": "VLLM::Worker", "shard": holder, "ours": True}
            ] * 2
    stranger = {"pid": 4411, "memory_mib": 61440, "user": "ann", "command": "python", "shard": None, "ours": False}
    answer["gpu"]["gpus"][7].update(holders=[stranger], why_not="held by pid 4411 python", assignable=False)
    answer["gpu"]["gpus"][6].update(holders=[{**stranger, "ours": None, "user": None, "command": None}])
    lines = shown(tmp_path, answer)[0].splitlines()
    table = [line.split() for line in lines if "h100-80g" in line]
    assert [row[0] for row in table] == ["0-3", "4", "5", "6", "7"]
    assert table[0][-2:] == ["a", "-"] and table[1][-2:] == ["b", "-"] and table[2][-2:] == ["-", "-"]
    assert "pid 4411 60.0 GiB, whose it is cannot be told" in lines[-2]
    assert "pid 4411 60.0 GiB (python, ann), not ours" in lines[-1] and lines[-1].endswith("held by pid 4411 python")


def test_a_shard_that_is_not_ready_yet_is_shown_with_its_state_and_replicas_by_their_names(tmp_path: Path) -> None:
    answer = told(tmp_path)
    holder = {"pid": 1, "memory_mib": None, "user": None, "command": None, "ours": True}
    answer["gpu"]["gpus"][0]["holders"] = [{**holder, "shard": "llama"}, {**holder, "shard": "llama/1"}]
    status = a_status(
        a_shard("llama/0", state="loading"), {**a_shard("llama/1"), "replica": 1}, a_shard("other", state="failed")
    )
    with ControlServer(tmp_path / "s", lambda _, path, __: (200, status if "status" in path else answer)) as server:
        done = llmgw("-s", server.path, "inventory", env=alone(tmp_path))
    assert "llama/0 (loading), llama/1  " in done.stdout


def test_sick_cards_lost_ones_slices_and_other_vendors_are_listed_with_what_is_wrong(tmp_path: Path) -> None:
    sick, _, _ = shown(tmp_path, told(tmp_path, "ecc-and-remap"))
    assert "uncorrected ECC" in sick
    partial, warned, code = shown(tmp_path, told(tmp_path, "gpu-dropped-from-list"))
    assert "GPU 3 at 0000:04:00.0 is lost: reboot" in partial
    assert (warned, code) == ("warning: not all GPUs are there: GPU 3 dropped off\n", 0)
    sliced, _, _ = shown(tmp_path, told(tmp_path, "h100-mig"))
    assert "0:0" in sliced and "h100-mig-3g.40gb" in sliced and "MIG-1a54e0e4" in sliced and "in MIG mode" in sliced
    answer = told(tmp_path, "command-missing")
    answer["gpu"]["other_gpus"] = [
        {"vendor": "amd", "index": 0, "name": "MI300X", "bus_id": "", "memory_total_mib": 196592,
         "memory_used_mib": None, "architecture": None}
    ]  # fmt: skip
    assert "amd 0  MI300X  192.0 GiB  listed only: not placed on yet" in shown(tmp_path, answer)[0]


def test_memory_that_card_and_host_share_is_shown_as_the_hosts(tmp_path: Path) -> None:
    answer = told(tmp_path, "gb10-spark")
    answer["host"]["memory_total_mib"] = 122 * 1024
    assert "122.0 GiB unified" in shown(tmp_path, answer)[0]


def test_older_facts_are_marked_with_their_age_and_are_a_failure(tmp_path: Path) -> None:
    answer = told(tmp_path)
    answer["gpu"]["stale"] = {"error_kind": "timeout", "detail": "nvidia-smi did not end within 20 s", "since": 0.0}
    out, warned, code = shown(tmp_path, answer)
    assert "stale: nvidia-smi has failed for " in out and "nothing new is placed" in out
    assert warned.startswith("warning: these are older facts: ") and code == 1


def test_what_is_not_known_is_a_dash_and_never_zero(tmp_path: Path) -> None:
    answer = told(tmp_path)
    answer["gpu"]["gpus"][0].update(
        memory_total_mib=None, memory_free_mib=None, compute_cap=None, holders=[], **{"class": None}
    )
    row = next(line for line in shown(tmp_path, answer)[0].splitlines() if line.startswith("0 "))
    assert row.split() == ["0", "-", "-", "-", "-", "-", "-"]


def test_adapters_are_shown_with_the_fabric_that_is_used(tmp_path: Path, build_sysfs: Any) -> None:
    words = fabric_words("h100-8x-ndr-plus-bond", tmp_path, build_sysfs)
    out = llmgw("inventory", *words, env=alone(tmp_path)).stdout
    assert "InfiniBand" in out and "400G" in out and "used between nodes" in out
    assert "no GPU: no --nvidia-smi was given" in out


def test_names_from_elsewhere_cannot_steer_the_terminal(tmp_path: Path) -> None:
    answer = told(tmp_path)
    answer["node"] = "gpu\x1b]0;title\x07\u202e"
    answer["gpu"]["gpus"][0]["holders"] = [
        {"pid": 1, "memory_mib": 1, "user": "a\x1b[2J", "command": "x\ny", "shard": None, "ours": False}
    ]
    out = shown(tmp_path, answer)[0]
    assert not set(out) & {"\x1b", "\x07", "\u202e"} and "x\\x0ay" in out
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(answer))
    assert "\x1b" not in llmgw("inventory", str(saved), env=alone(tmp_path)).stdout


# -- saved inventories -------------------------------------------------------------------------------------


def test_a_node_that_comes_twice_is_refused_with_both_files(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text(json.dumps(told(tmp_path)))
    done = llmgw("inventory", str(tmp_path / "one.json"), str(tmp_path / "two.json"), env=alone(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        f"error: cannot use {tmp_path}/two.json: it is of node gpu-01, and so is {tmp_path}/one.json\n"
        "  give each node's newest inventory once\n"
    )


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"api": 2}', "[" * 100_000, "\xff"])
def test_a_file_that_is_no_inventory_is_refused_with_the_way_to_make_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    path.write_bytes(text.encode("latin-1"))
    done = llmgw("inventory", "--json", str(path), env=alone(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: cannot use {path}: ")
    assert done.stderr.endswith("make one with: llmgw inventory --json > FILE\n")


def test_files_and_sources_do_not_go_together(tmp_path: Path) -> None:
    done = llmgw("inventory", "saved.json", "--sysfs", str(tmp_path), env=alone(tmp_path))
    assert done.returncode == 2 and "saved inventories and a node at once" in done.stderr


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = llmgw("inventory", str(tmp_path / "none.json"), env=alone(tmp_path))
    assert done.returncode == 1 and done.stderr.startswith("error: cannot read ")


def test_the_sample_schema_has_no_key_that_the_command_does_not_print(tmp_path: Path) -> None:
    answer = told(tmp_path, "h100-mig")
    for name in ("gpus", "fabric", "host"):
        there = {"gpus": answer["gpu"], "fabric": answer["fabric"], "host": answer["host"]}[name]
        assert set(SCHEMA["$defs"][name]["properties"]) == set(there)
    assert set(SCHEMA["$defs"]["gpu"]["properties"]) == set(answer["gpu"]["gpus"][0])


def test_the_recorded_nodes_are_there() -> None:
    assert (len(GPU_CASES), len(FABRIC_CASES), len(ISLAND_CASES)) == (14, 9, 3)
