"""Processes of engines: the front door. Launch, adoption, sweep and upgrade import from here.

Nothing in here knows engines, states or configuration; it decides nothing but whose a process is.
"""

from llmgw.supervisor.adoption import adopt, leftovers_of, why_not_believed
from llmgw.supervisor.cgroup import Cgroup, find_own_cgroup
from llmgw.supervisor.children import Children
from llmgw.supervisor.family import EngineProcesses, Exit, StopOutcome, TermTo
from llmgw.supervisor.gate import GatedChild, SpawnFailed, spawn_engine
from llmgw.supervisor.members import Member
from llmgw.supervisor.procfs import ProcessId, boot_id, identify, ticks_now

__all__ = [
    "Cgroup",
    "Children",
    "EngineProcesses",
    "Exit",
    "GatedChild",
    "Member",
    "ProcessId",
    "SpawnFailed",
    "StopOutcome",
    "TermTo",
    "adopt",
    "boot_id",
    "find_own_cgroup",
    "identify",
    "leftovers_of",
    "spawn_engine",
    "ticks_now",
    "why_not_believed",
]
