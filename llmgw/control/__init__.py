"""The control socket: routes and wire format for the daemon, and a client for the verbs that imports next to nothing.

Questions are answered from the board, wishes go through `Board.ask`; it knows the daemon as `Services` only.
"""
