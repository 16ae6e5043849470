"""A program that is no engine, for `engine = "command"`: it prints, spawns, ignores, exits, as the knobs say."""

import signal

from llmgw.fake import family
from llmgw.fake.knobs import Knobs
from llmgw.fake.loop import Loop, write_all
from llmgw.fake.mishaps import Failing, arm_exit, arm_flood, die


def run(argv: list[str], knobs: Knobs) -> int:
    children = [kind for kind in knobs.children.split(",") if kind]
    unknown = [kind for kind in children if kind not in family.DETACHED_KINDS]
    if unknown:
        write_all(2, f"plain: --fake-children: unknown kind: {unknown[0]}\n".encode())
        return 2
    loop = Loop()
    if knobs.ignore_term:
        loop.on_signal(signal.SIGTERM, lambda: None)
    for kind in children:
        family.detach(loop, kind)
    failing = Failing.from_knobs(knobs, "vllm")
    if failing.wanted:
        for line in failing.cause_lines():
            write_all(2, line.encode() + b"\n")
        die(failing.exit_code("leader"))
    if knobs.ready_line:
        write_all(1, knobs.ready_line.encode() + b"\n")
    arm_flood(loop, knobs, 1)
    if knobs.serve:
        return _serve(loop, argv, knobs)
    arm_exit(loop, knobs)
    return loop.run()


def _serve(loop: Loop, argv: list[str], knobs: Knobs) -> int:
    """Answer HTTP as a loaded llama-server would; `--port`, `--host` and `--alias` are taken from argv."""
    from llmgw.fake import options
    from llmgw.fake.profiles.llamacpp import LlamaServer, Log

    given, _ = options.LLAMACPP.parse(argv)
    if knobs.port:
        given.values["port"] = [str(knobs.port)]
    given.values.setdefault("alias", ["plain"])
    try:
        server = LlamaServer(loop, given, knobs, Log())
    except options.OptionError as error:
        write_all(2, f"plain: error: {error}\n".encode())
        return 2
    server.start()
    return loop.run()
