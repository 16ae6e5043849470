"""The shipped unit in a real systemd, with fake engines: as root and as the user llmgw.

One box (sdbox.sh) per user and module, installed by `llmgw install-systemd` itself. Each test begins with the unit
running and both engines ready, whatever the one before it did.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmgw.control import client

pytestmark = [pytest.mark.systemd, pytest.mark.slow]

CHECKOUT = Path(__file__).resolve().parents[2]
SDBOX = Path(__file__).with_name("sdbox.sh")
UNIT = "llmgw.service"
CGROUP = "/sys/fs/cgroup/system.slice/llmgw.service"
PATIENCE = 60.0
"""Seconds for anything in the box: the machine may be busy, and a failure is the exception."""

CONFIG = """\
[gateway]
listen = "unix:/run/llmgw/gateway.sock"

[defaults]
engine = "llamacpp"
gpus = 0
drain_timeout = "0s"
probe_interval = "100ms"

[defaults.llamacpp]
command = ["/opt/llmgw/bin/llmgw-fake-engine", "llamacpp"]

[[shard]]
name = "alpha"
model = "one"
weights = "/share/tiny.gguf"

[[shard]]
name = "beta"
model = "two"
weights = "/share/tiny.gguf"
"""

# What the box lacks (a network target, half a machine of default dependencies), and times that suit a test.
TEST_DROP_IN = """\
[Unit]
DefaultDependencies=no
Conflicts=shutdown.target
Before=shutdown.target
Wants=
RequiresMountsFor=
StartLimitIntervalSec=0
[Service]
StandardOutput=append:/share/llmgw.log
StandardError=inherit
RestartSec=100ms
WatchdogSec=5
"""


class Box:
    """A throw-away systemd and the commands that run in it."""

    def __init__(self, folder: Path, user: str) -> None:
        self.folder = folder
        self.user = user
        self.share = folder / "share"

    def start(self) -> None:
        bind = [str(path) for path in (CHECKOUT, Path(sys.prefix), Path(sys.base_prefix)) if _is_hidden_in_box(path)]
        env = {**os.environ, "SDBOX_BIND": ":".join(dict.fromkeys(bind))}
        if self.user != "root":
            env["SDBOX_DBUS"] = "1"
        done = subprocess.run([SDBOX, "start", self.folder], env=env, capture_output=True, text=True, check=False)
        if done.returncode == 77:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        subprocess.run([SDBOX, "stop", self.folder], check=True, timeout=PATIENCE, capture_output=True)

    def run(self, *command: str, check: bool = True, text: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [SDBOX, "exec", self.folder, *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}\n{self.log()}")
        return done

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        self.run("sh", "-c", f'mkdir -p "$(dirname {path})" && cat >{path} && chmod {mode} {path}', text=text)

    def systemctl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", *words, check=check)

    def show(self, *names: str) -> dict[str, str]:
        text = self.systemctl("show", UNIT, *(f"--property={name}" for name in names)).stdout
        return dict(line.partition("=")[::2] for line in text.splitlines())

    def main_pid(self) -> int:
        return int(self.show("MainPID")["MainPID"])

    def control_socket(self) -> str:
        """As seen from out here: starting a client in the box for every look would be most of the test's time."""
        init = (self.folder / "init.pid").read_text().strip()
        return f"/proc/{init}/root/run/llmgw/control.sock"

    def ask_gateway(self) -> str:
        """One request for a model, on a new connection; the status line. Raises OSError when nobody listens."""
        init = (self.folder / "init.pid").read_text().strip()
        body = json.dumps({"model": "one", "prompt": "hello", "max_tokens": 2})
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(f"/proc/{init}/root/run/llmgw/gateway.sock")
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body.encode())
            return sock.recv(4096).decode().partition("\r\n")[0]

    def shards(self) -> dict[str, dict[str, Any]]:
        """What status says, by name; empty while nobody answers."""
        try:
            _, answer = client.request(self.control_socket(), "GET", "/v1/status")
        except client.ClientError:
            return {}
        return {shard["name"]: shard for shard in answer["shards"]}

    def engines(self) -> dict[str, int]:
        """The pids of ready engines."""
        return {name: shard["pid"] for name, shard in self.shards().items() if shard["state"] == "ready"}

    def both_ready(self) -> dict[str, int]:
        self.wait(lambda: len(self.engines()) == 2, "both engines ready")
        return self.engines()

    def alive(self, pid: int) -> bool:
        """Running, not a zombie that nobody has reaped yet."""
        stat = self.run("cat", f"/proc/{pid}/stat", check=False).stdout
        return bool(stat) and stat.rpartition(")")[2].split()[0] != "Z"

    def in_cgroup(self) -> list[str]:
        """Processes of the unit, engines included."""
        return self.run(
            "sh", "-c", f"find {CGROUP} -name cgroup.procs -exec cat {{}} + 2>/dev/null", check=False
        ).stdout.split()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                state = self.systemctl("status", "--no-pager", "--full", UNIT, check=False).stdout
                raise AssertionError(f"waited in vain for: {what}\n{state}\n{self.log()}")
            time.sleep(0.05)

    def whole_log(self) -> str:
        return (self.share / "llmgw.log").read_text(errors="replace")

    def log(self) -> str:
        """Its end, for people."""
        return "\n".join(self.whole_log().splitlines()[-60:])

    def configure(self, text: str) -> None:
        self.write("/etc/llmgw/llmgw.toml", text)

    def drop_in(self, name: str, text: str | None) -> None:
        path = f"/etc/systemd/system/{UNIT}.d/{name}"
        if text is None:
            self.run("rm", "-f", path)
        else:
            self.write(path, text)
        self.systemctl("daemon-reload")


