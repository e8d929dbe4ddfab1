"""Work of verbs without the daemon: scan all sources once, plan, and check secrets."""
