"""Which GPUs a shard gets, as pure functions of a spec and an inventory. Called by check, plan and right before a
launch; it never asks the host and never remembers anything."""
