"""`twofold serve`: llama_cpp.server's application with our model, behind a gate that queues and limits.

`app` is the only door to llama_cpp.server; `gate` is what clients talk to.
"""
