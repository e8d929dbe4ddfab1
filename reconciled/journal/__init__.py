"""What survives a restart: the lock of the state directory, the store, operations, decisions."""
