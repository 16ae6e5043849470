"""The numbers of llmgw as Prometheus reads them: which there are, what board and node tell, how a page is written.

Used by the control socket's `/metrics` and by the gateway's. It reads snapshots and changes nothing.
"""
