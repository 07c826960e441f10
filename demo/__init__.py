"""`make demo`: two vLLM servers share KV state through one kmesh-spand. Not part of the package."""
