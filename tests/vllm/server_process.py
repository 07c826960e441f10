"""vLLM's OpenAI server, whose output all goes to stderr."""

import os
import runpy

# What it spawns loads this again.
if __name__ == "__main__":
    os.dup2(2, 1)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
