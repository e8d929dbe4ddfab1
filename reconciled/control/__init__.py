"""How a running daemon is asked: the control socket of the verbs, and health over HTTP."""
