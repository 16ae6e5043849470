"""Stand-ins for inference engines and for nvidia-smi, shipped so that a configuration can be tried without a GPU.

Started as programs (`llmgw-fake-engine`, `llmgw-fake-nvidia-smi`) by users, tests and benchmarks, exactly as
the real programs would be. Uses the standard library only and never imports another part of llmgw: a stand-in
that shared code with the supervisor would share its mistakes too.

What is imitated was measured on vLLM 0.32, SGLang 0.5.23 and llama-server 11434. Times are the real ones
multiplied by one factor (`--fake-time-factor`); every oddity is on by default and has a knob
(`llmgw-fake-engine --fake-help`).
"""
