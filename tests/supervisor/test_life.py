"""The life of shards in a whole llmgw with fake engines: real processes, sockets, files and signals."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial

import psutil
import pytest

from tests.node import Node, fake, free_port, is_alive


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


def llamacpp(name: str, *, knobs: str = "", more: str = "") -> str:
    command = fake("llamacpp", *knobs.split())
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\nengine = "llamacpp"\ncommand = {command}\n{more}\n'


def vllm(name: str, *, knobs: str = "", more: str = "") -> str:
    command = fake("vllm", "serve", *knobs.split())
    return f'[[shard]]\nname = "{name}"\nmodel = "{name}"\ngpus = 0\ncommand = {command}\n{more}\n'


def test_a_shard_becomes_ready_and_a_stop_leaves_nothing(node: Node) -> None:
    node.write(llamacpp("a") + vllm("b"))
    node.start()
    assert node.wait_state("a", "ready")["pid"]
    node.wait_state("b", "ready")
    assert node.end() == 0
    assert node.engine_processes() == []
    assert node.leftovers() == []


def test_engines_outlive_a_killed_llmgw_and_are_taken_over(node: Node) -> None:
    node.write(llamacpp("a") + vllm("b", more='port = "unix"'))
    node.start()
    before = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    node.kill()
    assert all(is_alive(pid) for pid in before.values())
    node.start()
    after = {name: node.wait_state(name, "ready") for name in ("a", "b")}
    assert {name: shard["pid"] for name, shard in after.items()} == before
    assert all(shard["adopted"] for shard in after.values())
    assert node.end() == 0
    assert node.engine_processes() == []
    assert node.leftovers() == []


def test_a_killed_leader_ends_its_workers_and_the_shard_starts_anew(node: Node) -> None:
    node.write('[defaults]\nrestart_delay = "100ms"\n' + vllm("a"))
    node.start()
    first = node.wait_state("a", "ready")
    workers = psutil.Process(first["pid"]).children(recursive=True)
    assert workers
    os.kill(first["pid"], signal.SIGKILL)
    node.until(lambda: node.shard("a")["generation"] == 2, "the shard is launched again")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in workers)
    again = node.wait_state("a", "ready")
    assert again["pid"] != first["pid"]
    assert again["restarts"] == 1


def test_exit_code_zero_that_nobody_asked_for_is_a_failure_with_a_cause(node: Node) -> None:
    node.write('[defaults]\nrestart = "no"\n' + vllm("a"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    core = next(process for process in psutil.Process(pid).children() if process.name().startswith("VLLM::EngineCor"))
    core.kill()
    failed = node.wait_state("a", "failed")
    assert failed["reason"]["cause"]
    assert failed["detail"] == 'will not restart: restart = "no"'
    assert failed["reason"]["remedy"]


def test_a_wrong_option_is_not_tried_again(node: Node) -> None:
    node.write(vllm("a", more="args = { no-such-option = 3 }"))
    node.start()
    failed = node.wait_state("a", "failed")
    node.until(lambda: "not restart" in node.shard("a")["detail"], "it says that it will not restart")
    assert "no-such-option" in failed["reason"]["cause"] + "".join(failed["reason"]["evidence"])
    assert failed["next_attempt"] is None


def test_an_operators_stop_holds_over_reload_and_over_a_restart_of_llmgw(node: Node) -> None:
    node.write(llamacpp("a") + llamacpp("b"))
    node.start()
    node.wait_state("a", "ready")
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert node.state_of("a") == "stopped"
    node.write(llamacpp("a", more='restart_delay = "2s"') + llamacpp("b"))
    assert node.cli("reload").returncode == 0
    assert node.state_of("a") == "stopped"
    node.kill()
    node.start()
    node.wait_state("b", "ready")
    shard = node.wait_state("a", "stopped")
    assert shard["intent"]["wish"] == "stop" and "uid" in shard["intent"]["by"]
    assert node.cli("start", "a", "--wait").returncode == 0
    assert node.state_of("a") == "ready"


def test_a_drained_shard_stays_loaded_until_start(node: Node) -> None:
    node.write(llamacpp("a"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    assert node.cli("drain", "a", "--no-wait").returncode == 0
    assert node.wait_state("a", "draining")["pid"] == pid
    assert node.cli("start", "a", "--no-wait").returncode == 0
    assert node.wait_state("a", "ready")["pid"] == pid


def test_a_reload_touches_only_what_changed(node: Node) -> None:
    node.write(llamacpp("keep") + llamacpp("change") + llamacpp("gone"))
    node.start()
    before = {name: node.wait_state(name, "ready")["pid"] for name in ("keep", "change", "gone")}
    node.write(
        llamacpp("keep", more='aliases = ["k"]') + llamacpp("change", more="max_model_len = 512") + llamacpp("new")
    )
    assert node.cli("reload").returncode == 0
    node.until(lambda: {s["name"] for s in node.status()["shards"]} == {"keep", "change", "new"}, "gone is gone")
    node.until(lambda: node.shard("change")["pid"] not in (None, before["change"]), "change is replaced")
    node.wait_state("change", "ready")
    node.wait_state("new", "ready")
    assert node.shard("keep")["pid"] == before["keep"]
    assert not is_alive(before["gone"])


def test_a_wrong_file_changes_nothing_and_status_says_so(node: Node) -> None:
    node.write(llamacpp("a"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    node.write(llamacpp("a") + "nonsense = 3\n")
    result = node.cli("reload")
    assert result.returncode == 78
    assert 'unknown key "nonsense"' in result.stdout + result.stderr
    assert node.shard("a")["pid"] == pid
    assert "1 error" in node.status()["config"]["error"]
    node.write(llamacpp("a"))
    assert node.cli("reload").returncode == 0
    assert node.status()["config"]["error"] is None


def test_what_changed_while_llmgw_was_away_is_replaced_and_what_is_gone_is_ended(node: Node) -> None:
    node.write(llamacpp("a") + llamacpp("b"))
    node.start()
    before = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    node.kill()
    node.write(llamacpp("a", more="max_model_len = 512"))
    node.start()
    node.until(lambda: node.shard("a")["pid"] not in (None, before["a"]), "a is replaced")
    node.wait_state("a", "ready")
    node.until(lambda: not is_alive(before["b"]), "b is ended")
    node.until(lambda: [s["name"] for s in node.status()["shards"]] == ["a"], "b is no longer shown")
    assert not is_alive(before["a"])


def test_the_workers_of_a_leader_that_died_while_llmgw_was_away_are_ended_before_a_new_start(node: Node) -> None:
    node.write(vllm("a"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    workers = psutil.Process(pid).children(recursive=True)
    node.kill()
    os.kill(pid, signal.SIGKILL)
    assert any(is_alive(process.pid) for process in workers)
    node.start()
    shard = node.wait_state("a", "ready")
    assert shard["pid"] != pid and not shard["adopted"]
    assert not any(is_alive(process.pid) for process in workers)


def test_a_second_llmgw_on_the_same_folders_is_refused_with_the_firsts_pid(node: Node) -> None:
    node.write(llamacpp("a"))
    pid = node.start()
    result = node.cli("run", str(node.config))
    assert result.returncode == 2
    assert f"pid {pid}" in result.stderr
    assert node.wait_state("a", "ready")


def test_an_upgrade_keeps_pid_engines_and_socket(node: Node) -> None:
    node.write(llamacpp("a") + vllm("b"))
    pid = node.start()
    before = {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")}
    started = node.status()["started"]
    result = node.cli("upgrade")
    assert result.returncode == 0, result.stderr
    assert node.status()["pid"] == pid and node.status()["started"] > started
    assert {name: node.wait_state(name, "ready")["pid"] for name in ("a", "b")} == before
    os.kill(before["a"], signal.SIGKILL)
    # A real child still, so its exit code is known.
    failed = node.wait_state("a", "failed")
    assert "9" in failed["reason"]["cause"] or "SIGKILL" in failed["reason"]["cause"]
    assert node.end() == 0
    assert node.engine_processes() == []


def test_a_taken_port_is_named_and_the_shard_starts_when_it_is_free(node: Node) -> None:
    import socket

    port = free_port()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        node.write(
            '[defaults]\nrestart_delay = "200ms"\nrestart_delay_max = "200ms"\n' + llamacpp("a", more=f"port = {port}")
        )
        node.start()
        failed = node.wait_state("a", "failed")
        assert f"pid {os.getpid()}" in failed["reason"]["cause"]
        assert failed["failures"] == 0
    node.wait_state("a", "ready")


def test_two_signals_in_a_row_kill_at_once(node: Node) -> None:
    node.write(llamacpp("a", knobs="--fake-ignore-term", more='stop_timeout = "10m"'))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    node.until(lambda: "stopping" in node.conditions("a"), "it is being stopped")
    assert node.end(signal.SIGTERM) == 0
    assert not is_alive(pid)


def test_the_cause_is_what_stood_there_when_the_leader_died_not_what_its_workers_say_while_they_are_ended(
    node: Node,
) -> None:
    script = (
        "import os, signal, sys, time\n"
        "if os.fork() == 0:\n"
        "    complain = lambda *_: (print('RuntimeError: the worker was ended', flush=True), os._exit(1))\n"
        "    signal.signal(signal.SIGTERM, complain)\n"
        "    time.sleep(600)\n"
        "time.sleep(0.3)\n"
        "sys.stdout.write('ValueError: the real cause')\n"
        "sys.stdout.flush()\n"
        "os._exit(3)\n"
    )
    (node.folder / "engine.py").write_text(script)
    command = json.dumps([sys.executable, str(node.folder / "engine.py")])
    node.write(f'[[shard]]\nname = "a"\nmodel = "a"\nengine = "command"\nrestart = "no"\ncommand = {command}\n')
    node.start()
    assert "the real cause" in node.wait_state("a", "failed")["reason"]["cause"]


def test_a_shard_that_fails_again_and_again_can_be_removed_at_any_moment(node: Node) -> None:
    stays = f'[[shard]]\nname = "stays"\nmodel = "s"\nengine = "command"\ncommand = {json.dumps(["sleep", "1000"])}\n'
    fails = '[[shard]]\nname = "fails"\nmodel = "f"\nengine = "command"\ncommand = ["false"]\nrestart_limit = 0\n'
    node.write(stays + fails + 'restart_delay = "100ms"\nrestart_delay_max = "100ms"\n')
    node.start()
    pid = node.wait_state("stays", "starting", "loading", "ready")["pid"]
    for round_ in range(12):
        node.wait_state("fails", "failed")
        # Right behind a launch: the next moments are its end, a pause and the next launch.
        trials = node.shard("fails")["generation"] + round_ % 3
        node.until(partial(lambda trials: node.shard("fails")["generation"] > trials, trials), "it goes on")
        node.write(stays)
        assert node.cli("reload").returncode == 0
        node.until(lambda: [shard["name"] for shard in node.status()["shards"]] == ["stays"], "it is gone")
        node.write(stays + fails + 'restart_delay = "100ms"\nrestart_delay_max = "100ms"\n')
        assert node.cli("reload").returncode == 0
    assert node.answers()
    assert node.shard("stays")["pid"] == pid
    assert "Traceback" not in node.log()


def test_a_reload_that_replaces_engines_leaves_operators_wishes_as_they_are(node: Node) -> None:
    def written(size: int) -> str:
        more = f'drain_timeout = "1s"\nargs = {{ ctx-size = {size} }}'
        names = ("drained", "stopped", "started")
        return "".join(llamacpp(name, more=more + "\nautostart = false") for name in names)

    node.write(written(512))
    node.start()
    for name in ("drained", "stopped", "started"):
        assert node.cli("start", name, "--wait").returncode == 0
    assert node.cli("drain", "drained", "--wait").returncode == 0
    assert node.cli("stop", "stopped", "--wait").returncode == 0
    before = {name: node.shard(name)["intent"] for name in ("drained", "stopped", "started")}
    node.write(written(1024))
    assert node.cli("reload").returncode == 0
    node.until(lambda: node.shard("started")["generation"] == 2, "what runs is replaced")
    node.until(lambda: node.shard("drained")["generation"] == 2, "what is drained is replaced")
    node.wait_state("started", "ready")
    node.wait_state("drained", "draining")
    assert node.state_of("stopped") == "stopped"
    assert {name: node.shard(name)["intent"] for name in before} == before


def test_a_new_on_stop_is_kept_in_the_records_of_running_engines(node: Node) -> None:
    node.write(llamacpp("a"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    node.config.write_text(node.config.read_text().replace("[supervisor]", '[supervisor]\non_stop = "leave"'))
    assert node.cli("reload").returncode == 0
    node.until(lambda: [record["on_stop"] for record in node.records()] == ["leave"], "the record says so")
    assert node.end() == 0
    assert is_alive(pid)
    node.start()
    assert node.wait_state("a", "ready")["pid"] == pid
    assert node.cli("stop", "a", "--wait").returncode == 0
    assert node.records() == []


def test_a_stop_that_meets_an_upgrade_is_obeyed_by_the_new_code(node: Node) -> None:
    stubborn = json.dumps(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
    slow = f'[[shard]]\nname = "slow"\nmodel = "s"\nengine = "command"\ncommand = {stubborn}\nstop_timeout = "5s"\n'
    node.write(llamacpp("a") + slow)
    node.start()
    node.wait_state("a", "ready")
    assert node.cli("stop", "slow", "--no-wait").returncode == 0
    assert node.ask("POST", "/v1/upgrade", timeout=60)["http"] == 202
    # The old code waits for the end of the slow one, and is on its way out already.
    assert node.status()["stopping"] == "upgrade"
    assert node.end() == 0
    assert "SIGTERM: stopping the engines" in node.log()
    assert node.engine_processes() == []
    assert node.leftovers() == []


def test_a_command_that_ends_well_and_is_always_restarted_gets_its_pause(node: Node) -> None:
    more = 'restart = "always"\nrestart_delay = "1h"\nrestart_delay_max = "1h"\n'
    node.write('[[shard]]\nname = "a"\nmodel = "a"\nengine = "command"\ncommand = ["true"]\n' + more)
    node.start()
    ended = node.wait_state("a", "stopped")
    assert ended["detail"] == "ended by itself with code 0; starting it again in 3600 s"
    assert ended["generation"] == 1
    assert node.cli("start", "a").returncode == 0
    node.until(lambda: node.shard("a")["generation"] == 2, "a wish cuts the pause short")
    node.wait_state("a", "stopped")
    assert node.cli("stop", "a", "--wait").returncode == 0


def test_replicas_are_replaced_in_turn_held_after_a_failure_and_come_and_go(node: Node) -> None:
    def written(replicas: int, size: int = 512, program: str = "") -> str:
        text = llamacpp("a", more=f'replicas = {replicas}\nrestart = "no"\nargs = {{ ctx-size = {size} }}')
        return (
            text
            if not program
            else "\n".join(
                f'command = ["{program}"]' if line.startswith("command") else line for line in text.splitlines()
            )
        )

    def reload(text: str) -> None:
        node.write(text)
        result = node.cli("reload")
        assert result.returncode == 0, result.stderr

    node.write(written(2))
    node.start()
    first = {name: node.wait_state(name, "ready")["pid"] for name in ("a/0", "a/1")}
    reload(written(2, size=1024))
    node.until(lambda: node.shard("a/1")["generation"] == 2, "both are replaced")
    second = {name: node.wait_state(name, "ready")["pid"] for name in first}
    assert not set(first.values()) & set(second.values())
    moved = [(e["shard"], e["after"]) for e in node.events() if e["kind"] == "state" and e["before"] != e["after"]]
    # The second one is not touched before the first one is Ready again.
    assert moved.index(("a/1", "draining")) > [i for i, move in enumerate(moved) if move == ("a/0", "ready")][1]
    reload(written(2, program="false"))
    node.wait_state("a/0", "failed")
    node.until(lambda: "held" in node.conditions("a/1"), "the other one is held")
    assert node.shard("a/1")["pid"] == second["a/1"]
    reload(written(2, size=1024))
    node.wait_state("a/0", "ready")
    assert node.shard("a/1")["pid"] == second["a/1"]
    assert "held" not in node.conditions("a/1")
    kept = node.shard("a/0")["pid"]
    reload(written(1, size=1024))
    node.until(lambda: [shard["name"] for shard in node.status()["shards"]] == ["a"], "one is left")
    assert node.shard("a")["pid"] == kept and not is_alive(second["a/1"])
    reload(written(2, size=1024))
    node.wait_state("a/1", "ready")
    assert node.shard("a/0")["pid"] == kept


def test_a_replacement_that_is_ready_at_a_later_attempt_releases_the_others(node: Node) -> None:
    def written(knobs: str = "") -> str:
        policy = 'restart_delay = "1s"\nrestart_delay_max = "1s"\nreplicas = 2'
        return llamacpp("a", knobs=knobs, more=policy)

    node.write(written())
    node.start()
    first = {name: node.wait_state(name, "ready")["pid"] for name in ("a/0", "a/1")}
    attempts = node.folder / "attempts"
    node.write(written(f"--fake-fail=d1 --fake-attempts-file={attempts} --fake-succeed-on-attempt=3"))
    assert node.cli("reload").returncode == 0
    node.until(lambda: "held" in node.conditions("a/1"), "the second one is held while the first one fails")
    assert node.shard("a/1")["pid"] == first["a/1"]
    node.until(lambda: node.shard("a/1")["generation"] > 1, "the second one is replaced after all")
    node.wait_state("a/1", "ready")
    assert "held" not in node.conditions("a/1")
    assert node.state_of("a/0") == "ready"


def test_an_engine_is_stopped_by_its_own_rules_when_the_file_names_another_by_now(node: Node) -> None:
    node.write(vllm("a"))
    node.start()
    pid = node.wait_state("a", "ready")["pid"]
    workers = psutil.Process(pid).children(recursive=True)
    node.until(lambda: node.records()[0]["ready_at"], "its record says that it was ready")
    node.kill()
    node.write(llamacpp("a"))
    node.start()
    node.until(lambda: node.shard("a")["pid"] not in (None, pid), "the other engine runs")
    assert node.wait_state("a", "ready")["engine"] == "llamacpp"
    assert not is_alive(pid) and not any(is_alive(worker.pid) for worker in workers)
    steps = [event["text"] for event in node.events() if event["shard"] == "a"]
    assert any("SIGTERM to the leader" in text for text in steps)
