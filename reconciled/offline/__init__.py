"""What verbs do without a daemon: read all sources once, and plan."""
