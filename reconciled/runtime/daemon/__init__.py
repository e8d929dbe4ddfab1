"""The daemon as a whole: start, nursery tree, commands, reload, stop and maintenance."""
