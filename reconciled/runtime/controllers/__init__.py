"""Controllers: from a configuration to sources, desired state and a queue of keys."""
