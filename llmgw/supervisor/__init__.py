"""Engines as processes: their start, their life and their end, what is on disk about them, what they print and answer.

Called by the daemon alone; `sweep` is also called by its verb. It never reads configuration files and never talks to
clients: `board.py` stands between.
"""