def _is_hidden_in_box(path: Path) -> bool:
    """The box has a /tmp and a /run of its own."""
    return any(path.is_relative_to(folder) for folder in ("/tmp", "/run"))


def _launcher(module: str, function: str) -> str:
    """What an installed virtual environment has in bin/, for this checkout."""
    return textwrap.dedent(f"""\
        #!{sys.executable}
        import sys
        sys.path.insert(0, {str(CHECKOUT)!r})
        sys.dont_write_bytecode = True
        from {module} import {function}
        sys.exit({function}())
        """)


@pytest.fixture(scope="module", params=["root", "llmgw"])
def installed(request: pytest.FixtureRequest) -> Iterator[Box]:
    user: str = request.param
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if user != "root" and shutil.which("dbus-daemon") is None:
        pytest.skip("needs dbus-daemon: a unit that is not root's asks for its job over the bus")
    folder = Path(tempfile.mkdtemp(prefix="llmgw-unit-"))
    box = Box(folder, user)
    try:
        box.start()
        try:
            install(box)
            yield box
        finally:
            box.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(box: Box) -> None:
    log = box.share / "llmgw.log"
    log.touch()
    log.chmod(0o666)
    (box.share / "tiny.gguf").write_bytes(b"GGUF")
    box.folder.chmod(0o755)
    box.write("/opt/llmgw/bin/llmgw", _launcher("llmgw.cli.main", "main"), "0755")
    box.write("/opt/llmgw/bin/llmgw-fake-engine", _launcher("llmgw.fake.engine", "main"), "0755")
    box.run("/opt/llmgw/bin/llmgw", "install-systemd", "--prefix", "/opt/llmgw")
    if box.run("setpriv", "--reuid=llmgw", "--clear-groups", "/opt/llmgw/bin/llmgw", "version", check=False).returncode:
        pytest.skip(f"the user llmgw may not read {CHECKOUT} or {sys.base_prefix}")
    box.drop_in("90-test.conf", TEST_DROP_IN)
    if box.user == "root":
        box.drop_in("50-root.conf", (CHECKOUT / "contrib/systemd/drop-ins/root.conf").read_text())
    box.configure(CONFIG)


@pytest.fixture
def box(installed: Box) -> Box:
    """The unit runs, both engines are ready."""
    installed.configure(CONFIG)
    if installed.show("ActiveState")["ActiveState"] != "active":
        installed.systemctl("start", UNIT)
    installed.both_ready()
    return installed


