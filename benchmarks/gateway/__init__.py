"""What the gateway costs beside other proxies: `python -m benchmarks.gateway`."""
