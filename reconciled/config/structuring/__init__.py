"""Plain data as objects of attrs classes, strictly, every fault with its place."""
