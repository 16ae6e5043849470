"""The gateway put together from its rooms: what `llmgw run` starts, and tests and benchmarks too."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from llmgw.board import Board, Cell
from llmgw.config.model import Config
from llmgw.gateway.admission.desk import Desk
from llmgw.gateway.answering import Answering, Observer
from llmgw.gateway.in_force import InForce
from llmgw.gateway.own_pages import OwnPages, Page, RenderMetrics
from llmgw.gateway.routing.policies import Chooser
from llmgw.gateway.routing.table import Model
from llmgw.gateway.server import Gateway

REQUEST_ID_BYTES = 12
"""Random bytes of a request id that llmgw makes."""


def make_gateway(
    board: Board,
    config: Cell[Config],
    listeners: Cell[tuple[socket.socket, ...]],
    *,
    observer: Observer,
    metrics: RenderMetrics,
    status: Callable[[], dict[str, Any]],
    ui: Page,
    estimate: Callable[[Model], float | None],
    chance: Callable[[], float],
    now: Callable[[], float] = time.monotonic,
) -> Gateway:
    """A gateway that is ready to run; the configuration has a [gateway]. `estimate` says how many seconds a model that
    is not ready still needs, None where nobody knows.
    """
    gateway = config.value.gateway
    assert gateway is not None
    chooser = Chooser(gateway.routing, chance)
    desk = Desk(gateway, chooser, now=now)

    def make_answering(in_force: InForce) -> Answering:
        pages = OwnPages(in_force, metrics=metrics, status=status, ui=ui, clock=time.time)
        return Answering(
            in_force,
            desk=desk,
            observer=observer,
            own_pages=pages,
            now=now,
            new_id=lambda: secrets.token_hex(REQUEST_ID_BYTES),
        )

    return Gateway(
        board,
        config,
        listeners,
        desk=desk,
        chooser=chooser,
        estimate=estimate,
        make_answering=make_answering,
        now=now,
    )
