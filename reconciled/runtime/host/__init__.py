"""The machine and its service manager: status, unit, listeners, shutdown of the machine."""