def test_the_unit_has_nothing_that_systemd_complains_about(installed: Box) -> None:
    assert complaints(installed, f"/etc/systemd/system/{UNIT}") == []


def test_systemd_understands_every_drop_in(installed: Box) -> None:
    newer = {"accounting.conf": "DelegateSubgroup"}  # systemd 254
    for drop_in in sorted((CHECKOUT / "contrib/systemd/drop-ins").iterdir()):
        folder = f"/tmp/{drop_in.stem}"
        installed.run("mkdir", folder)
        installed.run("cp", f"/etc/systemd/system/{UNIT}", folder)
        installed.write(f"{folder}/{UNIT}.d/{drop_in.name}", drop_in.read_text())
        known = newer.get(drop_in.name)
        found = [line for line in complaints(installed, f"{folder}/{UNIT}") if known is None or known not in line]
        assert found == []


def status_of(box: Box) -> dict[str, Any]:
    """The whole status; empty while nobody answers."""
    try:
        return client.request(box.control_socket(), "GET", "/v1/status")[1]
    except client.ClientError:
        return {}


def complaints(box: Box, unit: str) -> list[str]:
    done = box.run("systemd-analyze", "verify", unit, check=False)
    return [line for line in (done.stdout + done.stderr).splitlines() if UNIT in line]


def test_the_hardening_is_as_good_as_measured(installed: Box) -> None:
    alone = "/tmp/plain.service"  # a name for which there are no drop-ins
    installed.run("cp", f"/etc/systemd/system/{UNIT}", alone)
    done = installed.run("systemd-analyze", "security", "--offline=yes", "--threshold=32", alone, check=False)
    assert done.returncode == 0, done.stdout


def test_the_service_runs_as_its_user(box: Box) -> None:
    owners = {box.run("stat", "-c", "%U", f"/proc/{pid}").stdout.strip() for pid in box.in_cgroup()}
    assert owners == {box.user}


def test_start_returns_when_the_socket_answers(box: Box) -> None:
    box.systemctl("stop", UNIT)
    box.systemctl("start", UNIT)
    assert set(box.shards()) == {"alpha", "beta"}


def test_the_status_line_counts_ready_engines(box: Box) -> None:
    box.wait(lambda: box.show("StatusText")["StatusText"] == "2/2 ready", "the status line")


def test_a_reload_starts_what_is_new_and_keeps_the_rest(box: Box) -> None:
    before = box.both_ready()
    box.configure(CONFIG + '\n[[shard]]\nname = "gamma"\nmodel = "three"\nweights = "/share/tiny.gguf"\n')
    box.systemctl("reload", UNIT)
    box.wait(lambda: len(box.engines()) == 3, "the third engine")
    after = box.engines()
    box.configure(CONFIG)
    box.systemctl("reload", UNIT)
    box.wait(lambda: not box.alive(after["gamma"]), "the third engine gone")
    assert {name: after[name] for name in before} == before
    assert box.engines() == before


def test_a_reload_of_a_wrong_file_fails_and_changes_nothing(box: Box) -> None:
    before = box.both_ready()
    main = box.main_pid()
    box.configure(CONFIG.replace("engine =", "engin ="))
    assert box.systemctl("reload", UNIT, check=False).returncode == 1
    box.configure(CONFIG)
    state = box.show("ActiveState", "SubState", "MainPID")
    assert state == {"ActiveState": "active", "SubState": "running", "MainPID": str(main)}
    assert box.engines() == before
    assert "engin" in box.log()


def test_sighup_is_a_reload_and_leaves_the_unit_active(box: Box) -> None:
    before = box.both_ready()
    changed_at = box.show("StateChangeTimestampMonotonic")
    box.configure(CONFIG + '\n[[shard]]\nname = "hup"\nmodel = "four"\nweights = "/share/tiny.gguf"\n')
    box.systemctl("kill", "--signal=HUP", "--kill-whom=main", UNIT)
    box.wait(lambda: "hup" in box.engines(), "the engine that the new file asks for")
    box.wait(lambda: box.show("SubState")["SubState"] == "running", "the end of the reload")
    # Nobody but llmgw can have told systemd, since no command of the unit ran.
    assert box.show("StateChangeTimestampMonotonic") != changed_at
    box.configure(CONFIG)
    box.systemctl("reload", UNIT)
    box.wait(lambda: box.engines() == before, "the engines of before")


