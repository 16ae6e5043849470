"""What holds for every test."""

from __future__ import annotations

import signal

# A shell without job control starts what it puts into the background with SIGINT ignored, and nohup with SIGHUP; that
# is inherited over exec, and programs under test would not hear the signals that their tests send.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
