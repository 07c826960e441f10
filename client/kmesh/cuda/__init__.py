"""GPU memory through the CUDA driver: made, exported, imported, mapped, registered."""
