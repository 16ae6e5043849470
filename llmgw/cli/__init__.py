"""The `llmgw` command: one module per verb. A verb parses its options, asks the running llmgw through
`control.client` or calls a pure function, and draws. Nothing here decides anything about engines.

`main` imports only the module of the verb that was called, and a verb imports what is heavy (trio, httpx, attrs, rich)
inside the function that needs it: an operator's `status` has to be there at once.
"""
