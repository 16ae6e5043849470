"""A small HTTP/1 server for the control socket. Called by `control`; it knows nothing of shards, and the gateway does
not use it: its limits are those of a socket with a few patient clients."""
