"""Requests to a running daemon: the control socket of the verbs, and health over HTTP."""
