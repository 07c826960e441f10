"""The control process: sessions in, effects out. ``entry.run`` is its beginning."""
