"""The unit that runs the daemon: read from the service manager, compared with the stop budget."""
