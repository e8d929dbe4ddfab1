"""What is remembered across starts: the state directory's lock, the store, operations."""
