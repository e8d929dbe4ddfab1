"""The built-in reconcilers: they import what any plugin may import, reconciled.api, and no more."""
