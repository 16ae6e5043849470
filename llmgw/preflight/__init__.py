"""May it run here? Pure rules over specs and facts about the host. Called by check, by run, and again right before
each launch. It never asks the host itself, never changes anything, and knows nothing of what is running but the pids
it is told are llmgw's own."""
