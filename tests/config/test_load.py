import os
import socket
from pathlib import Path

import pytest
from config_texts import shard

from llmgw.config.load import facts_for, gather_host, load, path_fact
from llmgw.config.render import render_problems
from llmgw.domain.host import PortHolder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, name, text, mode=0o640):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


ENV = {"HOME": "/root", "STATE_DIRECTORY": "/nonexistent/s", "RUNTIME_DIRECTORY": "/nonexistent/r"}


def found(parsed):
    return [(str(p.where), p.code) for p in parsed.problems]


def test_globs_are_read_in_sorted_order_and_named_as_the_main_file_was(folder):
    write(folder, "llmgw.toml", "include = ['conf.d/*.toml', 'extra/none-*.toml']\n" + shard())
    write(folder, "conf.d/20.toml", shard(name='"c"'))
    write(folder, "conf.d/10.toml", shard(name='"b"', weights='"./w"'))
    parsed = load("llmgw.toml", env=ENV)
    assert parsed.config.files == ("llmgw.toml", "conf.d/10.toml", "conf.d/20.toml")
    assert [s.name for s in parsed.config.shards] == ["a", "b", "c"]
    assert parsed.config.shards[1].weights == f"{folder}/conf.d/w"
    absolute = load(str(folder / "llmgw.toml"), env=ENV)
    assert absolute.config.files[1] == f"{folder}/conf.d/10.toml"


def test_mistakes_of_all_files_are_told_at_once(folder):
    write(folder, "llmgw.toml", "include = ['conf.d/*.toml']\n" + shard(replicas="0"))
    write(folder, "conf.d/1.toml", "x = yes\n")
    write(folder, "conf.d/2.toml", shard(replicas="0"))
    assert found(load("llmgw.toml", env=ENV)) == [
        ("llmgw.toml:6:12", "out-of-range"),
        ("conf.d/1.toml:1:5", "syntax"),
        ("conf.d/2.toml:2:8", "duplicate-name"),
        ("conf.d/2.toml:5:12", "out-of-range"),
    ]


def test_a_plain_path_must_exist_and_a_file_is_read_once(folder):
    write(folder, "llmgw.toml", "include = ['no.toml', 'a.toml', './a.toml', 'llmgw.toml', 'sub']\n" + shard())
    write(folder, "a.toml", "")
    (folder / "sub").mkdir()
    parsed = load("llmgw.toml", env=ENV)
    assert found(parsed) == [
        ("llmgw.toml:1:12", "unreadable"),
        ("llmgw.toml:1:33", "included-twice"),
        ("llmgw.toml:1:45", "included-twice"),
        ("llmgw.toml:1:59", "unreadable"),
    ]
    assert "cannot read no.toml: no such file or directory" in parsed.problems[0].message


def test_a_missing_main_file_is_a_problem_and_no_traceback(folder):
    parsed = load("nowhere.toml", env=ENV)
    assert parsed.config is None
    assert render_problems(parsed.problems, parsed.sources).startswith(
        "nowhere.toml: error: cannot read nowhere.toml: no such file or directory; give the path"
    )
    assert load("/dev/zero", env=ENV).problems[0].message == "/dev/zero is not a regular file"
    assert load("a\0b", env=ENV).problems[0].code == "unreadable"


def test_secrets_are_read_from_files_and_credentials(folder):
    write(folder, "key", "from-file\n", 0o600)
    write(folder, "cred/llmgw_k", "from-credential", 0o600)
    text = shard(api_key="{ file = 'key' }", env="{ T = { credential = 'k' } }")
    write(folder, "llmgw.toml", text)
    made = load("llmgw.toml", env={**ENV, "CREDENTIALS_DIRECTORY": str(folder / "cred")}).config.shards[0]
    assert (made.api_key.reveal(), made.env["T"].reveal()) == ("from-file", "from-credential")
    (folder / "key").chmod(0o644)
    assert ("llmgw.toml:5:20", "secret-file-open") in found(load("llmgw.toml", env=ENV))
    (folder / "key").unlink()
    (folder / "key").mkdir(mode=0o700)
    (problem, _) = load("llmgw.toml", env=ENV).problems
    assert problem.message == f"{folder}/key is not a regular file"
    assert load("llmgw.toml", env=ENV, offline=True).config is not None


def test_an_inline_secret_in_a_readable_file_is_a_warning(folder):
    write(folder, "llmgw.toml", shard(api_key="'0123456789abcdef'"), 0o644)
    assert found(load("llmgw.toml", env=ENV)) == [("llmgw.toml:5:11", "secret-in-readable-file")]


