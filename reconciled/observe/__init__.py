"""What the daemon tells people: logs, the live task tree, the report of a stop."""
