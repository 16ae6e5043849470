"""What a request says and what an answer to it looks like, in bytes. Pure: nothing here reads a socket."""
