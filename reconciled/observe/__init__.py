"""The daemon's output: logs, the live task tree, the report of a stop."""
