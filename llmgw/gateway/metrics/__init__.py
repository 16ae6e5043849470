"""What the gateway counts, and how it is told: Prometheus families, the engines' own series, the access log.

The data path calls `counting` and `access_log` through `answering.Observer`; `llmgw.daemon` has the rest rendered.
"""
