"""The pure part of the daemon: events in, effects out. No clock, no loop, no socket."""
