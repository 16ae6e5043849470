"""One module per imitated program; `llmgw.fake.engine` imports the one that was asked for, and only that."""
