"""A 2-bit base in VRAM drafts, base + residual in RAM verifies, one KV cache serves both.

>>> from twofold import Llama            # was: from llama_cpp import Llama
>>> llm = Llama(model_path="smollm2.base.gguf", n_ctx=4096, draft_tokens=4)
"""

from twofold.errors import TwofoldError
from twofold.llama import Llama

__version__ = "0.1.0"
__all__ = ["Llama", "TwofoldError", "__version__"]
