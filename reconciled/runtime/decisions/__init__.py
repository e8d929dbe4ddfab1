"""People's decisions on held operations and held removals, carried out by the daemon."""
