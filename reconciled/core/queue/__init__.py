"""The work queue: keys, priorities, delays and fairness. Pure; time is handed in."""
