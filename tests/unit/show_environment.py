"""Run by `accelerate launch` in test_launch_config: rank 0 prints its environment."""

import os

if os.environ["RANK"] == "0":
    print("ENV " + "\x1f".join(f"{k}={v}" for k, v in os.environ.items() if "\n" not in v), flush=True)
