"""The pure core: values and decisions. No I/O, no trio, no logging, no clock of its own."""
