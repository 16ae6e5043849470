"""What the board and the node tell, as Prometheus families. Snapshots in, families out."""
