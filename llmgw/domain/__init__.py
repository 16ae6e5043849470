"""The shared words: frozen values that every part speaks in. No I/O, no clock, nothing of trio."""