def test_a_restart_keeps_the_engines(box: Box) -> None:
    before = box.both_ready()
    main = box.main_pid()
    box.systemctl("restart", UNIT)
    assert box.main_pid() != main
    assert box.both_ready() == before
    assert all(shard["adopted"] for shard in box.shards().values())


def test_a_supervisor_that_is_killed_is_replaced_and_its_engines_adopted(box: Box) -> None:
    before = box.both_ready()
    main = box.main_pid()
    box.run("kill", "-KILL", str(main))
    box.wait(lambda: box.main_pid() not in (0, main), "a new supervisor")
    assert box.both_ready() == before
    assert all(shard["adopted"] for shard in box.shards().values())


@pytest.mark.parametrize("how", ["restart", "kill", "upgrade"])
def test_clients_of_the_gateway_wait_while_llmgw_is_replaced_and_none_is_refused(box: Box, how: str) -> None:
    box.both_ready()
    assert box.ask_gateway() == "HTTP/1.1 200 OK"
    started = status_of(box)["started"]
    if how == "restart":
        box.systemctl("restart", "--no-block", UNIT)
    elif how == "kill":
        box.run("kill", "-KILL", str(box.main_pid()))
    else:
        box.run("sh", "-c", "/opt/llmgw/bin/llmgw upgrade >/dev/null 2>&1 &")
    answers = set()

    def is_replaced_and_answers() -> bool:
        # Raises when a connection is refused; 503 is an answer while engines are being taken over.
        answers.add(answer := box.ask_gateway())
        return status_of(box).get("started", started) != started and answer == "HTTP/1.1 200 OK"

    box.wait(is_replaced_and_answers, "an answer through the gateway of the next supervisor")
    assert answers <= {"HTTP/1.1 200 OK", "HTTP/1.1 503 Service Unavailable"}


def test_a_supervisor_that_hangs_is_replaced_by_the_watchdog_and_its_engines_adopted(box: Box) -> None:
    before = box.both_ready()
    main = box.main_pid()
    box.run("kill", "-STOP", str(main))
    box.wait(lambda: box.main_pid() not in (0, main), "the watchdog")
    assert box.both_ready() == before
    assert box.show("ActiveState")["ActiveState"] == "active"
    assert "Fatal Python error: Aborted" in box.whole_log()  # with the line where it hung


def test_an_upgrade_keeps_the_process_and_the_engines(box: Box) -> None:
    before = box.both_ready()
    state = box.show("MainPID", "ActiveState", "NRestarts")
    box.run("/opt/llmgw/bin/llmgw", "upgrade")
    assert box.both_ready() == before
    assert box.show("MainPID", "ActiveState", "NRestarts") == state
    box.wait(lambda: box.show("StatusText")["StatusText"] == "2/2 ready", "the status line of the new one")


