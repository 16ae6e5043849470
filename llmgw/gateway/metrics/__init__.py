"""What the gateway counts, and how it is told: Prometheus families and the access log."""
