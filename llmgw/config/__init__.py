"""Text in, `Config` out. Called by the daemon, by `check`, `plan`, `explain` and `config show`.

Everything but `load.py` is pure: files, environment and facts about the host are arguments. A user's mistake is a
`Problem`, never an exception, and all of them are reported at once. Nothing here starts, stops or changes anything.
"""
