"""Structures plain data into attrs classes: strictly, every fault with its location."""
