"""The host and its service manager: status, unit, sockets, and a shutdown of the machine."""
