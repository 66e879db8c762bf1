"""The engine as Python drives it: loading, requests, threads, the calls that LLM and AsyncEngine share."""
