"""The OpenAI-compatible door: requests in, fairly queued, to engines that are ready, and their answers back.

Called by `llmgw.daemon` alone. It knows the board and never the supervisor: what it may route to it reads in
snapshots, and what it wishes (load, unload) it asks of the board like everybody else.
"""
