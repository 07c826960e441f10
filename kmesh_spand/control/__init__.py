"""The control process: sessions in, effects out. ``process.run`` is its entry."""
