"""The doors: command line, HTTP server, AsyncLLM, and the names that users of vLLM know."""
