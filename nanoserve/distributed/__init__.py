"""Several processes that run one model together: see multiproc.py and ranks.py.

vLLM's examples end with a call of `cleanup_dist_env_and_memory`. It is here under that name.
"""

import gc
import sys


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that nobody holds any more (`del llm`); LLM.close() does the same
    at once. Other engines of this process go on. shutdown_ray: also end this process's connection
    to Ray, and with it the engines whose ranks are there, and a Ray that they have started."""
    gc.collect()
    if shutdown_ray and "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.empty_cache()
