"""The CPU reference platform: what a stock SGLang lacks to run on a machine without a GPU."""
