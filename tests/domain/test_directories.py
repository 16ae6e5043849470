import subprocess
import sys

from llmgw.domain import directories


def test_root_uses_the_systems_directories() -> None:
    assert directories.state_directory({}, 0, "/root") == "/var/lib/llmgw"
    assert directories.runtime_directory({}, 0, "/root") == "/run/llmgw"
    assert directories.log_directory({}, "/var/lib/llmgw") == "/var/lib/llmgw/logs"


def test_a_user_has_directories_of_their_own() -> None:
    env = {"XDG_RUNTIME_DIR": "/run/user/1000", "XDG_STATE_HOME": "/data/state/"}
    assert directories.state_directory(env, 1000, "/home/ada") == "/data/state/llmgw"
    assert directories.state_directory({}, 1000, "/home/ada/") == "/home/ada/.local/state/llmgw"
    assert directories.runtime_directory(env, 1000, "/home/ada") == "/run/user/1000/llmgw"
    assert directories.runtime_directory({}, 1000, "/home/ada") == "/home/ada/.local/state/llmgw/run"
    assert directories.runtime_directory({}, 1000, "/home/ada", "/srv/state") == "/srv/state/run"


def test_relative_directories_from_the_environment_are_ignored() -> None:
    env = {"XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state", "STATE_DIRECTORY": "s", "RUNTIME_DIRECTORY": ""}
    assert directories.state_directory(env, 1000, "/home/ada") == "/home/ada/.local/state/llmgw"
    assert directories.runtime_directory(env, 1000, "/home/ada") == "/home/ada/.local/state/llmgw/run"


def test_of_several_directories_that_systemd_gives_the_first_counts() -> None:
    env = {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "RUNTIME_DIRECTORY": "/run/a:/run/b", "LOGS_DIRECTORY": "/l:/m"}
    assert directories.state_directory(env, 0, "/root") == "/var/lib/a"
    assert directories.runtime_directory(env, 0, "/root") == "/run/a"
    assert directories.log_directory(env, "/var/lib/a") == "/l"


def test_clients_look_in_their_own_directory_before_the_systems() -> None:
    env = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    assert directories.socket_folders(env, 1000, "/home/ada") == (
        "/run/user/1000/llmgw",
        "/home/ada/.local/state/llmgw/run",
        "/run/llmgw",
    )
    assert directories.socket_folders({}, 0, "/root") == ("/run/llmgw",)


def test_the_module_loads_nothing_heavy() -> None:
    code = "import sys, llmgw.domain.directories; print(*sorted(set(sys.modules) & {'attr', 'trio', 'typing'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
