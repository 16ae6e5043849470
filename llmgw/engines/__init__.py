"""Engines: a launch plan goes in, the exact command comes out; output and exit go in, words come out.

Called by `config` (which options are llmgw's own), by the daemon (commands, profiles) and by the supervisor
(progress, activity, diagnosis). Nothing here runs a program, asks a socket or reads a file.
"""
