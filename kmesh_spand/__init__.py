"""The daemon ``kmesh-spand``: owns KV memory and hands it to every engine on the node."""
