"""Following shards while they change: redrawn lines on a terminal, one line per change of state in a pipe."""

from __future__ import annotations

import sys
import time

from llmgw.cli import status_view as view
from llmgw.control import client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from rich.live import Live

    from llmgw.cli.asking import Asker
    from llmgw.cli.screen import Screen


class Follower:
    """Shows shards as they change. `quiet` shows nothing; leaving the block takes redrawn lines away."""

    def __init__(self, screen: Screen, *, quiet: bool = False) -> None:
        self._screen = screen
        self._quiet = quiet
        self._live: Live | None = None
        self._told: dict[str, tuple[Any, ...]] = {}

    def __enter__(self) -> Follower:
        if self._screen.live and not self._quiet:
            from rich.live import Live

            from llmgw.cli.table import console

            # auto_refresh would start a thread; every look refreshes instead.
            self._live = Live(console=console(self._screen), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            # Whatever is drawn once more at the end must be nothing.
            self._live.update("", refresh=True)
            self._live.stop()

    def show(self, shards: Sequence[Any], now: float) -> None:
        if self._quiet:
            return
        if self._live is not None:
            from rich.text import Text

            from llmgw.cli.table import shortened

            width, unicode = self._screen.width - 1, self._screen.unicode
            lines = [shortened(view.one_line(shard, now, unicode=unicode), width, unicode=unicode) for shard in shards]
            self._live.update(Text("\n".join(lines)), refresh=True)
            return
        for shard in shards:
            key = (shard["state"], shard["generation"], shard.get("next_attempt"))
            if self._told.get(shard["name"]) != key:
                self._told[shard["name"]] = key
                self.say(view.one_line(shard, now, unicode=self._screen.unicode))

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.console.print(line)
        else:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def watch_live(ask: Asker, names: list[str], screen: Screen, interval: float) -> None:
    """The whole picture, redrawn until Ctrl-C."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from llmgw.cli.status_picture import drawn
    from llmgw.cli.table import console

    picture: Any = Text("")
    with Live(console=console(screen), auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            try:
                answer = ask.status()
                picture = drawn(answer, view.chosen(answer, names)[0], screen, wrapped=True)
                live.update(picture, refresh=True)
            except client.ClientError as error:
                # What was last seen stays in sight while llmgw is being restarted.
                style = "red" if screen.colour else ""
                lost = Text(f"{error.message}; trying again", style=style, no_wrap=False, overflow="fold")
                live.update(Group(lost, picture), refresh=True)
            time.sleep(interval)


def watch_lines(ask: Asker, names: list[str], screen: Screen, interval: float) -> None:
    """One line per change of state, until Ctrl-C or until the reader is gone."""
    with Follower(screen) as follower:
        connected = True
        while True:
            try:
                answer = ask.status()
            except client.ClientError as error:
                if connected:
                    print(f"{error.message}; trying again", file=sys.stderr)
                connected = False
            else:
                connected = True
                follower.show(view.chosen(answer, names)[0], answer["now"])
            time.sleep(interval)


def watch_json(ask: Asker, names: list[str], interval: float) -> None:
    """One object per revision, until Ctrl-C or until the reader is gone."""
    import json

    revision = None
    while True:
        answer = ask.status()
        if answer["revision"] != revision:
            revision = answer["revision"]
            print(json.dumps({**answer, "shards": view.chosen(answer, names)[0]}), flush=True)
        time.sleep(interval)
