"""Where a request may go, and which of these places it goes to. Pure: snapshots in, choices out."""