def test_a_stop_leaves_nothing(box: Box) -> None:
    pids = [*box.both_ready().values(), box.main_pid()]
    box.systemctl("stop", UNIT)
    assert box.show("ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert [pid for pid in pids if box.alive(pid)] == []
    assert box.run("test", "-e", CGROUP, check=False).returncode == 1
    assert box.run("find", "/var/lib/llmgw/tmp", "-mindepth", "1").stdout == ""
    assert box.run("find", "/run/llmgw", "-type", "s").stdout == ""


def test_a_supervisor_that_dies_during_a_stop_leaves_nothing_either(box: Box) -> None:
    pids = [*box.both_ready().values(), box.main_pid()]
    # The stop then begins with the end of the supervisor, before it could do anything.
    box.drop_in("95-kill.conf", "[Service]\nKillSignal=SIGKILL\n")
    try:
        box.systemctl("stop", UNIT)
    finally:
        box.drop_in("95-kill.conf", None)
    assert [pid for pid in pids if box.alive(pid)] == []
    assert box.in_cgroup() == []


def test_a_supervisor_that_dies_during_a_restart_keeps_the_engines(box: Box) -> None:
    before = box.both_ready()
    box.drop_in("95-kill.conf", "[Service]\nKillSignal=SIGKILL\n")
    try:
        box.systemctl("restart", UNIT)
    finally:
        box.drop_in("95-kill.conf", None)
    assert box.both_ready() == before


def test_a_wrong_file_does_not_loop_and_costs_no_engine(box: Box) -> None:
    before = box.both_ready()
    box.configure(CONFIG.replace("engine =", "engin ="))
    box.systemctl("reset-failed", UNIT, check=False)
    assert box.systemctl("restart", UNIT, check=False).returncode == 1
    box.wait(lambda: box.show("ActiveState")["ActiveState"] == "failed", "the unit failed")
    # "failed" is where systemd rests; a loop would be in "activating (auto-restart)".
    assert box.show("SubState", "ExecMainStatus", "NRestarts") == {
        "SubState": "failed",
        "ExecMainStatus": "78",
        "NRestarts": "0",
    }
    assert all(box.alive(pid) for pid in before.values())
    box.configure(CONFIG)
    box.systemctl("start", UNIT)
    assert box.both_ready() == before


def test_a_second_supervisor_is_refused_with_the_pid_of_the_first(box: Box) -> None:
    done = box.run(
        "env",
        "STATE_DIRECTORY=/var/lib/llmgw",
        "RUNTIME_DIRECTORY=/run/llmgw",
        "LOGS_DIRECTORY=/var/log/llmgw",
        "/opt/llmgw/bin/llmgw",
        "run",
        "/etc/llmgw/llmgw.toml",
        check=False,
    )
    assert done.returncode == 2
    assert str(box.main_pid()) in done.stderr
    assert len(box.engines()) == 2


def test_the_journal_can_be_asked_for_one_shard(box: Box) -> None:
    box.systemctl("start", "systemd-journald.socket", "systemd-journald.service")
    box.run("/opt/llmgw/bin/llmgw", "restart", "alpha", "--wait")

    def entries() -> list[dict[str, Any]]:
        text = box.run("journalctl", "--no-pager", "-o", "json", "LLMGW_SHARD=alpha", check=False).stdout
        return [json.loads(line) for line in text.splitlines()]

    box.wait(lambda: any(entry.get("LLMGW_STATE") == "ready" for entry in entries()), "the entry of Ready")
    assert all(entry["MESSAGE_ID"] for entry in entries())


def test_a_client_that_calls_during_a_restart_waits_with_the_socket_unit(box: Box) -> None:
    before = box.both_ready()
    box.run("/opt/llmgw/bin/llmgw", "install-systemd", "--prefix", "/opt/llmgw", "--with-socket")
    box.systemctl("stop", UNIT)
    box.drop_in("95-socket.conf", "[Unit]\nRequires=llmgw.socket\nAfter=llmgw.socket\n")
    try:
        box.write("/etc/systemd/system/llmgw.socket.d/test.conf", "[Unit]\nDefaultDependencies=no\n")
        box.systemctl("daemon-reload")
        box.systemctl("start", "llmgw.socket")
        box.systemctl("start", UNIT)
        assert box.both_ready().keys() == before.keys()
        box.systemctl("restart", "--no-block", UNIT)
        answered: set[int] = set()

        def both_have_answered() -> bool:
            # Raises when a call is refused.
            answered.add(client.request(box.control_socket(), "GET", "/v1/status", timeout=PATIENCE)[1]["pid"])
            return len(answered) == 2

        box.wait(both_have_answered, "an answer of the old and of the new supervisor, and none refused in between")
        box.both_ready()
    finally:
        box.drop_in("95-socket.conf", None)
        box.systemctl("stop", UNIT, "llmgw.socket")


def test_a_power_off_ends_the_engines_in_order(box: Box) -> None:
    """The last test of a box: it is gone afterwards."""
    said = len(box.whole_log())
    box.stop()
    last_words = box.whole_log()[said:]
    assert "cannot ask systemd" not in last_words  # the bus is still there
    assert "SIGTERM: stopping the engines" in last_words
    assert all(f"{name}: stopped by " in last_words for name in ("alpha", "beta"))
