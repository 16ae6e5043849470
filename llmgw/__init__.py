"""llmgw: runs LLM engines on a team's own GPU servers. Kept empty: `llmgw status` must start at once."""

__version__ = "0.1.0"
