"""Sources: a directory of manifests, intervals and cron times."""
