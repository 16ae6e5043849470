"""`llmgw-fake-engine`: chooses the profile, applies knobs that concern the start itself, and runs.

`command = ["llmgw-fake-engine", "vllm", "serve"]` in llmgw.toml makes llmgw drive it as it drives the real
`vllm serve`; likewise `["llmgw-fake-engine", "sglang", "serve"]` and `["llmgw-fake-engine", "llamacpp"]`.
"""

import os
import sys

from llmgw.fake import knobs as knobs_module

WRAPPED = "FAKE_ENGINE_WRAPPED"

WRAPPERS = {
    "exec": 'sleep 0.1; exec "$@"',
    "stay": '"$@"; code=$?; true; exit $code',
    # Leaves with 0 on SIGTERM and tells its child nothing, as several launchers do.
    "deserter": "trap 'exit 0' TERM; \"$@\" & wait $!",
}


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    if "--fake-help" in argv:
        sys.stdout.write(knobs_module.help_text())
        return 0
    if "--fake-failures" in argv:
        from llmgw.fake import failures

        sys.stdout.write(failures.list_text())
        return 0
    try:
        knobs, rest = knobs_module.parse(argv, os.environ)
    except knobs_module.KnobError as error:
        sys.stderr.write(f"llmgw-fake-engine: {error}\n")
        return 2
    if knobs.wrapper != "none" and WRAPPED not in os.environ:
        _wrap(knobs.wrapper, argv)
    profile, rest = (rest[0], rest[1:]) if rest else ("", [])
    if profile == "llamacpp":
        from llmgw.fake.profiles import llamacpp

        return llamacpp.run(rest, knobs)
    if profile == "vllm":
        from llmgw.fake.profiles import vllm

        return vllm.run(rest, knobs)
    if profile == "sglang":
        from llmgw.fake.profiles import sglang

        return sglang.run(rest, knobs)
    if profile == "plain":
        from llmgw.fake.profiles import plain

        return plain.run(rest, knobs)
    if profile in ("-h", "--help"):
        sys.stdout.write(knobs_module.help_text())
        return 0
    sys.stderr.write(f"llmgw-fake-engine: no such profile: {profile!r}\n{knobs_module.help_text()}")
    return 2


def _wrap(kind: str, argv: list[str]) -> None:
    """Become a shell that starts this program again."""
    again = [sys.executable, "-m", "llmgw.fake.engine", *argv]
    environment = {**os.environ, WRAPPED: "1"}
    os.execve("/bin/sh", ["/bin/sh", "-c", WRAPPERS[kind], "sh", *again], environment)


if __name__ == "__main__":
    main()
