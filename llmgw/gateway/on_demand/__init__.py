"""Loading what is asked for and unloading what is idle. Decisions are pure; `loader` asks the board for them."""
