"""Controllers: loaded from a configuration, each with watchers, desired state and a lane."""