def test_programs_weights_and_models_are_looked_up_for_preflight(folder):
    write(folder, "w/config.json", '{"num_attention_heads": 40}')
    write(folder, "broken/config.json", "[")
    program = write(folder, "bin/llmgw-test-program", "#!/bin/sh\n", 0o755)
    text = shard(engine='"command"', command='["llmgw-test-program"]', workdir='"."')
    text += shard(name='"b"', weights='"./w"') + shard(name='"c"', weights='"./broken"', command='["llmgw-no-program"]')
    write(folder, "llmgw.toml", text)
    facts = load("llmgw.toml", env={**ENV, "PATH": str(program.parent)}).facts
    assert facts.programs == {"llmgw-test-program": str(program), "vllm": None, "llmgw-no-program": None}
    assert facts.model_configs == {f"{folder}/w": {"num_attention_heads": 40}}
    assert facts.paths[f"{folder}/w"].is_dir
    assert facts.paths[str(folder)].writable


def test_the_version_of_an_engine_is_read_beside_its_program(folder):
    program = write(folder, "venv/bin/vllm", "#!/bin/sh\n", 0o755)
    write(folder, "venv/lib/python3.11/site-packages/vllm-0.33.0.dist-info/METADATA", "Name: vllm\nVersion: 0.33.0\n")
    write(folder, "llmgw.toml", shard(command=f'["{program}", "serve"]'))
    assert load("llmgw.toml", env=ENV).facts.engine_versions == {str(program): "0.33.0"}


def test_facts_about_this_host_are_gathered(folder):
    holder = PortHolder(8101, 5, "x", 0)
    facts = gather_host(ENV, "/root", port_holders={8101: holder})
    assert facts.hostname == socket.gethostname()
    assert facts.uid == os.geteuid()
    assert "root" in facts.groups
    assert "127.0.0.1" in facts.addresses
    low, high = facts.ephemeral_ports
    assert 0 < low < high
    assert facts.port_holders == {8101: holder}
    assert facts_for([], facts) == facts


def test_what_stands_at_a_path_is_told(folder):
    write(folder, "f", "x", 0o640)
    assert path_fact(f"{folder}/f").mode == 0o640
    assert not path_fact(f"{folder}/none").exists
    assert not path_fact("a\0b").exists
    assert path_fact("/proc").network is False
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("s")
        assert path_fact(str(Path("s").absolute())).is_socket


def test_what_include_gets_wrong_is_told_once(folder):
    write(folder, "llmgw.toml", "include = ['', 5, '${NOPE}', '${HERE}/a.toml', 'd/[']\n" + shard())
    write(folder, "a.toml", "")
    parsed = load("llmgw.toml", env={**ENV, "HERE": str(folder)})
    assert found(parsed) == [("llmgw.toml:1:12", "empty"), ("llmgw.toml:1:16", "wrong-type")]
    write(folder, "llmgw.toml", "include = ['${NOPE}', '${HERE}/a.toml', 'd/[']\n" + shard())
    parsed = load("llmgw.toml", env={**ENV, "HERE": str(folder)})
    assert found(parsed) == [("llmgw.toml:1:12", "unset-variable")]


def test_a_supervisor_is_not_started_without_its_credentials(folder):
    write(folder, "llmgw.toml", shard(api_key="{ credential = 'k' }"))
    assert load("llmgw.toml", env=ENV).config is None
    assert load("llmgw.toml", env=ENV, running=False).config is not None


def test_too_many_included_files_are_refused(folder):
    write(folder, "llmgw.toml", "include = ['d/*.toml']\n" + shard())
    for number in range(1001):
        write(folder, f"d/{number}.toml", "")
    assert found(load("llmgw.toml", env=ENV)) == [("llmgw.toml", "too-many-files")]


def test_a_check_before_a_launch_asks_no_directory_service_for_groups(monkeypatch):
    def refuse():
        raise AssertionError("the list of groups was asked for")

    monkeypatch.setattr("grp.getgrall", refuse)
    assert gather_host({}, "/", with_groups=False).groups == frozenset()


def test_adapters_are_read_from_sysfs_when_the_file_names_some(folder):
    write(folder, "llmgw.toml", "[node]\nfabric = ['mlx5_0']\n" + shard())
    parsed = load("llmgw.toml", env=ENV, sysfs=str(folder / "sys"))
    assert found(parsed) == [("llmgw.toml:2:11", "no-such-adapter")]
    write(folder, "plain.toml", shard())
    assert load("plain.toml", env=ENV, sysfs=str(folder / "sys")).facts.fabric is None
