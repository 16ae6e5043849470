"""`llmgw top`: shards, GPUs, queues and tenants as they are now, redrawn until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
import time

from llmgw.cli import top_view as view
from llmgw.cli.errors import DONE
from llmgw.cli.screen import Screen, look
from llmgw.cli.table import plain_lines
from llmgw.control import client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from llmgw.cli.asking import Asker

USAGE = "llmgw top [--once] [--json] [--interval SECONDS]"
DETAILS = """\
Rates and times are those of the last 10 seconds; with --once of one interval. FIRST TOKEN is the time that half of
the streams took to their first token, P95 what 95 of 100 took at most. Where the output is no terminal, --once is
meant, unless --json is given: then one object per interval.

examples:
  llmgw top
  llmgw top --once --json | jq '.bands[] | {model, band, first_token_p95_seconds}'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="two looks, one picture")
    parser.add_argument("--json", action="store_true", help="one JSON object; without --once one per interval")
    parser.add_argument(
        "-i", "--interval", type=_interval, default=1.0, metavar="SECONDS", help="between two looks; 1, at least 0.2"
    )


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.2 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.2 to 3600")
    return seconds


def run(args: argparse.Namespace) -> int:
    from llmgw.cli.asking import Asker

    ask = Asker.of(args)
    screen = look(args.color)
    history = view.History()
    observe(ask, history)  # no llmgw at all ends it now rather than never
    if args.once or not (args.json or screen.live):
        time.sleep(args.interval)
        observe(ask, history)
        show_once(history, screen, as_json=args.json)
    elif args.json:
        follow_json(ask, history, args.interval)
    else:
        follow(ask, history, args.color, args.interval)
    return DONE


def observe(ask: Asker, history: view.History) -> None:
    """One look. Raises ClientError."""
    history.add(ask.status())
    history.note(ask.stream(f"/v1/events?since={history.sequence}&follow=0"))


def show_once(history: view.History, screen: Screen, *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(view.as_json(history), ensure_ascii=not screen.unicode))
    elif screen.drawn:
        from llmgw.cli.table import console
        from llmgw.cli.top_picture import drawn

        out = console(screen)
        with out.capture() as captured:
            out.print(drawn(history, screen))
        sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")
    else:
        sys.stdout.write("\n".join(plain(history, unicode=screen.unicode)) + "\n")


def plain(history: view.History, *, unicode: bool) -> list[str]:
    """The whole picture as text: nothing cut, no colour."""
    lines = view.head_lines(history)
    for table in view.tables(history, unicode=unicode):
        lines += ["", *plain_lines(table.columns, table.rows), *left_out(table)]
    failures = view.failure_lines(history)
    return [*lines, *(("", "last failures", *failures) if failures else ())]


def left_out(table: view.Table) -> list[str]:
    return [f"and {table.left_out} more, less busy"] if table.left_out else []


def follow_json(ask: Asker, history: view.History, interval: float) -> None:
    """One object per look, until Ctrl-C or until the reader is gone."""
    import json

    connected = True
    while True:
        time.sleep(interval)
        try:
            observe(ask, history)
        except client.ClientError as error:
            if connected:
                print(f"{error.message}; trying again", file=sys.stderr)
            connected = False
        else:
            connected = True
            print(json.dumps(view.as_json(history)), flush=True)


def follow(ask: Asker, history: view.History, color: str, interval: float) -> None:
    """The whole screen, redrawn until Ctrl-C."""
    from rich.live import Live

    from llmgw.cli.table import console
    from llmgw.cli.top_picture import drawn

    out = console(look(color))
    # auto_refresh would start a thread; every look refreshes instead.
    with Live(console=out, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        lost: str | None = None
        while True:
            # The terminal may have got another size since.
            screen = look(color)
            out.width = screen.width
            live.update(drawn(history, screen, lost=lost), refresh=True)
            time.sleep(interval)
            try:
                observe(ask, history)
                lost = None
            except client.ClientError as error:
                # What was last seen stays in sight while llmgw is being restarted.
                lost = f"trying again: {error.message}"
